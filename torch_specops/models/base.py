"""The interface of models: `LanguageModel`, its subclasses for hidden states and for trees, and what rows keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Part:
    """The interface that models and draft sources share.

    The user may change a model between two calls, or while a session is open. `look` detects this.

    Attributes:
        inside: the models and draft sources inside this one; the loop calls their methods too.
        version: changes when a look finds a change. CUDA graphs are then captured again.
        compile_key: a hashable value of the state that a compiled forward depends on but torch does not guard (hooks).
            Compiled code is kept, and used for an equal value only.
        is_observed: True = other code may keep tensors that a forward computes, so that no forward runs in inference
            mode. Read after each look.
        not_compiled: the reason why the part cannot be compiled; None = it can.
        state_bytes: the memory of the recurrent states that the part keeps, reported in `stats.state_bytes`.
    """

    inside: Sequence[Part] = ()
    version: Hashable = 0
    compile_key: Hashable = None
    is_observed: bool = False
    not_compiled: str | None = None
    state_bytes: int = 0

    def look(self) -> None:
        """Apply changes since the last look. Called before rows get new sequences: before `start`, and in a session
        before rows are cleared, while other rows continue.

        Raises:
            ValueError: the changed model is not supported.
            RuntimeError: the changed model no longer fits the cached sequences. Before `start` the loop ignores this
                error, because `start` drops the cached sequences.
        """

    def static_tensors(self) -> Sequence[Tensor] | None:
        """The tensors that a step reads at the same addresses every time (a cache, weights).

        A CUDA graph of a step is reused while these tensors are the same. None = not known: every batch captures its
        steps again.
        """
        return None


class RowState:
    """Tensors that a model keeps for each row of a batch: keys and values, recurrent states, features, an encoder's
    output. A model may compose several; the defaults do nothing."""

    def start(self, batch: int, capacity: int, like: Tensor) -> None:
        """Make room for `batch` sequences of `capacity` tokens and forget earlier sequences.

        Args:
            like: an empty tensor of the model's dtype and device.
        """

    def clear_rows(self, rows: Tensor) -> None:
        """As `LanguageModel.clear_rows`."""

    def copy_rows(self, sources: Tensor, width: int) -> None:
        """As `LanguageModel.copy_rows`."""

    def static_tensors(self) -> Sequence[Tensor]:
        """The tensors that a step reads or writes at the same addresses every time."""
        return ()


class LanguageModel(Part, ABC):
    """A causal language model over ragged rows: each sequence has its own length, and the model keeps a static cache
    that can be written at any position. To write your own, derive from this class and define `vocab_size`, `device`,
    `start` and `forward`, as in examples/own_model.py.

    Each attribute, those of `Part` included, may be a class attribute, an instance attribute or a property. The model
    may be an `nn.Module`: a loop puts it into evaluation mode while it decodes. `forward` becomes part of a compiled
    step: it must be traceable by torch.compile and must not wait for the device.

    A `forward` may run in inference mode or in `torch.no_grad`, and the mode may change between calls. Tensors that
    later forwards write, such as a cache, must be created outside inference mode: in `start`, `clear_rows`,
    `begin_texts` or `replace_inputs`. A pickle should omit the cache (`__getstate__`), because torch shares the memory
    of tensors that it sends to other processes.

    Attributes:
        vocab_size: V.
        device: where the model's tensors are.
        max_length: the longest sequence that the model can read; None = no known limit. The loop reads no position
            beyond this length and asks for no larger capacity, except for the tree of beam search.
        limited_by: the reason for `max_length`, for the error message; None = the model has no more positions.
        reads_beyond: True = the model was made for `max_length` tokens, and can read more.
        eos_token_ids: the tokens that end a sequence if the caller names none.
        pad_token_id: fills rows after their end if the caller names none; None = the first eos token.
        undrafted: tokens that are never verified as drafts without probabilities, such as placeholders of images.
        reads_rows: True = `forward` takes `rows`, and there is `copy_rows`. New rows are then prefilled without the
            others.
        packs_rows: True = there is `forward_packed`.
        reads_inputs: True = every request must have an encoder's input besides its tokens.
        reads_images: True = the model reads images in prompts.
        keeps_states: True = the model keeps a recurrent state (linear attention, Mamba), from which a token cannot be
            removed. The first forward of a sequence then begins at its first token and ends within its prompt, and
            prompts of different lengths are read in separate forwards. Without states, a shorter row is read beyond its
            end.
        invariant: True = the logits after a text are a function of the text, to the last bit: they do not depend on
            what else is read, in which pieces, or on what the cache held before.
        ranks: the process group whose ranks have a shard of the weights each; the loop compares their calls. None =
            this process has the whole model.
    """

    vocab_size: int
    device: torch.device
    max_length: int | None = None
    limited_by: str | None = None
    reads_beyond: bool = False
    eos_token_ids: Sequence[int] = ()
    pad_token_id: int | None = None
    undrafted: Sequence[int] = ()
    reads_rows: bool = False
    packs_rows: bool = False
    reads_inputs: bool = False
    reads_images: bool = False
    keeps_states: bool = False
    invariant: bool = False
    ranks: Any = None

    @abstractmethod
    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        """Make room for `batch` sequences of `capacity` tokens and forget earlier sequences.

        Args:
            inputs: inputs besides the tokens, by name: an encoder's input, or the images of the next prompts as
                `check_images` returns them.
        """

    @abstractmethod
    def forward(
        self, tokens: Tensor, positions: Tensor, num_logits: int | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Read tokens [B, n] at positions [B, n] of their sequences; return logits [B, n, V] in float32, bfloat16 or
        float16, or the last num_logits of them. Each call returns a new tensor, because the loop keeps the logits of
        all drafts of a step until it verifies them.

        A token attends to the latest entries at the positions up to its own. To roll back, read an earlier position
        again. A position may occur twice in one call only with the same token.

        Args:
            rows: [A] int64, the rows to read, each at most once; tokens and positions are then [A, n], and other rows
                do not change. None = all. Passed only if `reads_rows`; other models may omit the parameter.
        """

    def forward_packed(self, tokens: Tensor, positions: Tensor, is_read: Tensor, rows: Tensor | None = None) -> Tensor:
        """`forward` for the tokens [A, n] that `is_read` [A, n] bool marks, a prefix of each row; returns their logits
        [N, V], row by row. Called if `packs_rows`."""
        raise NotImplementedError

    def expect(self, num_tokens: int) -> None:
        """Called before `start`: at most the newest `num_tokens` positions of a sequence are read again, and of its
        prompt only the last."""

    def begin_texts(self, lengths: Tensor, rows: Tensor | None = None) -> None:
        """Called before the prompts of rows [A] int64 (None = all) are read, with their lengths [A]. Needed if the
        model reads prompts differently from later tokens."""

    def clear_rows(self, rows: Tensor) -> None:
        """Clear rows [A] int64 that get new sequences. Needed if masked slots must be finite, because 0 * NaN is
        NaN."""

    def copy_rows(self, sources: Tensor, width: int) -> None:
        """Copy the cache of row sources[i], the first `width` tokens, to row i. Called if `reads_rows`."""
        raise NotImplementedError

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        """Replace a row's inputs [1, ...] from `start`, or take the images of its next prompt; {} = none. Called by
        sessions."""

    def check_images(
        self, tokens: Tensor, lengths: Tensor, inputs: Mapping[str, Tensor] | None, attention_mask: Tensor | None
    ) -> Mapping[str, Tensor] | None:
        """The images in the caller's `inputs` for prompts [B, P] of `lengths` [B] and `attention_mask` [B, P] (None =
        no padding); None = there are none. A model that reads no images returns `inputs` unchanged. Raises ValueError
        if the images do not fit the prompts."""
        return inputs

    def read_images(self, tokens: Tensor, rows: Sequence[int], num_unread: int) -> list[int]:
        """Read the prompts of `rows` in tokens [B, W] that have images, except at most the `num_unread` newest tokens,
        and free the images; returns their rows. Images given to `start` are for all prompts, and the sequences of a
        prompt are adjacent. Raises ValueError if the model refuses the images."""
        return []

    def share_encoder(self, draft: LanguageModel) -> LanguageModel:
        """The draft model in a form that reads this model's encoder output; unchanged if it cannot."""
        return draft

    def first_layers(self, num_layers: int) -> LanguageModel:
        """The model of the first layers, with the same weights and its own cache, as `EarlyExit` needs.

        Raises:
            TypeError: the model cannot stop early.
            ValueError: a number of layers out of range.
        """
        raise TypeError(f"target: early exit needs the method first_layers, which {type(self).__name__} lacks")


