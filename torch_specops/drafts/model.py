"""A language model as the draft, with a separate KV cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..compilation import CompiledPieces
from ..models.base import LanguageModel, Part, placed, settings_of, static_tensors_of
from ..models.conversion import as_language_model, refuse_class
from ..models.reading import read_beginnings, read_texts
from ..ops.tracing import is_eager_cpu
from ..ops.uniforms import uniforms
from ..sampling import SamplingTensors
from .base import AnyDraft, Draft, DraftSource, stacked


class SampledDraft(DraftSource):
    """A source that samples its drafts, and compiles parts of `propose` itself."""

    deterministic = False
    compiles_itself = True
    _shape: Hashable | None = None
    # Attributes of the current call, which copies and pickles leave out (`settings_of`).
    _of_calls: ClassVar[Sequence[str]] = ("_shape",)

    def __init__(self) -> None:
        self._pieces = CompiledPieces()

    def __getstate__(self) -> dict[str, Any]:
        return settings_of(self)

    def compile(self, shape: Hashable | None) -> None:
        self._shape = shape

    def _piece(self, function: Callable[..., Any], *key: int) -> Callable[..., Any]:
        return function if self._shape is None else self._pieces.get(function, self._shape, *key)

    def _is_eager_cpu(self, lengths: Tensor) -> bool:
        """True = a step looks at the values of `lengths`, and reads only what is new."""
        return self._shape is None and is_eager_cpu(lengths)

    def _numbers(
        self, seeds: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors
    ) -> Sequence[Tensor]:
        """For each of K drafts, the random numbers or seeds [B] for `SamplingTensors.draw`. In an eager step on a CPU
        with only greedy rows they are zeros, because they are not used; a deterministic source does not read them."""
        if sampling.coupled or self.deterministic:
            return [seeds] * num_draft_tokens
        temperature = sampling.temperature
        if is_eager_cpu(temperature) and not bool((temperature > 0).any()):
            return torch.zeros(num_draft_tokens, seeds.shape[0], dtype=torch.float32, device=seeds.device).unbind()
        draws = self._piece(uniforms, num_draft_tokens)(seeds, lengths, num_draft_tokens, "propose")
        return draws.t().contiguous().unbind()

    def _draw_in_turn(
        self,
        step: Callable[..., tuple[Any, ...]],
        state: Any,
        tokens: Tensor,
        lengths: Tensor,
        num_draft_tokens: int,
        sampling: SamplingTensors,
        seeds: Tensor,
        logits: Tensor | None = None,
    ) -> Draft:
        """Draw K drafts one after another, each from logits that may depend on the drafts before it.

        Args:
            step: `step(index, previous, state, ends, numbers, sampling, text)` returns draft `index` as
                `SamplingTensors.draw` does, and the state for the next call. `previous` [B, 1] is the token before this
                draft, `ends` [B, 1] the sequence's length with the drafts before this one; `numbers` and `text` are
                those of `draw`.
            state: of the first call.
            logits: [B, K, V], the logits of all drafts before processors if they were computed together. None = they
                were not, and are copied to one tensor.
        """
        numbers = self._numbers(seeds, lengths, num_draft_tokens, sampling)
        text = None if sampling.processors is None else pad(tokens, (0, num_draft_tokens))
        ends = lengths.unsqueeze(1)
        previous, drawn = tokens.gather(1, ends - 1), []
        for index, number in enumerate(numbers):
            token, *others, state = step(index, previous, state, ends, number, sampling, text)
            drawn.append((token, *others))
            # The token is -1 in a row without a finite logit. Read token 0 instead, because drafts after it are not
            # verified.
            previous = token.clamp(min=0).unsqueeze(1)
            if text is not None:
                text = text.scatter(1, ends, token.unsqueeze(1))
            ends = ends + 1
        return stacked(drawn, logits if text is None else None)

    def _pick(
        self, logits: Tensor, ends: Tensor, numbers: Tensor, sampling: SamplingTensors, text: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Draw as `SamplingTensors.draw`; a deterministic source takes the likeliest token, after processors."""
        if not self.deterministic:
            return sampling.draw(logits, numbers, text, ends)
        processed = logits if text is None else sampling.process(logits, text, ends)
        return processed.argmax(-1).squeeze(1), None, None


