"""A ring of states: how layers that keep a state of the text (linear attention, Mamba, short convolutions) read ragged
rows and are rolled back.

The state before position p of a text stands in slot p mod R of a static buffer [B, R, ...], as the keys of its token
stand in slot p of the cache. A module reads a token with the state in the slot of its position, and writes the state
behind it to the next slot. To undo rejected drafts, the next forward reads at an earlier position again: nothing is
restored or counted, and a read that is repeated changes nothing.

All computing is transformers' own. The text of a prompt is read as `generate` reads it, in chunks; later tokens one
after another, as `generate` decodes, but for the projections, which read all tokens at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from ..ops import private
from ..ops.tracing import is_eager_cpu, normal_tensors
from .cache import RaggedCache, RaggedLayer

__all__ = ["StateCache", "StateReader", "state_modules"]

# A state of a layer: "conv_states" or "recurrent_states", and its index.
State = tuple[str, int]
KINDS = ("conv_states", "recurrent_states")
# What a forward calls that keeps a state in the cache; and what one calls that keeps keys.
KEEPS_A_STATE = {"update_conv_state", "update_recurrent_state", "get_recurrent_state"}
KEEPS_KEYS = "update"


def state_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose own forward keeps a state in the cache.

    Raises:
        ValueError: one keeps keys too, and cannot read token by token.
    """
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        names = set() if code is None else KEEPS_A_STATE & {*code.co_names} and {*code.co_names}
        if KEEPS_KEYS in names:
            raise ValueError(f"model: {type(module).__name__} is attention and keeps a state in one forward")
        if names:
            yield module


class StateLayer(RaggedLayer, LinearAttentionLayer):
    """The keys and values of a layer, and the ring of its states, each if it has them. Between `load` and `store` the
    states of one token are where transformers' own layer has them; several modules may share a layer."""

    def __init__(self, cache: StateCache, num_states: int) -> None:
        RaggedLayer.__init__(self, cache)
        LinearAttentionLayer.__init__(self, number_of_states=num_states)
        self.rings: dict[State, Tensor] = {}

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        if keys_and_values:
            RaggedLayer.lazy_initialization(self, *keys_and_values)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        # `store` copies it.
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def clear(self, rows: Tensor | None = None) -> None:
        if self.is_initialized:
            super().clear(rows)
        self.clear_rings(rows)

    def clear_rings(self, rows: Tensor | None = None) -> None:
        for ring in self.rings.values():
            if rows is None:
                ring.zero_()
            else:
                ring.index_fill_(0, rows, 0)

    def copy_rows(self, sources: Tensor, width: int) -> None:
        if self.is_initialized:
            super().copy_rows(sources, width)
        for ring in self.rings.values():
            ring.copy_(ring[sources])

    def begin(self) -> None:
        """What is read next begins a text."""
        for index in range(self.number_of_states):
            self.has_previous_state[index] = False
            for kind in KINDS:
                getattr(self, kind)[index], getattr(self, f"is_{kind}_initialized")[index] = None, False

    def load(self, states: tuple[State, ...], rows: Tensor, slots: Tensor) -> None:
        for kind, index in states:
            getattr(self, kind)[index] = self.rings[kind, index][rows, slots]
            getattr(self, f"is_{kind}_initialized")[index] = self.has_previous_state[index] = True

    def store(self, states: tuple[State, ...], rows: Tensor, slots: Tensor) -> None:
        for kind, index in states:
            self.rings[kind, index][rows, slots] = getattr(self, kind)[index]

    def written(self) -> tuple[State, ...]:
        """The states that a module has written since `begin`; those that are new get a ring.

        Raises:
            RuntimeError: there is no memory for it.
        """
        found = tuple((kind, i) for kind in KINDS for i, state in getattr(self, kind).items() if state is not None)
        for kind, index in found:
            state = getattr(self, kind)[index]
            ring = self.rings.get((kind, index))
            if ring is None or _kind(ring[0]) != _kind(state):
                self.rings[kind, index] = self._cache.new_ring(state)
        return found


