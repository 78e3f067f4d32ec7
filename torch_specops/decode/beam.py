"""Beam search with a draft: the beams of the target alone, several levels per forward (Leviathan et al. 2023, A.4)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import checks
from ..drafts import DraftSource, LanguageModel, ModelDraft
from .beam_scorer import BeamScorer
from .beam_tree import BeamTree, Level, TreeModel
from .choices import as_draft_source, as_language_model
from .output import GenerationOutput, GenerationStats
from .pair import check_pair, check_room
from .prompts import EosTokenIds, align_prompts, eos_tensor, per_row

__all__ = ["BeamOutput", "beam_search"]


@dataclass(frozen=True, kw_only=True)
class BeamOutput(GenerationOutput):
    """The best finished beams: R for each of B prompts, best one first, those of a prompt side by side.

    `sequences`, `prompt_lengths` and `lengths` have B * R rows; the keys of `errors` are prompts. In `stats` a step is
    a round, and a token is a level: one more token for all of a prompt's beams. So `mean_acceptance_length` is levels
    per round, and `num_accepted` of the `num_proposed` drafted levels held all of the target's beams.

    Args:
        scores: [B * R] float32, the summed log-probability of the new tokens / their number ** length_penalty.
    """

    scores: Tensor


@torch.inference_mode()
def beam_search(
    target: LanguageModel | nn.Module,
    input_ids: Tensor,
    *,
    num_beams: int,
    draft: DraftSource | LanguageModel | nn.Module | None = None,
    draft_beams: int | None = None,
    attention_mask: Tensor | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    num_draft_tokens: int = 5,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    num_return_sequences: int = 1,
    eos_token_id: EosTokenIds = None,
    pad_token_id: int | None = None,
    inputs: Mapping[str, Tensor] | None = None,
) -> BeamOutput:
    """Beam search, with the beams that transformers' `generate(num_beams=w, do_sample=False)` finds.

    In a round the draft searches K levels deep with u beams, beginning at the target's w beams; one forward of the
    target reads all these nodes, as a tree in one row of its cache. Then the target's beams are advanced level by
    level, for as long as all of them are among the nodes that were read. So a round decides 1 to K + 1 levels, and the
    draft has no part in the result, up to the rounding of the target's forwards.

    Args:
        target: a transformers model, or a `TreeModel`.
        input_ids, attention_mask, max_new_tokens, eos_token_id, pad_token_id, inputs: as in
            `SpeculativeDecoder.generate`; max_new_tokens >= 1.
        num_beams: w >= 1; with 1 it is greedy decoding, as in transformers: the first eos is the end.
        draft: a smaller model, a `ModelDraft` or an `EarlyExit`; None = the target alone, a level per round.
        draft_beams: u >= w; None = w. More of them make it likelier that the target's beams are among them, and its
            forward wider.
        num_draft_tokens: K >= 0.
        length_penalty: finished beams are compared by score / number of new tokens ** length_penalty.
        early_stopping: when a prompt with w finished beams is done. True: at once. False: when the best running beam,
            at its length, scores no better than the worst finished one. "never": when it could not at any length.
        num_return_sequences: R, 1 to num_beams.

    Returns:
        `BeamOutput`. Where no continuation has a finite score a prompt ends with its running beams as they are, an
        entry in `errors`, and a warning.

    Raises:
        TypeError, ValueError: by name; a draft that is no model; a model that cannot read a tree.

    Example:
        >>> import torch, transformers
        >>> from torch_specops.decode import beam_search
        >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
        >>> target = transformers.LlamaForCausalLM(config).eval()
        >>> output = beam_search(target, torch.tensor([[5, 6, 7]]), num_beams=3, max_new_tokens=8, draft=target,
        ...     num_return_sequences=2)
        >>> output.sequences.shape, output.scores.shape, output.stats.acceptance_rate
        (torch.Size([2, 11]), torch.Size([2]), 1.0)
    """
    checks.check_int("num_beams", num_beams, 1)
    checks.check_int("num_draft_tokens", num_draft_tokens, 0)
    checks.check_int("num_return_sequences", num_return_sequences, 1)
    if num_return_sequences > num_beams:
        raise ValueError(f"num_return_sequences: expected at most num_beams = {num_beams}, got {num_return_sequences}")
    width = num_beams if draft_beams is None else draft_beams
    checks.check_int("draft_beams", width, num_beams)
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise ValueError(f"early_stopping: expected True, False or 'never', got {early_stopping!r}")
    checks.check_numbers(length_penalty=length_penalty)
    model = _tree_model("target", as_language_model("target", target))
    draft_model = _draft_model(draft, model)

    prompts, lengths = align_prompts(input_ids, attention_mask, model.vocab_size)
    prompts, lengths = prompts.to(model.device), lengths.to(model.device)
    limits = per_row("max_new_tokens", max_new_tokens, prompts.shape[0], 1).to(model.device)
    check_room(model, draft_model, int((lengths + limits).max()))
    eos_ids = getattr(model, "eos_token_ids", ()) if eos_token_id is None else eos_token_id
    eos = eos_tensor(eos_ids, prompts.shape[0]).to(model.device)
    if pad_token_id is None:
        pad_token_id = getattr(model, "pad_token_id", None)
    else:
        checks.check_int("pad_token_id", pad_token_id, 0)
    # A single beam is greedy decoding: its first eos is the end.
    scorer = BeamScorer(num_beams, limits, eos, float(length_penalty), num_beams == 1 or early_stopping)
    widest = max(scorer.num_candidates, 0 if draft_model is None else width)
    if widest > num_beams * model.vocab_size:
        raise ValueError(
            f"num_beams: expected the {num_beams} beams to have {widest} continuations, "
            f"got {num_beams} x {model.vocab_size} tokens"
        )

    search = _Search(model, draft_model, scorer, width, num_draft_tokens)
    search.start(prompts, lengths, inputs)
    search.run()
    output = _output(search, prompts, lengths, num_return_sequences, pad_token_id)
    for row, error in output.errors.items():
        # The decorator stands between this line and the caller's.
        warnings.warn(f"row {row}: {error}", RuntimeWarning, stacklevel=3)
    return output


class _Search:
    """One batch: the models, the beams, and the tree that both models read."""

    def __init__(
        self, target: TreeModel, draft: TreeModel | None, scorer: BeamScorer, draft_beams: int, num_draft_tokens: int
    ) -> None:
        self.target = target
        self.draft = draft
        self.scorer = scorer
        self.draft_beams = draft_beams
        self.num_draft_tokens = 0 if draft is None else num_draft_tokens
        self.stats = GenerationStats(seeds=[], compiled="eager: beam search is not compiled")

    def start(self, prompts: Tensor, lengths: Tensor, inputs: Mapping[str, Tensor] | None) -> None:
        """Read all but the newest token of every prompt."""
        started = time.perf_counter()
        batch, longest = prompts.shape
        num_beams = self.scorer.num_beams
        # Every level that is kept takes w slots at most, and the nodes of a round stand beside them.
        num_kept = int((lengths + num_beams * self.scorer.limits).max())
        num_slots = num_kept + num_beams + self.draft_beams * self.num_draft_tokens
        self.tree = BeamTree(prompts, lengths, num_beams, num_slots)
        positions = torch.arange(longest - 1, device=prompts.device).expand(batch, -1)
        for model in (self.target, self.draft):
            if model is None:
                continue
            model.start(batch, num_slots, inputs)
            if longest > 1:
                model.forward(prompts[:, :-1], positions, 1)
        # The draft proposes no eos: a beam that ends has no next level. -1 becomes the column that is cut off.
        eos = torch.where(self.scorer.eos < self.target.vocab_size, self.scorer.eos, -1) % (self.target.vocab_size + 1)
        is_eos = torch.zeros(batch, self.target.vocab_size + 1, dtype=torch.bool, device=prompts.device)
        self._is_eos = is_eos.scatter(1, eos, True)[:, None, : self.target.vocab_size]
        self._num_live = longest - 1
        if prompts.device.type == "cuda":
            torch.cuda.synchronize(prompts.device)
        self.stats.prefill_seconds = time.perf_counter() - started

    def run(self) -> None:
        room = self.scorer.limits.tolist()
        draft_lags = False
        while any(room):
            started = time.perf_counter()
            num_draft_tokens = min(self.num_draft_tokens, max(room) - 1)
            record = self._round(num_draft_tokens, draft_lags).tolist()
            num_levels, left, live = ([row[column] for row in record] for column in range(3))
            self._num_live = max(live)
            # The last level that was drafted is one that the draft did not read.
            draft_lags = any(levels > num_draft_tokens for levels in num_levels)
            _add(self.stats, num_levels, [min(num_draft_tokens, row - 1) for row in room])
            self.stats.seconds += time.perf_counter() - started
            room = left

    def _round(self, num_draft_tokens: int, draft_lags: bool) -> Tensor:
        """Draft, read, and advance the beams as far as they were read.

        Returns:
            [B, 3] int64: levels decided, levels that may follow (0: the row has ended), and slots taken.
        """
        scorer, tree = self.scorer, self.tree
        levels = self._propose(num_draft_tokens, draft_lags)
        logits = tree.read(self.target, levels).split([level.tokens.shape[1] for level in levels], 1)
        before = scorer.counts
        active = ~scorer.done
        nodes = levels[0].parents
        last, newest = nodes, tree.tokens
        first = 0
        for depth, level in enumerate(levels):
            own = nodes.unsqueeze(2).expand(-1, -1, self.target.vocab_size)
            parents, tokens = scorer.advance(logits[depth].gather(1, own) if depth else logits[0], active)
            nodes = nodes.gather(1, parents)
            last = torch.where(active.unsqueeze(1), first + nodes, last)
            newest = torch.where(active.unsqueeze(1), tokens, newest)
            first += level.tokens.shape[1]
            if depth == num_draft_tokens:
                break
            is_read, nodes = levels[depth + 1].index_of(nodes, tokens)
            active = active & is_read.all(1) & ~scorer.done
            # On a CPU looking costs nothing, and the levels that follow are not reached by any row.
            if active.device.type == "cpu" and not bool(active.any()):
                break
        num_levels = scorer.counts - before
        tree.move(last, newest, num_levels, scorer.done)
        left = torch.where(scorer.done, 0, scorer.limits - scorer.counts)
        return torch.stack([num_levels, left, tree.num_live()], 1)

    def _propose(self, num_draft_tokens: int, draft_lags: bool) -> list[Level]:
        """The draft's beam search of width u, from the target's beams and their scores."""
        tree, scores = self.tree, self.scorer.scores
        num_nodes = self.scorer.num_beams + self.draft_beams * num_draft_tokens
        levels = [tree.begin(num_nodes, self._num_live)]
        for depth in range(num_draft_tokens):
            assert self.draft is not None
            logits = tree.read(self.draft, levels[-1:], with_parents=draft_lags and depth == 0)
            log_probs = logits.float().log_softmax(-1).masked_fill(self._is_eos, -torch.inf)
            scores, index = (log_probs + scores.unsqueeze(2)).flatten(1).topk(self.draft_beams)
            levels.append(tree.grow(index // logits.shape[2], index % logits.shape[2]))
        return levels


def _add(stats: GenerationStats, num_levels: list[int], num_proposed: list[int]) -> None:
    stats.num_steps += 1
    for levels, proposed in zip(num_levels, num_proposed, strict=True):
        if levels == 0:
            continue
        stats.num_row_steps += 1
        stats.num_tokens += levels
        stats.num_accepted += levels - 1
        stats.num_proposed += proposed
        missing = proposed - len(stats.proposed_at)
        stats.proposed_at += [0] * missing
        stats.accepted_at += [0] * missing
        for depth in range(proposed):
            stats.proposed_at[depth] += 1
            stats.accepted_at[depth] += depth < levels - 1


def _output(
    search: _Search, prompts: Tensor, prompt_lengths: Tensor, num_sequences: int, pad_token_id: int | None
) -> BeamOutput:
    scorer = search.scorer
    tokens, num_new, scores = scorer.result(num_sequences)
    if pad_token_id is None:
        pad_token_id = max(int(scorer.eos[0, 0]), 0)
    longest = prompts.shape[1]
    before = prompt_lengths[:, None, None]
    lengths = prompt_lengths.unsqueeze(1) + num_new
    index = torch.arange(int(lengths.max()), device=tokens.device)
    source = torch.cat([prompts.unsqueeze(1).expand(-1, num_sequences, -1), tokens], 2)
    place = torch.where(index < before, index, longest + index - before).clamp(max=source.shape[2] - 1)
    sequences = source.gather(2, place.expand(-1, num_sequences, -1))
    failed, counts = scorer.failed.nonzero().flatten().tolist(), scorer.counts
    return BeamOutput(
        sequences=torch.where(index < lengths.unsqueeze(2), sequences, pad_token_id).flatten(0, 1),
        prompt_lengths=prompt_lengths.repeat_interleave(num_sequences),
        lengths=lengths.flatten(),
        stats=search.stats,
        errors={row: f"target: no finite score after {int(counts[row])} new tokens" for row in failed},
        scores=scores.flatten(),
    )


def _tree_model(name: str, model: LanguageModel) -> TreeModel:
    if not isinstance(model, TreeModel):
        raise TypeError(
            f"{name}: beam search reads trees; expected a transformers model or a TreeModel, got {type(model)}"
        )
    return model


def _draft_model(draft: DraftSource | LanguageModel | nn.Module | None, target: TreeModel) -> TreeModel | None:
    source = as_draft_source(draft)
    if source is None:
        return None
    # A source that proposes in a way of its own is more than its model, and that part would be lost.
    if not isinstance(source, ModelDraft) or type(source).propose is not ModelDraft.propose:
        raise TypeError(f"draft: beam search follows a model's own beams; expected a model or None, got {type(draft)}")
    source.bind(target)
    model = _tree_model("draft", source.model)
    check_pair(target, model)
    return model