class FeatureModel(LanguageModel):
    """A language model that exposes its hidden states, as a draft with `feature_layers` needs.

    Attributes:
        num_layers: how many layers the model has.
        hidden_size: H, the width of a hidden state.
        dtype: of the hidden states.
        features: [B, capacity, len(layers) * H], the layers side by side: slot j has the feature of the token that was
            last read at position j. The tensor stays the same as long as batch and capacity do.
        embed: a method or a module: the embeddings [B, n, H] of tokens [B, n].
        embeddings: [V, H], the weights of `embed`, before any scale or norm. Only DFlash needs these weights.
        head: a method or a module: logits [B, n, V] in the dtype of `forward`, from the head's input [B, n, H]. DFlash
            and MTP need the head.
    """

    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    features: Tensor
    embed: Callable[[Tensor], Tensor]
    embeddings: Tensor
    head: Callable[[Tensor], Tensor]

    @abstractmethod
    def keep_features(self, layers: Sequence[int]) -> None:
        """From the next `start` on, keep the inputs of these layers, and for `num_layers` the input of the head; () =
        none. Called before every `start`."""


class TreeModel(LanguageModel):
    """A language model that can read several continuations of a row in one forward, as beam search needs."""

    @abstractmethod
    def forward_tree(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, slot_positions: Tensor
    ) -> Tensor:
        """Read nodes of a tree; return logits [B, n, V].

        Args:
            tokens: [B, n] int64.
            positions: [B, n] int64, their positions in the sequence.
            slots: [B, n] int64, where their keys and values are written. A slot may repeat only for the same node.
            visible: [B, n, S] bool, the slots of a node's sequence, its own included. The node may attend to these
                slots only; no node may attend to slots from S on.
            slot_positions: [B, S] int64, the position of the token that each slot holds.
        """


