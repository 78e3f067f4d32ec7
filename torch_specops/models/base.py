"""What a loop asks of a model: `LanguageModel`, whose defaults do nothing, and two kinds of it that can do more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Part:
    """What a loop asks of models and draft sources alike.

    A model may be changed by its owner between two calls, or while a session is open. `look` finds this out.

    Attributes:
        inside: the models and draft sources inside of this one, which the loop asks too.
        version: changes when a look finds a change. CUDA graphs from before are then captured anew.
        compile_key: a hashable value of what a compiled forward depends on, and torch does not look at (hooks).
            Compiled code is used for an equal value only, and is kept.
        is_observed: True = other code may keep what a forward computes, so that none runs in inference mode. It is
            read after each look.
        not_compiled: the reason why it cannot be compiled; None = it can.
        state_bytes: the memory of the states that it keeps of texts, which `stats.state_bytes` counts.
    """

    inside: Sequence[Part] = ()
    version: Hashable = 0
    compile_key: Hashable = None
    is_observed: bool = False
    not_compiled: str | None = None
    state_bytes: int = 0

    def look(self) -> None:
        """Take over what has changed since the last look. Called before texts begin in rows: before `start`, and in a
        session before rows are cleared, while other rows go on.

        Raises:
            ValueError: the model cannot be read any more.
            RuntimeError: it no longer fits what was read of texts. Ignored before `start`, which forgets these texts.
        """

    def static_tensors(self) -> Sequence[Tensor] | None:
        """The tensors that a step reads at the same addresses every time (a cache, weights).

        A CUDA graph of a step is reused as long as they are the same. None = not known: every batch captures its steps
        again.
        """
        return None


class LanguageModel(Part, ABC):
    """A causal language model over ragged rows: each sequence has its own length, and the model keeps a static cache
    that can be written at any position. To write your own, derive from this class, give it `vocab_size` and `device`,
    and write `start` and `forward`; examples/own_model.py has an example.

    Each attribute, also of those that `Part` has, may belong to the class or to the object, or be a property. The model
    may be an `nn.Module`: a loop puts it into evaluation mode while it decodes. `forward` becomes part of a compiled
    step: it must be traceable by torch.compile and must not wait for the device.

    A `forward` may run in inference mode or in `torch.no_grad`, and the mode may change between two of them. What later
    forwards write, such as a cache, must be made outside inference mode, where `start`, `clear_rows`, `begin_texts` and
    `replace_inputs` run. A pickle should have no cache (`__getstate__`), because torch shares the memory of tensors
    that it sends to other processes.

    Attributes:
        vocab_size: V.
        device: where its tensors live.
        max_length: the longest sequence that it can read; None = no limit known. No position beyond is read, and no
            larger capacity asked for, except by beam search, for the slots of its tree.
        limited_by: why it reads no more, for the error; None = it has no more positions.
        reads_beyond: True = it was made for `max_length` tokens, and can read more.
        eos_token_ids: the tokens that end a text if the caller names none.
        pad_token_id: what stands behind a text if the caller names nothing; None = the first eos token.
        undrafted: tokens that are never drafted by a source without probabilities, such as placeholders of images.
        reads_rows: True = `forward` takes `rows`, and there is `copy_rows`. Prompts of new rows are then read without
            the others.
        packs_rows: True = there is `forward_packed`.
        reads_inputs: True = it reads something besides the tokens that every request must have: an encoder's input.
        reads_images: True = it reads images in prompts.
        keeps_states: True = it keeps a state of the text (linear attention, Mamba), from which a token cannot be taken
            back. The first forward of a text then begins at its first token and ends within its prompt, and prompts of
            different lengths are read apart; otherwise a shorter row is read beyond its end.
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

    @abstractmethod
    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        """Make room for `batch` sequences of `capacity` tokens and forget what was read before.

        Args:
            inputs: what the model reads besides the tokens, by name: the input of an encoder, or the images of the
                prompts that come next, as `check_images` returns them.
        """

    @abstractmethod
    def forward(
        self, tokens: Tensor, positions: Tensor, num_logits: int | None = None, rows: Tensor | None = None
    ) -> Tensor:
        """Read tokens [B, n] at positions [B, n] of their sequences; return logits [B, n, V] in float32, bfloat16 or
        float16, or the last num_logits of them.

        A token attends to what was last written at the positions up to its own: to roll back, read at an earlier
        position again. A position may occur twice in one call only with the same token.

        Args:
            rows: [A] int64, read these rows alone, each at most once, and leave the others unchanged; tokens and
                positions are [A, n]. None = all. Given if `reads_rows`; another model may leave the argument out.
        """

    def forward_packed(self, tokens: Tensor, positions: Tensor, is_read: Tensor, rows: Tensor | None = None) -> Tensor:
        """`forward` for the tokens [A, n] that `is_read` [A, n] bool names, the first of each row; returns their logits
        [N, V], row by row. Called if `packs_rows`."""
        raise NotImplementedError

    def expect(self, num_tokens: int) -> None:
        """Called before `start`: at most the newest `num_tokens` positions of a text are read again, and none inside
        its prompt but the newest."""

    def begin_texts(self, lengths: Tensor, rows: Tensor | None = None) -> None:
        """Called before the prompts of rows [A] int64, None = all, are read, with the lengths [A] of these prompts. A
        model needs it if it reads a prompt differently from tokens added to it."""

    def clear_rows(self, rows: Tensor) -> None:
        """Clear rows [A] int64 that begin new texts. Needed if slots that no token sees must be finite, because 0 times
        NaN is NaN."""

    def copy_rows(self, sources: Tensor, width: int) -> None:
        """Let row i have read what row sources[i] has, the first `width` tokens. Called if `reads_rows`."""
        raise NotImplementedError

    def replace_inputs(self, row: int, inputs: Mapping[str, Tensor]) -> None:
        """Take other inputs [1, ...] for a row than `start` did, or the images of the prompt that is read next in it;
        {} = it has none. Sessions call it."""

    def check_images(
        self, tokens: Tensor, lengths: Tensor, inputs: Mapping[str, Tensor] | None, attention_mask: Tensor | None
    ) -> Mapping[str, Tensor] | None:
        """The images of prompts [B, P] of `lengths` [B], in `inputs` as a caller gives them beside the `attention_mask`
        [B, P], None = no padding; None = there are none. Raises ValueError if they do not fit the prompts. Of a model
        that reads no images: `inputs` as they are."""
        return inputs

    def read_images(self, tokens: Tensor, rows: Sequence[int], num_unread: int) -> list[int]:
        """Read the prompts of `rows` in tokens [B, W] that images were taken for, but for at most the `num_unread`
        newest tokens, and free these images; returns their rows. Images in `start` belong to every prompt, whose
        sequences stand together. Raises ValueError if the model refuses the images."""
        return []

    def share_encoder(self, draft: LanguageModel) -> LanguageModel:
        """The draft model, or another form of it, that reads what this model's encoder gave; unchanged if it cannot."""
        return draft

    def first_layers(self, num_layers: int) -> LanguageModel:
        """The model that stops after its first layers, with the same weights and its own cache, as `EarlyExit` needs.

        Raises:
            TypeError: the model cannot stop early.
            ValueError: a number of layers out of range.
        """
        raise TypeError(f"target: early exit needs the method first_layers, which {type(self).__name__} lacks")