class SequentialDraft(SampledDraft):
    """A source that samples its drafts one after another. The source compiles two functions, which do not depend on K:
    the forward over the unread tokens of the sequence, and the forward over the previous draft."""

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        """Propose K tokens [B, K]. The tokens come with the logits [B, K, V] that they were sampled from and the
        logsumexp [B, K] of these logits, unless drafts share the target's noise."""
        unread, first_positions = self._unread(tokens, lengths)

        def step(index: int, previous: Tensor, output: Tensor | None, ends: Tensor, *others: Any) -> tuple[Any, ...]:
            read, positions = (unread, first_positions) if index == 0 else (previous, first_positions[:, -1:] + index)
            read_and_draw = self._piece(self._read_and_draw, positions.shape[1], index == 0)
            return read_and_draw(read, ends, positions, output, *others)

        return self._draw_in_turn(step, None, tokens, lengths, num_draft_tokens, sampling, seeds)

    def _read_and_draw(
        self,
        tokens: Tensor,
        ends: Tensor,
        positions: Tensor,
        output: Tensor | None,
        numbers: Tensor,
        sampling: SamplingTensors,
        text: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Run `_forward` and draw a token. Returns the result of `SamplingTensors.draw`, and the `output` for the next
        call of `_forward`."""
        logits, output = self._forward(tokens, ends, positions, output)
        return *sampling.draw(logits, numbers, text, ends), output

    @abstractmethod
    def _unread(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens and positions that the forward for the first draft reads. The newest token comes last."""

    @abstractmethod
    def _forward(
        self, tokens: Tensor, ends: Tensor, positions: Tensor, output: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the logits [B, 1, V] of the next token. In the first call of a step, tokens and positions come from
        `_unread`, and `output` is None. In later calls, they are the previous draft [B, 1], its position, and the
        `output` that the previous call returned. `ends` [B, 1] is the length of the sequence, earlier drafts of the
        step included."""


class ModelDraft(SequentialDraft):
    """Samples K tokens one after another from a draft model (Leviathan et al. 2023, Algorithm 1, the draws from M_q).

    The first forward of a step reads the two newest tokens. If all K drafts of the previous step were accepted, these
    are the last draft, which was sampled but not yet read, and the bonus token. So the KV cache is always complete, and
    K drafts take K forwards. After steps without drafts, one more forward reads the tokens that those steps emitted.

    Args:
        model: the draft model, of transformers or a `LanguageModel`. Its vocabulary must be the target's. The draft
            model never reads positions beyond its `max_length`.
    """

    # The number of slots of the model's cache if sequences may be longer than the model can read, otherwise None.
    _room: int | None = None
    # [B, 1], the number of tokens of each row that `start` or `restart` has read.
    _begun: Tensor | None = None
    _of_calls: ClassVar[Sequence[str]] = ("_room", "_begun")

    def __init__(self, model: LanguageModel | nn.Module) -> None:
        super().__init__()
        self.model = as_language_model("model", model)
        self._takes_inputs = True

    @property
    def inside(self) -> Sequence[Part]:  # type: ignore[override]
        return (self.model,)

    @property
    def vocab_size(self) -> int | None:  # type: ignore[override]
        return self.model.vocab_size

    @property
    def device(self) -> torch.device | None:  # type: ignore[override]
        return self.model.device

    @property
    def max_length(self) -> int | None:  # type: ignore[override]
        return self.model.max_length

    def bind(self, target: LanguageModel) -> None:
        # If the draft has the same encoder as the target, or none, let it read the output of the target's encoder.
        self.model = target.share_encoder(self.model)
        # A draft without image inputs reads the placeholder tokens of images like other tokens.
        self._takes_inputs = not target.reads_images or self.model.reads_images

    def expect(self, num_draft_tokens: int) -> None:
        self.model.expect(num_draft_tokens + 1)

    def start(self, tokens: Tensor, lengths: Tensor, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        self._room = self.max_length if self.max_length is not None and capacity > self.max_length else None
        self.model.start(tokens.shape[0], self._room or capacity, inputs if self._takes_inputs else None)
        read_beginnings(self.model, tokens.clamp(min=0), lengths, num_unread=2)
        self._begun = placed(self._begun, (lengths.unsqueeze(1) - 2).clamp(min=0))

    def restart(self, tokens: Tensor, lengths: Tensor, rows: Tensor) -> None:
        read_texts(self.model, tokens, lengths, rows, num_unread=2)
        assert self._begun is not None
        self._begun[rows] = (lengths[rows].unsqueeze(1) - 2).clamp(min=0)

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        if self._takes_inputs:
            self.model.replace_inputs(row, inputs)

    def catch_up(self, tokens: Tensor, lengths: Tensor, num_steps: int) -> None:
        # Read all unread tokens except the two newest, which `propose` reads.
        positions = lengths.unsqueeze(1) - 2 + torch.arange(-num_steps, 0, device=tokens.device)
        assert self._begun is not None
        # A row may have been restarted in one of these steps. Do not read its prompt again, because a model with
        # recurrent states cannot read a prompt twice.
        positions = self._inside(positions).maximum(self._begun)
        self.model.forward(tokens.gather(1, positions), positions, 1)

    def _inside(self, positions: Tensor) -> Tensor:
        """Clamp positions to those that the model can read. Drafts at larger positions are not used."""
        return positions.clamp(0, None if self._room is None else self._room - 1)

    def static_tensors(self) -> Sequence[Tensor] | None:
        tensors = static_tensors_of(*self.inside)
        return tensors if tensors is None or self._begun is None else [*tensors, self._begun]

    def _unread(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        # In a sequence of one token, clamping lets the model read that token twice at the same position, which is
        # harmless.
        positions = self._inside(torch.stack([lengths - 2, lengths - 1], 1))
        return tokens.gather(1, positions), positions

    def _forward(
        self, tokens: Tensor, ends: Tensor, positions: Tensor, output: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.model.forward(tokens, self._inside(positions), 1), None


def as_draft_source(draft: AnyDraft, name: str = "draft") -> DraftSource | None:
    """Return a draft source unchanged, and wrap a model in a `ModelDraft`."""
    if draft is None or isinstance(draft, DraftSource):
        return draft
    refuse_class(name, draft)
    if isinstance(draft, (LanguageModel, nn.Module)):
        return ModelDraft(as_language_model(name, draft))
    raise TypeError(f"{name}: expected a model, a DraftSource or None, got {type(draft)}; {_advice(draft)}")


def _advice(draft: object) -> str:
    if isinstance(draft, str):
        return "torch_specops.drafts.PromptLookup() copies from the text; load a model before the call"
    return "a class with propose must derive from DraftSource, a model of your own from LanguageModel"
