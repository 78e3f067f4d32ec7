"""Beam search with a draft (Leviathan et al. 2023, appendix A.4). The search finds the same beams as without a draft,
and decides several levels per forward of the target."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from .. import checks
from ..decode.guard import Guard
from ..decode.inputs import EosTokenIds, PromptIds, Prompts, check_room, read_prompts
from ..decode.output import GenerationOutput, GenerationStats
from ..drafts import AnyDraft, DraftSource, ModelDraft
from ..drafts.model import as_draft_source
from ..models.base import LanguageModel, TreeModel
from ..models.conversion import as_language_model
from ..models.reading import begin_texts
from ..ops.tracing import normal_tensors
from .scorer import BeamScorer
from .tree import BeamTree, rows_of


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BeamOutput(GenerationOutput):
    """The R best finished beams of each of B prompts. The beams of a prompt are adjacent rows, best first.

    `sequences`, `prompt_lengths` and `lengths` have B * R rows; the keys of `errors` are prompts. In `stats`, a step is
    a round, and a token is a level, which adds one token to every beam of a prompt. So `mean_acceptance_length` is the
    number of levels per round, and `num_accepted` counts the drafted levels that contained all of the target's beams.

    Args:
        scores: [B * R] float32, the summed log-probability of the new tokens, divided by (number of new tokens) **
            length_penalty.
    """

    scores: Tensor


def beam_search(
    target: LanguageModel | nn.Module,
    input_ids: PromptIds,
    *,
    num_beams: int,
    draft: AnyDraft = None,
    draft_beams: int | None = None,
    attention_mask: Tensor | Sequence[Sequence[int] | Tensor] | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    num_draft_tokens: int = 5,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    num_return_sequences: int = 1,
    eos_token_id: EosTokenIds = None,
    pad_token_id: int | None = None,
    inputs: Mapping[str, Tensor] | None = None,
) -> BeamOutput:
    """Beam search that returns the beams of transformers' `generate(num_beams=w, do_sample=False)`.

    In a round, the draft searches K levels deep with u beams, starting from the target's w beams. One forward of the
    target reads all drafted tokens, as the nodes of a tree in one row of its cache. Then the target's beams advance
    level by level, as long as all of them are among these nodes. So a round decides 1 to K + 1 levels. The draft does
    not change the result, up to the rounding of the target's forwards. Nothing is compiled.

    Args:
        target: a transformers model, or a `TreeModel`.
        input_ids: as `generate` takes it.
        num_beams: w >= 1; 1 is greedy decoding, as in transformers.
        draft: a smaller model, a `ModelDraft` or an `EarlyExit`; None = the target alone, one level per round. Drafting
            stops once the longest sequence is longer than the draft can read.
        draft_beams: u >= w; None = w. A larger u makes it more likely that the draft's beams contain the target's, but
            forwards are wider.
        attention_mask: [B, P], 1 for tokens and 0 for padding; None = no padding.
        max_new_tokens: the most tokens to emit, one number or [B], >= 1.
        num_draft_tokens: the number of levels drafted per round, K >= 0.
        length_penalty: finished beams are compared by score / (number of new tokens) ** length_penalty.
        early_stopping: when the search ends for a prompt with w finished beams. True = at once. False = when the best
            running beam, at its current length, scores no better than the worst finished beam. "never" = when it could
            not score better at any length.
        num_return_sequences: R, 1 to num_beams.
        eos_token_id: a token, several, or a list for each row; () = none. None = as in the target's generation
            config.
        pad_token_id: fills rows after their end; None = the target's, else its first eos, else 0.
        inputs: the inputs of the target's encoder, by name, as in `SpeculativeDecoder.generate`.

    Returns:
        `BeamOutput`. If no continuation of a prompt has a finite score, its running beams are returned as they are,
        with an entry in `errors` and a warning.

    Raises:
        TypeError, ValueError: a wrong argument, by name; a draft that is not a model; a model that cannot read a tree.
        RuntimeError: another thread is using the same `LanguageModel` as a target or a draft.

    Examples:
        >>> import torch, transformers
        >>> from torch_specops.beam import beam_search
        >>> config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None)
        >>> target = transformers.GPT2LMHeadModel(config).eval()
        >>> output = beam_search(target, torch.tensor([[5, 6, 7]]), num_beams=3, max_new_tokens=8, draft=target,
        ...     num_return_sequences=2)
        >>> output.sequences.shape, output.scores.shape, output.stats.acceptance_rate
        (torch.Size([2, 11]), torch.Size([2]), 1.0)
    """
    num_beams = checks.check_int("num_beams", num_beams, 1)
    num_draft_tokens = checks.check_int("num_draft_tokens", num_draft_tokens, 0)
    num_return_sequences = checks.check_int("num_return_sequences", num_return_sequences, 1)
    if num_return_sequences > num_beams:
        raise ValueError(f"num_return_sequences: expected at most num_beams = {num_beams}, got {num_return_sequences}")
    width = num_beams if draft_beams is None else checks.check_int("draft_beams", draft_beams, num_beams)
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise ValueError(f"early_stopping: expected True, False or 'never', got {early_stopping!r}")
    length_penalty = checks.check_number("length_penalty", length_penalty)
    model = _tree_model("target", as_language_model("target", target))
    source = as_draft_source(draft)
    guard = Guard(model, source)
    draft_model = _draft_model(source, guard)
    with guard.working():
        guard.look_for_call()

    if inputs and model.reads_images:
        raise ValueError("inputs: beam search reads no images; expected none, and a prompt of text")
    prompts = read_prompts(
        model,
        input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        # Beam search draws nothing, so the seed has no effect.
        seed=0,
        min_new_tokens=1,
    )
    state = prompts.state
    check_room(model, int(state.limits.max()))
    readable = None if draft_model is None else draft_model.max_length
    if readable is not None and int(state.lengths.max()) > readable:
        draft_model = None
    new_tokens = (state.limits - state.lengths).to(model.device)
    # With one beam, stop at the first eos, as greedy decoding does.
    scorer = BeamScorer(
        num_beams, new_tokens, state.eos.to(model.device), float(length_penalty), num_beams == 1 or early_stopping
    )
    widest = max(scorer.num_candidates, 0 if draft_model is None else width)
    if widest > num_beams * model.vocab_size:
        raise ValueError(
            f"num_beams: expected the {num_beams} beams to have {widest} continuations, "
            f"got {num_beams} x {model.vocab_size} tokens"
        )

    stats = GenerationStats(seeds=[], compiled="eager: beam search is not compiled")
    search = _Search(model, draft_model, scorer, width, 0 if draft_model is None else num_draft_tokens, stats)
    with guard.working(), guard.computing(guard.begin_stream()):
        search.run(state.tokens.to(model.device), state.lengths.to(model.device), inputs)
    output = _output(search, prompts, num_return_sequences)
    for row, error in output.errors.items():
        warnings.warn(f"row {row}: {error}", RuntimeWarning, stacklevel=2)
    return output


@dataclass
class _Search:
    """The search of one batch: the models, the beams, and the tree that both models read."""

    target: TreeModel
    draft: TreeModel | None
    scorer: BeamScorer
    draft_beams: int
    num_draft_tokens: int
    stats: GenerationStats

    def run(self, prompts: Tensor, lengths: Tensor, inputs: Mapping[str, Tensor] | None) -> None:
        self._start(prompts, lengths, inputs)
        room, num_live = self.scorer.limits.tolist(), prompts.shape[1] - 1
        text_lengths, draft_lags = lengths.tolist(), False
        while any(room):
            started = time.perf_counter()
            num_draft_tokens = min(self._most_drafts(max(text_lengths)), max(room) - 1)
            self.tree.begin(self.scorer.num_beams + self.draft_beams * num_draft_tokens, num_live)
            self._propose(num_draft_tokens, draft_lags)
            num_levels, left, live = self._verify().tolist()
            num_live = max(live)
            text_lengths = [length + levels for length, levels in zip(text_lengths, num_levels, strict=True)]
            # If all drafted levels were accepted, the draft has not read the last of them.
            draft_lags = any(levels > num_draft_tokens for levels in num_levels)
            num_proposed = [min(num_draft_tokens, before - 1) for before in room]
            self.stats.add(num_levels, [levels - 1 for levels in num_levels], num_proposed)
            self.stats.seconds += time.perf_counter() - started
            room = left

    def _most_drafts(self, longest: int) -> int:
        """The largest number of levels that the draft can read after sequences of up to `longest` tokens. Once this is
        0, the draft is not used again, because it has not read the tokens decided since."""
        readable = None if self.draft is None else self.draft.max_length
        if readable is not None:
            self.num_draft_tokens = min(self.num_draft_tokens, max(readable + 1 - longest, 0))
        return self.num_draft_tokens

    def _start(self, prompts: Tensor, lengths: Tensor, inputs: Mapping[str, Tensor] | None) -> None:
        """Prefill all but the newest token of every prompt."""
        started = time.perf_counter()
        batch, longest = prompts.shape
        num_beams = self.scorer.num_beams
        # A level that is kept takes at most num_beams slots. `num_slots` adds the slots for the nodes of a round.
        num_kept = int((lengths + num_beams * self.scorer.limits).max())
        num_slots = num_kept + num_beams + self.draft_beams * self.num_draft_tokens
        self.tree = BeamTree(prompts, lengths, num_beams, num_slots)
        positions = torch.arange(longest - 1, device=prompts.device).expand(batch, -1)
        for model in (self.target, self.draft):
            if model is None:
                continue
            with normal_tensors():
                model.start(batch, num_slots, inputs)
            begin_texts(model, lengths)
            if longest > 1:
                model.forward(prompts[:, :-1], positions, 1)
        vocabulary = torch.arange(self.target.vocab_size, device=prompts.device)
        # The draft proposes no eos, because a beam that ends has no next level.
        self._is_eos = (vocabulary == self.scorer.eos.unsqueeze(2)).any(1, keepdim=True)
        if prompts.device.type == "cuda":
            torch.cuda.synchronize(prompts.device)
        self.stats.prefill_seconds = time.perf_counter() - started

    def _propose(self, num_draft_tokens: int, draft_lags: bool) -> None:
        """Add levels to the tree by a beam search of the draft with u beams. The draft's search starts from the
        target's beams and their scores."""
        tree, scores = self.tree, self.scorer.scores
        for depth in range(num_draft_tokens):
            assert self.draft is not None
            logits = tree.read(self.draft, tree.levels[-1:], with_parents=draft_lags and depth == 0)
            log_probs = logits.float().log_softmax(-1).masked_fill(self._is_eos, -torch.inf)
            scores, index = (log_probs + scores.unsqueeze(2)).flatten(1).topk(self.draft_beams)
            tree.grow(index // logits.shape[2], index % logits.shape[2])

    def _verify(self) -> Tensor:
        """Let the target read the tree, and advance the beams as long as their nodes are in the tree.

        Returns:
            [3, B] int64: levels decided, levels left (0: the row has ended), and slots in use.
        """
        scorer, tree, levels = self.scorer, self.tree, self.tree.levels
        logits = tree.read(self.target, levels).split([level.tokens.shape[1] for level in levels], 1)
        before = scorer.counts
        active = ~scorer.done
        nodes = levels[0].parents
        last, newest = nodes, tree.tokens
        first = 0
        for depth, level in enumerate(levels):
            parents, tokens = scorer.advance(rows_of(logits[depth], nodes) if depth else logits[0], active)
            nodes = nodes.gather(1, parents)
            last = torch.where(active.unsqueeze(1), first + nodes, last)
            newest = torch.where(active.unsqueeze(1), tokens, newest)
            first += level.tokens.shape[1]
            if depth == len(levels) - 1:
                break
            is_read, nodes = levels[depth + 1].index_of(nodes, tokens)
            active = active & is_read.all(1) & ~scorer.done
            # Without active rows, the remaining levels change nothing. Check this only on a CPU, where the check does
            # not wait for a device.
            if active.device.type == "cpu" and not bool(active.any()):
                break
        num_levels = scorer.counts - before
        tree.move(last, newest, num_levels, scorer.done)
        left = torch.where(scorer.done, 0, scorer.limits - scorer.counts)
        return torch.stack([num_levels, left, tree.num_live()])


# Leave inference mode: users may train on the output, and autograd refuses inference tensors.
@torch.inference_mode(False)
def _output(search: _Search, prompts: Prompts, num_sequences: int) -> BeamOutput:
    scorer, state = search.scorer, prompts.state
    tokens, num_new, scores = scorer.result(num_sequences)
    prompt_lengths = state.lengths.to(tokens.device).repeat_interleave(num_sequences)
    copies = state.tokens.to(tokens.device).repeat_interleave(num_sequences, 0)
    rows = zip(copies, prompt_lengths.tolist(), tokens.flatten(0, 1), num_new.flatten().tolist(), strict=True)
    texts = [torch.cat([prompt[:length], new[:count]]) for prompt, length, new, count in rows]
    failed, counts = scorer.failed.nonzero().flatten().tolist(), scorer.counts
    newest = tokens.gather(2, (num_new - 1).clamp(min=0).unsqueeze(2))
    ends_with_eos = (newest == state.eos.to(tokens.device).unsqueeze(1)).any(2)
    reasons: list[str | None] = [
        "error" if row // num_sequences in failed else "eos" if ended else "length"
        for row, ended in enumerate(ends_with_eos.flatten().tolist())
    ]
    return BeamOutput(
        sequences=pad_sequence(texts, batch_first=True, padding_value=prompts.pad_token_id),
        prompt_lengths=prompt_lengths,
        lengths=prompt_lengths + num_new.flatten(),
        stats=search.stats,
        errors={row: f"target: no finite score after {int(counts[row])} new tokens" for row in failed},
        finish_reasons=reasons,
        scores=scores.flatten().clone(),
    )


def _tree_model(name: str, model: LanguageModel) -> TreeModel:
    if not isinstance(model, TreeModel):
        raise TypeError(
            f"{name}: beam search reads trees; expected a transformers model or a TreeModel, got {type(model)}"
        )
    return model


def _draft_model(source: DraftSource | None, guard: Guard) -> TreeModel | None:
    if source is None:
        return None
    # Refuse a subclass that overrides `propose`, because beam search calls only the model and would ignore the
    # override.
    if not isinstance(source, ModelDraft) or type(source).propose is not ModelDraft.propose:
        raise TypeError(f"draft: beam search follows a model's own beams; expected a model or None, got {type(source)}")
    guard.bind(source)
    return _tree_model("draft", source.model)