class StateCache(RaggedCache):
    """Keys, values and states of every layer.

    Args:
        batch, capacity, num_layers: as of a `RaggedCache`.
        num_slots: R, the slots of a ring: one more than the tokens of a step.
        num_states: how many states of a kind a layer has.

    Attributes:
        begins_texts: True = what a forward reads begins texts.
    """

    def __init__(self, batch: int, capacity: int, num_layers: int, num_slots: int, num_states: int) -> None:
        super().__init__(batch, capacity, 0)
        self.layers = [StateLayer(self, num_states) for _ in range(num_layers)]
        self.num_slots = num_slots
        self.begins_texts = False

    def begin(self) -> None:
        super().begin()
        for layer in self.layers:
            layer.clear_rings()

    @property
    def rings(self) -> list[Tensor]:
        return [ring for layer in self.layers for ring in layer.rings.values()]

    @normal_tensors()
    def new_ring(self, state: Tensor) -> Tensor:
        """[B, R, ...] for states [A, ...]."""
        shape = self.batch, self.num_slots, *state.shape[1:]
        try:
            return state.new_zeros(shape)
        except RuntimeError as error:
            size = state[0].numel() * state.element_size() * self.batch * self.num_slots
            held = sum(ring.numel() * ring.element_size() for ring in self.rings)
            raise RuntimeError(
                f"model: no memory for the states that drafts may be undone to: {size * 1e-6:.0f} MB for a layer, "
                f"{list(shape)} {state.dtype}, after {held * 1e-6:.0f} MB for the layers before; "
                "use a smaller batch or fewer drafts"
            ) from error


