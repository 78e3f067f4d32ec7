"""Hierarchical drafting: a draft model for which a cheaper source or model proposes drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .. import checks
from ..models.base import LanguageModel, Part
from ..ops import verify_exact, verify_gumbel
from ..ops.tracing import is_eager_cpu
from ..ops.uniforms import inner_seeds
from ..sampling import SamplingTensors
from .base import AnyDraft, Draft, DraftSource, proposal_of, readable_lengths
from .lookup import PromptLookup
from .model import ModelDraft, as_draft_source


class HierarchicalDraft(ModelDraft):
    """Drafts with a model that is itself sped up by speculative decoding (Leviathan et al. 2023, section 6).

    Each forward of the draft model reads drafts of the inner source. `verify_exact` accepts some of them and adds one
    token, so that K drafts take fewer than K forwards. The accepted tokens have exactly the draft model's distribution
    q, and `Draft.logits` are the logits of q, so the output has the target's distribution. Positions that are not
    filled after `num_forwards` forwards are padding. This does not change the output's distribution, because whether a
    position is padding depends only on earlier positions (docs/math.md, section 6).

    An inner source that samples gets separate seeds for every forward, so that its random numbers are used nowhere
    else. `verify_exact` then verifies its drafts against the draft model's distribution.

    With `verify="gumbel"`, target, draft model and inner source draw with the same noise. `verify_gumbel` then verifies
    the inner drafts with the row's seeds, and no logits are returned.

    Args:
        model: the draft model, as in `ModelDraft`.
        inner: the draft for the draft model, a source or a smaller model; None = `PromptLookup()`.
        num_inner_tokens: the number of inner drafts per forward, >= 1.
        num_forwards: the largest number of forwards of the draft model per step, >= 1. An eager step on a CPU stops
            when all rows have K drafts.

    Raises:
        TypeError: a number is not an int, or `inner` is neither a model nor a source.
        ValueError: a number is below 1, or the inner source has another vocabulary, is on another device or reads
            hidden states.

    Examples:
        >>> import torch, transformers, torch_specops
        >>> config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None)
        >>> target, small = (transformers.GPT2LMHeadModel(config).eval() for _ in range(2))
        >>> draft = torch_specops.drafts.HierarchicalDraft(small, num_forwards=2)
        >>> output = torch_specops.generate(target, torch.tensor([[5, 6, 5, 6]]), draft=draft, max_new_tokens=8, seed=0)
        >>> output.lengths
        tensor([12])
    """

    # False = the loop compiles `propose` as a whole, which has only a few forwards.
    compiles_itself = False

    def __init__(
        self,
        model: LanguageModel | nn.Module,
        inner: AnyDraft = None,
        *,
        num_inner_tokens: int = 3,
        num_forwards: int = 3,
    ) -> None:
        super().__init__(model)
        inner = as_draft_source(inner, "inner") or PromptLookup()
        _check_reads_tokens(inner)
        if inner.vocab_size is not None and inner.vocab_size != self.vocab_size:
            raise ValueError(f"inner: expected the model's {self.vocab_size} tokens, got {inner.vocab_size}")
        if inner.device is not None and inner.device != self.device:
            raise ValueError(f"inner: expected a source on {self.device}, as the model is, got {inner.device}")
        self.inner = inner
        self.num_inner_tokens = checks.check_int("num_inner_tokens", num_inner_tokens, 1)
        self.num_forwards = checks.check_int("num_forwards", num_forwards, 1)

    @property
    def inside(self) -> Sequence[Part]:  # type: ignore[override]
        return (self.model, self.inner)

    def bind(self, target: LanguageModel) -> None:
        super().bind(target)
        self.inner.bind(target)
        # A source may know its layers only now.
        _check_reads_tokens(self.inner)

    def expect(self, num_draft_tokens: int) -> None:
        # The model may read more than K tokens in a step: a row that has K drafts still reads inner drafts after them,
        # and the first forward of a step reads one more token.
        super().expect(num_draft_tokens + self.num_inner_tokens + 1)
        # The inner source also catches up by one token, and its sequence grows by the drafts of the step.
        self.inner.expect(num_draft_tokens + self.num_inner_tokens + 2)

    def start(self, tokens: Tensor, lengths: Tensor, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        # The model reads inner drafts at positions after the last draft, so the cache needs room for them.
        capacity += self.num_inner_tokens
        super().start(tokens, lengths, capacity, inputs)
        self.inner.start(tokens, readable_lengths(self.inner, tokens, lengths), capacity, inputs)

    def restart(self, tokens: Tensor, lengths: Tensor, rows: Tensor) -> None:
        super().restart(tokens, lengths, rows)
        self.inner.restart(tokens, readable_lengths(self.inner, tokens, lengths), rows)

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        super().replace_inputs(row, inputs)
        self.inner.replace_inputs(row, inputs)

    def catch_up(self, tokens: Tensor, lengths: Tensor, num_steps: int) -> None:
        super().catch_up(tokens, lengths, num_steps)
        # The inner source may be one token further behind than `num_steps`; the comment in `propose` says why.
        self.inner.catch_up(tokens, readable_lengths(self.inner, tokens, lengths), num_steps + 1)

    @property
    def can_restart(self) -> bool:
        return self.inner.can_restart

    def on_finished(self, tokens: Tensor, lengths: Tensor) -> None:
        self.inner.on_finished(tokens, lengths)

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        """Propose up to K tokens [B, K], followed by -1. The tokens come with the draft model's logits [B, K, V],
        unless drafts share the target's noise."""
        batch, room = tokens.shape[0], num_draft_tokens + self.num_inner_tokens + 1
        # Catch up by one token: if the last forward of the previous step accepted all inner drafts, and the target
        # accepted all drafts, the inner source has not read the last inner draft.
        self.inner.catch_up(tokens, readable_lengths(self.inner, tokens, lengths), 1)
        # Reserve room after K drafts, because later forwards write there in a row that has K drafts already.
        text, drafts = pad(tokens, (0, room)), tokens.new_full((batch, room), -1)
        logits: Tensor | None = None
        count = torch.zeros_like(lengths)
        # The first forward reads two tokens, because after a step whose drafts were all accepted, the model has not
        # read the last draft.
        num_unread = 2
        has_inner_seeds = not (self.inner.deterministic or sampling.coupled)
        of_forwards = self._inner_seeds(seeds, lengths).unbind(1) if has_inner_seeds else [seeds] * self.num_forwards
        # Each position has two uniforms: one for its acceptance test, and one for the next token if a forward begins
        # there.
        numbers = self._numbers(seeds, lengths, 2 * num_draft_tokens, sampling)
        pairs = None if sampling.coupled else torch.stack(tuple(numbers), 1).unflatten(1, (-1, 2))
        for forward_seeds in of_forwards:
            inner, rows = self._read(text, lengths + count, num_unread, sampling, forward_seeds)
            num_unread = 1
            places = count.unsqueeze(1) + torch.arange(rows.shape[1], device=tokens.device)
            filters = {"temperature": sampling.temperature, **sampling.filters}
            if pairs is None:
                output, num_accepted = verify_gumbel(rows, inner.tokens, seeds, lengths + count, **filters)
            else:
                accept, sample = _at_places(pairs, places)
                options = filters | {"draft_lse": inner.lse, "draft_is_one_hot": inner.is_one_hot}
                output, num_accepted = verify_exact(rows, inner.tokens, inner.logits, accept, sample, **options)
                logits = rows.new_zeros(batch, room, rows.shape[2]) if logits is None else logits
                logits.scatter_(1, places.unsqueeze(2).expand_as(rows), rows)
            # `output` is -1 after the next token. A later forward overwrites the -1.
            drafts = drafts.scatter(1, places, output)
            text = text.scatter(1, lengths.unsqueeze(1) + places, output.clamp(min=0))
            count = (count + num_accepted + 1).clamp(max=num_draft_tokens)
            # Check only in eager steps on a CPU, because on other devices the check would wait for the device.
            if is_eager_cpu(count) and bool((count == num_draft_tokens).all()):
                break
        return Draft(drafts[:, :num_draft_tokens], None if logits is None else logits[:, :num_draft_tokens])

    def _read(
        self, text: Tensor, ends: Tensor, num_unread: int, sampling: SamplingTensors, seeds: Tensor
    ) -> tuple[Draft, Tensor]:
        """Get inner drafts [B, w] for sequences of `ends` [B] tokens, and read them with the model. Returns the inner
        drafts, and the logits [B, w + 1, V] at the positions of the drafts and at the next position."""
        vocab_size = self.model.vocab_size
        # Ask for the same number of inner drafts for every K, so that a row's drafts do not depend on how many drafts
        # other rows still need.
        inner = proposal_of(self.inner, text, ends, self.num_inner_tokens, sampling, seeds, vocab_size)
        # Treat tokens outside the model's vocabulary as padding.
        drafts = torch.where((inner.tokens >= 0) & (inner.tokens < vocab_size), inner.tokens, -1)
        last = ends.unsqueeze(1) - 1
        behind = last + torch.arange(1 - num_unread, 1, device=text.device)
        places = last + torch.arange(1, drafts.shape[1] + 2, device=text.device)
        written = text.scatter(1, places[:, :-1], drafts.clamp(min=0))
        positions = self._inside(torch.cat([behind, places[:, :-1]], 1))
        rows = self.model.forward(written.gather(1, positions), positions, places.shape[1])
        if sampling.processors is not None:
            rows = sampling.process(rows, text.scatter(1, places[:, :-1], drafts), places)
        return replace(inner, tokens=drafts), rows

    def _inner_seeds(self, seeds: Tensor, lengths: Tensor) -> Tensor:
        """[B, F] int64, a seed of the inner source for each of F forwards. Used if the inner source samples."""
        return inner_seeds(seeds, lengths, self.num_forwards)


def _at_places(pairs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Select the uniforms for a call of `verify_exact` at `places` [B, w + 1] from the `pairs` [B, K, 2] of all
    positions: [B, w] for the acceptance tests and [B] for the next token. The results at places after K drafts are not
    used, so the indices are clamped."""
    places = places.clamp(max=pairs.shape[1] - 1)
    accept, sample = pairs[..., 0].gather(1, places[:, :-1]), pairs[..., 1].gather(1, places[:, :1])
    return accept.contiguous(), sample.squeeze(1)


def _check_reads_tokens(inner: DraftSource) -> None:
    if inner.feature_layers:
        raise ValueError(f"inner: expected a source that reads tokens alone, got {type(inner).__name__}")