class FeatureModel(LanguageModel):
    """A language model that exposes its hidden states, as a draft with `feature_layers` needs.

    Attributes:
        num_layers: how many layers it has.
        hidden_size: H, the width of a hidden state.
        dtype: of the hidden states.
        features: [B, capacity, len(layers) * H], the layers side by side: slot j has the feature of the token that was
            last read at position j. The tensor stays the same as long as batch and capacity do.
        embed: a method or a module: the model's own embeddings [B, n, H] of tokens [B, n].
        embeddings: [V, H], their weights, before any scale or norm. DFlash alone needs these and `head`.
        head: a method or a module, the head alone: logits [B, n, V] in the dtype of `forward`, from what it reads
            [B, n, H].
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
            positions: [B, n] int64, their positions in their texts.
            slots: [B, n] int64, where their keys and values are written. A slot may repeat only for the same node.
            visible: [B, n, S] bool, the slots that hold a node's text, itself included. The node may attend to these
                slots only; slots from S on are visible to no node.
            slot_positions: [B, S] int64, the position of the token that each slot holds.
        """


# The function of `hf`, which this layer cannot import. The package's `__init__` sets it.
language_model: Callable[[Any], LanguageModel] | None = None


def refuse_class(name: str, given: object) -> None:
    if isinstance(given, type):
        raise TypeError(f"{name}: expected an object, got the class {given.__name__}")


def as_language_model(name: str, model: LanguageModel | nn.Module) -> LanguageModel:
    """The model itself, or an adapter around a transformers model."""
    refuse_class(name, model)
    if isinstance(model, LanguageModel):
        return model
    is_transformers = any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)
    # A PEFT model has a transformers model as its base.
    if is_transformers or hasattr(model, "get_base_model"):
        assert language_model is not None
        return language_model(model)
    # A result of `torch.compile` is read as its original; the loop compiles its own steps.
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):
        return as_language_model(name, original)
    raise TypeError(
        f"{name}: expected a transformers model or a LanguageModel, got {type(model)}"
        + ("; of a wrapper, pass the model inside" if isinstance(model, nn.Module) else "")
        + "; a class of your own must derive from torch_specops.drafts.LanguageModel"
    )


def feature_model(target: LanguageModel, *others: str) -> FeatureModel:
    """The target, which must expose its hidden states, and have these other members."""
    missing = [name for name in ("num_layers", "hidden_size", "dtype", "embed", *others) if not hasattr(target, name)]
    if isinstance(target, FeatureModel) and not missing:
        return target
    raise TypeError(
        f"target: the draft reads hidden states; expected a torch_specops.drafts.FeatureModel, got {type(target)}"
        + (f" without {', '.join(missing)}" if missing else "")
    )


def readable_length(model: LanguageModel) -> int | None:
    """The longest sequence that a model can read, which is not always the `max_length` that it was made for."""
    return None if model.reads_beyond else model.max_length


def readable_positions(model: LanguageModel, positions: Tensor) -> Tensor:
    """Positions that a model can read: the last that it can, where padding would stand behind it."""
    limit = readable_length(model)
    return positions if limit is None else positions.clamp(max=limit - 1)


def settings_of(part: object) -> dict[str, Any]:
    """The attributes of a model or a source that a copy or a pickle has too: those that its classes do not list in
    `_of_calls`. Tensors of a call must stay behind, because torch shares the memory of tensors that it sends to other
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