def feature_model(target: LanguageModel, *others: str) -> FeatureModel:
    """The target, checked: it must expose its hidden states and have these other members."""
    missing = [name for name in ("num_layers", "hidden_size", "dtype", "embed", *others) if not hasattr(target, name)]
    if isinstance(target, FeatureModel) and not missing:
        return target
    raise TypeError(
        f"target: the draft reads hidden states; expected a torch_specops.drafts.FeatureModel, got {type(target)}"
        + (f" without {', '.join(missing)}" if missing else "")
    )


def readable_length(model: LanguageModel) -> int | None:
    """The longest sequence that a model can read: its `max_length`, or None if it reads beyond."""
    return None if model.reads_beyond else model.max_length


def readable_positions(model: LanguageModel, positions: Tensor) -> Tensor:
    """Clamp positions to those that a model can read; only padding lies beyond."""
    limit = readable_length(model)
    return positions if limit is None else positions.clamp(max=limit - 1)


def placed(old: Tensor | None, new: Tensor) -> Tensor:
    """`new`, copied to the memory of `old` if it fits, because CUDA graphs read from there."""
    if old is None or (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
        return new
    return old.copy_(new)


def settings_of(part: object) -> dict[str, Any]:
    """The attributes of a model or a source that copies and pickles keep: those that its classes do not list in
    `_of_calls`. Tensors of a call must be left out, because torch shares the memory of tensors that it sends to other
    processes, which would all write to one cache."""
    left = {name for kind in type(part).__mro__ for name in vars(kind).get("_of_calls", ())}
    return {name: value for name, value in vars(part).items() if name not in left}


def static_tensors_of(*parts: Part) -> list[Tensor] | None:
    """The static tensors of models and draft sources together; None if any of them has unknown tensors."""
    tensors: list[Tensor] = []
    for part in parts:
        own = part.static_tensors()
        if own is None:
            return None
        tensors += own
    return tensors
