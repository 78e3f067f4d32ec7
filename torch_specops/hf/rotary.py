"""Rotary embeddings whose frequencies depend on the sequence length ("longrope", "dynamic").

transformers rotates all tokens of a forward with the frequencies for the longest sequence. The loop rotates each token
with the frequencies for the length that its sequence has when the token is read, so that batching and drafts do not
change the output.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel


@dataclass
class ReadLengths:
    """`lengths` [A, n] int64: for each token of a forward, the sequence length that selects its frequencies; None = all
    tokens use the frequencies for the longest sequence, as in transformers."""

    lengths: Tensor | None = None

    @contextmanager
    def at(self, lengths: Tensor) -> Iterator[None]:
        self.lengths = lengths
        try:
            yield
        finally:
            self.lengths = None


def rereads_at(model: PreTrainedModel) -> int | None:
    """The sequence length beyond which `generate` of transformers drops its KV cache and reads the whole sequence
    again. None = it never drops its cache."""
    if not any("longrope" in kinds for _, kinds in growing_rotaries(model)):
        return None
    name = "original_max_position_embeddings"
    prepare = inspect.unwrap(type(model).prepare_inputs_for_generation)
    return getattr(model.config, name, None) if name in prepare.__code__.co_names else None


def follow_lengths(rotaries: Iterable[nn.Module], read: ReadLengths) -> None:
    """Make rotary embeddings use the lengths in `read`. Sets `forward` on the modules, so they must belong to a
    copy."""
    for rotary in rotaries:
        vars(rotary)["forward"] = partial(_rotate, rotary, vars(rotary).get("forward"), read)


def growing_rotaries(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """The rotary embeddings that depend on the sequence length, each with its kinds that do. One embedding may have a
    different kind for each type of layer."""
    for module in model.modules():
        kinds = vars(module).get("rope_type")
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        growing = [kind for kind in kinds if kind and ("dynamic" in kind or kind == "longrope")]
        if growing:
            yield module, growing


def _rotate(
    rotary: Any, original: Any, read: ReadLengths, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> Any:
    """The forward of a rotary embedding for tokens that are read at different lengths. Calls the original forward
    (`original` if the module had an instance attribute `forward`, else the method of its class) once for each set of
    frequencies."""
    forward = partial(type(rotary).forward, rotary) if original is None else original
    if layer_type is not None:
        forward = partial(forward, layer_type=layer_type)
    kind = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]
    is_dynamic = "dynamic" in kind
    if read.lengths is None or not (is_dynamic or kind == "longrope"):
        return forward(x, position_ids)
    if is_dynamic:
        switch = rotary.original_max_seq_len
    else:
        parameters = rotary.config.rope_parameters
        switch = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
    # Clamp lengths that use the same frequencies to one value. Longrope has two sets of frequencies, one up to `switch`
    # and one beyond. Dynamic scaling has another set for each length beyond `switch`.
    lengths = read.lengths.clamp(switch, None if is_dynamic else switch + 1)
    merged: tuple[Tensor, ...] | None = None
    is_single = True
    for length in lengths.unique().tolist():
        here = lengths == length
        positions = torch.where(here, position_ids, 0)
        # Append a dummy position, because the forward computes the length from the largest position.
        positions = pad(positions, (0, 1), value=length - 1 if length > switch else 0)
        rotated = forward(x, positions)
        is_single = isinstance(rotated, Tensor)
        parts = tuple(part[..., :-1, :] for part in ((rotated,) if is_single else rotated))
        if merged is not None:
            parts = tuple(torch.where(here.unsqueeze(-1), *pair) for pair in zip(parts, merged, strict=True))
        merged = parts
    if is_dynamic:
        # Read a short input to reset the frequencies, because the module keeps those of its last forward.
        forward(x, torch.zeros_like(position_ids[..., :1]))
    assert merged is not None
    return merged[0] if is_single else merged