class StateReader:
    """Reads tokens at any positions with one module that keeps a state, a copy in a `ShadowModel`.

    Its first read of a prompt finds its parts. A head is a child that is given the module's own input, the tail a child
    whose output is the module's: these projections read all tokens at once, and the rest of the module, convolution and
    recurrence, reads one token after another.

    Args:
        module: the copy.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]
        (self._cache_name,) = {"cache_params", "past_key_values", "cache"} & set(self._names)
        self._states: tuple[State, ...] = ()
        self._heads: list[str] | None = None
        self._tail: str | None = None
        # While tokens are read one after another: which, what the heads made of all, and what the tail was given.
        self._index: int | None = None
        self._of_heads: dict[str, Tensor] = {}
        self._for_tail: list[Tensor] = []
        # The same objects after every look: what is compiled looks at their identity.
        self._forward = partial(_read, self)
        self._head_forwards: dict[str, Any] = {}
        self._tail_forward = partial(_forward_of_tail, self)
        self._own_forward: Any = None
        self._layer: int = vars(module)["layer_idx"]
        self._at_once = False

    def attach(self) -> None:
        """Read in place of the module, whose attributes a look has made anew."""
        self._own_forward = vars(self._module).get("forward")
        self._module.forward = self._forward
        self._attach_parts()

    def _attach_parts(self) -> None:
        children = [*(self._heads or ()), *([self._tail] if self._tail else ())]
        # A hook may change what its module gives, and must not see a token twice.
        self._at_once = not private.global_hooks() and all(
            "forward" not in vars(each) and not each._forward_hooks and not each._forward_pre_hooks
            for each in map(self._child, children)
        )
        if self._at_once:
            for name in self._heads or ():
                self._child(name).forward = self._head_forwards[name]
            if self._tail is not None:
                self._child(self._tail).forward = self._tail_forward

    def _child(self, name: str) -> nn.Module:
        return self._module.get_submodule(name)

    def _read_itself(self, hidden: Tensor, arguments: dict[str, Any]) -> Any:
        forward = self._own_forward or partial(type(self._module).forward, self._module)
        return forward(**arguments | {self._names[0]: hidden})

    def _begin(self, hidden: Tensor, arguments: dict[str, Any], layer: StateLayer) -> Any:
        layer.begin()
        if self._heads is not None:
            result = self._read_itself(hidden, arguments)
        else:
            result = self._find_parts(hidden, arguments)
        self._states = layer.written()
        return result

    def _find_parts(self, hidden: Tensor, arguments: dict[str, Any]) -> Any:
        heads, outputs, handles = [], [], []

        def note(name: str, child: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            if len(given) == 1 and given[0] is hidden:
                heads.append(name)
            outputs.append((name, output))

        for name, child in self._module.named_children():
            handles.append(child.register_forward_hook(partial(note, name)))
        try:
            result = self._read_itself(hidden, arguments)
        finally:
            for handle in handles:
                handle.remove()
        self._heads = heads
        self._head_forwards = {name: partial(_forward_of_head, self, name) for name in heads}
        self._tail = next((name for name, output in outputs if output is result), None)
        self._attach_parts()
        return result


def _kind(state: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return state.shape[1:], state.dtype, state.device


def _plain(reader: StateReader, name: str, hidden: Tensor) -> Any:
    child = reader._child(name)
    return type(child).forward(child, hidden)


def _forward_of_head(reader: StateReader, name: str, hidden: Tensor) -> Any:
    index = reader._index
    return _plain(reader, name, hidden) if index is None else reader._of_heads[name][:, index : index + 1]


def _forward_of_tail(reader: StateReader, hidden: Tensor) -> Any:
    assert reader._tail is not None
    if reader._index is None:
        return _plain(reader, reader._tail, hidden)
    reader._for_tail.append(hidden)
    return hidden


def _read(reader: StateReader, *args: Any, **kwargs: Any) -> Any:
    """The forward of the module [A, n, H]; arguments are its own."""
    arguments = dict(zip(reader._names, args, strict=False)) | kwargs
    hidden, cache = arguments[reader._names[0]], arguments.get(reader._cache_name)
    if not isinstance(cache, StateCache):
        return reader._read_itself(hidden, arguments)
    layer, positions = cache.layers[reader._layer], cache.slots
    assert positions is not None
    rows = torch.arange(positions.shape[0], device=positions.device) if cache.rows is None else cache.rows
    if not cache.begins_texts:
        return _read_tokens(reader, layer, cache.num_slots, rows, hidden, positions, arguments)
    result = reader._begin(hidden, arguments, layer)
    layer.store(reader._states, rows, (positions[:, -1] + 1) % cache.num_slots)
    return result


def _read_tokens(
    reader: StateReader,
    layer: StateLayer,
    num_slots: int,
    rows: Tensor,
    hidden: Tensor,
    positions: Tensor,
    arguments: dict[str, Any],
) -> Any:
    count, outputs = hidden.shape[1], []
    at_once = reader._at_once and count > 1
    if at_once:
        reader._of_heads = {name: _plain(reader, name, hidden) for name in reader._heads or ()}
    # A token behind the one before it begins with that one's state. Compiled code fuses the load.
    follows = is_eager_cpu(positions) and bool((positions.diff() == 1).all())
    try:
        for index in range(count):
            if index == 0 or not follows:
                layer.load(reader._states, rows, positions[:, index] % num_slots)
            reader._index = index if at_once else None
            outputs.append(reader._read_itself(hidden[:, index : index + 1], arguments))
            layer.store(reader._states, rows, (positions[:, index] + 1) % num_slots)
    finally:
        for_tail, reader._for_tail, reader._of_heads, reader._index = reader._for_tail, [], {}, None
    if not for_tail or reader._tail is None:
        return _joined(outputs)
    return _plain(reader, reader._tail, torch.cat(for_tail, 1))


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(_joined(each) for each in zip(*parts, strict=True))
    return torch.cat([*parts], 1) if isinstance(parts[0], Tensor) else parts[0]
