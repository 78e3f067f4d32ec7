"""A language model as the draft, with its own cache."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..compilation import CompiledPieces
from ..ops import sample
from ..sampling import SamplingTensors
from ..uniforms import uniforms
from .base import Draft, DraftSource, LanguageModel, static_tensors_of
from .rows import read_texts

__all__ = ["ModelDraft", "SequentialDraft"]


class SequentialDraft(DraftSource):
    """A source whose drafts are sampled one after another, in pieces that are compiled once each."""

    deterministic = False
    compiles_itself = True

    def __init__(self) -> None:
        self._pieces = CompiledPieces()
        self._shape: Hashable | None = None

    def compile(self, shape: Hashable | None) -> None:
        self._shape = shape

    def _piece(self, function: Callable[..., Any], *key: int) -> Callable[..., Any]:
        return function if self._shape is None else self._pieces.get(function, self._shape, *key)

    def _draws(self, seeds: Tensor, lengths: Tensor, num_draft_tokens: int, temperature: Tensor) -> Tensor:
        """[B, K] uniforms; zeros on a CPU if all rows are greedy, because looking costs nothing there."""
        may_look = temperature.device.type == "cpu" and not torch.compiler.is_compiling()
        if may_look and not bool((temperature > 0).any()):
            return torch.zeros(seeds.shape[0], num_draft_tokens)
        return self._piece(uniforms, num_draft_tokens)(seeds, lengths, num_draft_tokens, "propose")


class ModelDraft(SequentialDraft):
    """Samples K tokens one after another from a draft model (Leviathan et al. 2023, Algorithm 1, the draws from M_q).

    The first forward of a step reads the two newest tokens. If all K drafts were accepted, these are the last draft,
    which was sampled but never read, and the bonus token. So the cache is always complete, and K drafts take K
    forwards. After steps without drafts, one more forward reads what these gave.

    Args:
        model: the draft model; its vocabulary must be the target's.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        self.vocab_size = model.vocab_size
        self.device = model.device
        self.max_length = model.max_length

    def start(self, tokens: Tensor, lengths: Tensor, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        self.model.start(tokens.shape[0], capacity, inputs)
        # All but the two newest tokens of the longest prompt; at least one, to allocate the cache.
        width = max(int(lengths.max()) - 2, 1)
        positions = torch.arange(width, device=tokens.device).expand(tokens.shape[0], -1)
        self.model.forward(tokens[:, :width].clamp(min=0), positions, 1)

    def restart(self, tokens: Tensor, lengths: Tensor, rows: Tensor) -> None:
        read_texts(self.model, tokens, lengths, rows, num_unread=2)

    def catch_up(self, tokens: Tensor, lengths: Tensor, num_steps: int) -> None:
        # All that was not read but the two newest tokens, which `propose` reads.
        positions = lengths.unsqueeze(1) - 2 + torch.arange(-num_steps, 0, device=tokens.device)
        positions = positions.clamp(min=0)
        self.model.forward(tokens.gather(1, positions), positions, 1)

    def static_tensors(self) -> Sequence[Tensor] | None:
        return static_tensors_of(self.model)

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        """K tokens [B, K] with the logits they were sampled from [B, K, V] and their logsumexp [B, K]."""
        draws = self._draws(seeds, lengths, num_draft_tokens, sampling.temperature).t().contiguous()
        text = None if sampling.processors is None else pad(tokens, (0, num_draft_tokens))
        newest = lengths - 1
        # In a text of one token, that token is read twice at the same position.
        positions = torch.stack([newest - 1, newest], 1).clamp(min=0)
        pending = tokens.gather(1, positions)
        drafts, logits, lse = [], [], []
        for draw in draws:
            # Two graphs for any K: the forward over the two newest tokens, and the one over a single token.
            read_and_draw = self._piece(self._read_and_draw, pending.shape[1])
            token, row, row_lse = read_and_draw(pending, positions, draw, sampling, text)
            drafts.append(token)
            logits.append(row)
            lse.append(row_lse)
            # A row without a finite logit gives -1. Nothing is verified from there on, so any token may be read.
            pending = token.clamp(min=0).unsqueeze(1)
            positions = positions[:, -1:] + 1
            if text is not None:
                text = text.scatter(1, positions, pending)
        return Draft(torch.stack(drafts, 1), torch.stack(logits, 1), torch.stack(lse, 1))

    def _read_and_draw(
        self, pending: Tensor, positions: Tensor, draws: Tensor, sampling: SamplingTensors, text: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.model.forward(pending, positions, 1)
        if text is not None:
            logits = sampling.process(logits, text, positions[:, -1:] + 1)
        logits = logits[:, -1]
        token, lse = sample(logits, draws, sampling.temperature, **sampling.filters)
        return token, logits, lse
