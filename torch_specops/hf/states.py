"""Rings of states: how layers that keep a state (linear attention, Mamba, short convolutions) read ragged rows and are
rolled back.

The state before position p of a sequence is in slot p mod R of a static buffer [B, R, ...], as the keys of token p are
in slot p of the cache. A module reads a token with the state in the slot of its position, and writes the state after it
to the next slot. To undo rejected drafts, the next forward reads at an earlier position again: nothing is restored or
counted, and repeating a read changes nothing.

Prompts are read as `generate` reads them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from ..models.base import placed
from ..ops.tracing import normal_tensors
from .cache import RaggedCache, RaggedLayer, cache_argument
from .recurrences import StepStates, slots_before, step_forward
from .references import is_foreign

# A state of a layer: "conv_states" or "recurrent_states", and its index.
State = tuple[str, int]
KINDS = ("conv_states", "recurrent_states")
# The states of the modules that `recurrences.py` supports.
STATES_OF_STEPS = ((("conv_states", 0),), (("conv_states", 0), ("recurrent_states", 0)))
# The cache methods that a forward calls if it keeps a state, and the method that it calls if it keeps keys.
KEEPS_A_STATE = {"update_conv_state", "update_recurrent_state", "get_recurrent_state"}
KEEPS_KEYS = "update"


def state_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose forward keeps a state in the cache.

    Raises:
        ValueError: a module keeps keys too, so it cannot read token by token.
    """
    modules = list(model.modules())
    forwards = {kind: _forward_with_state(kind) for kind in {*map(type, modules)}}
    for module in modules:
        forward = forwards[type(module)]
        if forward is not None and KEEPS_KEYS in _names_in(forward):
            raise ValueError(f"model: {type(module).__name__} is attention and keeps a state in one forward")
        if forward is not None:
            yield module


def _forward_with_state(kind: type) -> Callable[..., Any] | None:
    """The first forward along the MRO that calls a method in KEEPS_A_STATE; None = no forward does. A class's forward
    may call an inherited one."""
    forwards = (vars(each)["forward"] for each in kind.__mro__ if "forward" in vars(each))
    return next((each for each in forwards if KEEPS_A_STATE & _names_in(each)), None)


def _names_in(forward: Callable[..., Any]) -> set[str]:
    return set(getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_names", ()))


class StateLayer(RaggedLayer, LinearAttentionLayer):
    """The keys and values of a layer, and the rings of its states if the layer keeps states. Between `load` and
    `store`, the states of one token are where transformers' layer keeps them. Several modules may share a layer."""

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
        # `store` copies the state to the ring.
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    def clear(self, rows: Tensor | None = None) -> None:
        super().clear(rows)
        self.clear_rings(rows)

    def clear_rings(self, rows: Tensor | None = None) -> None:
        for ring in self.rings.values():
            if rows is None:
                ring.zero_()
            else:
                ring.index_fill_(0, rows, 0)

    def copy_rows(self, sources: Tensor, width: int) -> None:
        super().copy_rows(sources, width)
        for ring in self.rings.values():
            ring.copy_(ring[sources])

    def static_tensors(self) -> list[Tensor]:
        return [*super().static_tensors(), *self.rings.values()]

    def forget(self) -> None:
        """Drop the current states: the next read begins a sequence or loads states."""
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
            ring = self.rings[kind, index]
            ring[rows, slots] = getattr(self, kind)[index].to(ring.dtype)

    def written(self) -> tuple[State, ...]:
        """The states that a module has written since `forget`. A state without a ring gets one.

        Raises:
            RuntimeError: there is no memory for a ring; running sequences have states of another shape or dtype.
        """
        found = tuple((kind, i) for kind in KINDS for i, state in getattr(self, kind).items() if state is not None)
        for kind, index in found:
            state = getattr(self, kind)[index]
            if kind == "recurrent_states":
                # Under autocast, states after a prompt may have 16 bits. States after a step never do.
                state = state.to(torch.promote_types(state.dtype, torch.float32))
            ring = self.rings.get((kind, index))
            if ring is not None and _kind(ring[0]) != _kind(state) and self._cache.others_run:
                (old_shape, old, _), (new_shape, new, _) = _kind(ring[0]), _kind(state)
                raise RuntimeError(
                    f"forward: what was read since start has {old} states {list(old_shape)}, and this forward gives "
                    f"{new}, {list(new_shape)}; read all texts with the same layers under the same torch.autocast"
                )
            if ring is None or _kind(ring[0]) != _kind(state):
                self.rings[kind, index] = self._cache.new_ring(state)
        return found


class StateCache(RaggedCache):
    """Keys, values and states of every layer.

    Args:
        num_layers: as in `RaggedCache`.
        num_slots: R, the slots of a ring: one more than the tokens of a step.
        num_states: how many states of each kind a layer has.

    Attributes:
        begins_texts: True = the forward begins the sequences of its rows.
        others_run: True = sequences of other rows have been read since `start`.
        prompt_lengths: [B] int64, at one address for all batches of the same size.
    """

    def __init__(self, num_layers: int, num_slots: int, num_states: int) -> None:
        self.num_slots, self.num_states = num_slots, num_states
        super().__init__(num_layers)
        self.begins_texts = self.others_run = False
        self.prompt_lengths = torch.zeros(0, dtype=torch.int64)
        # The rows whose next read begins a sequence.
        self._unread: set[int] = set()

    def _new_layer(self) -> StateLayer:
        return StateLayer(self, self.num_states)

    def start(self, batch: int, capacity: int, like: Tensor) -> None:
        super().start(batch, capacity, like)
        for layer in self.layers:
            layer.clear_rings()
        self.prompt_lengths = placed(self.prompt_lengths, like.new_zeros(batch, dtype=torch.int64))
        self._unread = set(range(batch))

    def begin_texts(self, lengths: Tensor, rows: Tensor | None) -> None:
        """Begin the sequences of rows [A] (None = all) with the next reads, whose prompts have lengths [A]."""
        self.prompt_lengths[slice(None) if rows is None else rows] = lengths
        self._unread.update(range(self.batch) if rows is None else rows.tolist())

    def copy_rows(self, sources: Tensor, width: int) -> None:
        super().copy_rows(sources, width)
        self._unread = {row for row, source in enumerate(sources.tolist()) if source in self._unread}

    def static_tensors(self) -> list[Tensor]:
        return [*super().static_tensors(), self.prompt_lengths]

    @contextmanager
    def beginning(self, rows: Tensor | None) -> Iterator[None]:
        """Inside the block, a forward of rows [A] (None = all) begins their sequences if nothing was read of any of
        these rows."""
        # Decode steps have no unread rows, so they skip `tolist`, which waits for the device.
        if self._unread:
            members = set(range(self.batch) if rows is None else rows.tolist())
            self.begins_texts = members <= self._unread
            self.others_run = len(self._unread | members) < self.batch
            self._unread -= members
        try:
            yield
        finally:
            self.begins_texts = False

    @property
    def rings(self) -> list[Tensor]:
        return [ring for layer in self.layers for ring in layer.rings.values()]

    def repeat_states(self, row: Tensor, position: int, at: int) -> None:
        """Copy a row's states before `position` to the slot of position `at`."""
        for ring in self.rings if at != position else ():
            ring[row, at % self.num_slots] = ring[row, position % self.num_slots]

    @normal_tensors()
    def new_ring(self, state: Tensor) -> Tensor:
        """A ring [B, R, ...] for states [A, ...]."""
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
    """Reads tokens at any positions with one module that keeps a state. The module is a copy in a `ShadowModel`.

    Prompts are read as `generate` reads them. The tokens of a step are read at once if `recurrences.py` supports the
    module, otherwise one by one, as `generate` decodes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._layer: int = vars(module)["layer_idx"]
        self._states: tuple[State, ...] = ()
        # Keep this object after every look, because compiled code guards on its identity.
        self._forward = partial(_read, self)
        self._code: Any = None

    def attach(self) -> None:
        """Replace the module's forward. Called after `ShadowModel.of` has updated the module's class and
        attributes."""
        module, code = self._module, type(self._module).forward
        own = vars(module).get("forward")
        if code is not self._code:
            kept = _forward_with_state(type(module))
            assert kept is not None
            self._code, self._names = code, list(inspect.signature(kept).parameters)[1:]
            self._cache_name = cache_argument(kept)
            self._at_once = None if is_foreign(code) else step_forward(module)
            self._whole = partial(code, module)
        self._read_whole: Callable[..., Any] = own or self._whole
        self._read_step = self._at_once if own is None else None
        module.forward = self._forward


def _read(reader: StateReader, *args: Any, **kwargs: Any) -> Any:
    """The module's forward for hidden states [A, n, H], with the module's arguments."""
    arguments = dict(zip(reader._names, args, strict=False)) | kwargs
    cache = arguments.get(reader._cache_name)
    if not isinstance(cache, StateCache):
        return reader._read_whole(**arguments)
    layer, positions, num_slots = cache.layers[reader._layer], cache.slots, cache.num_slots
    assert positions is not None
    rows = torch.arange(positions.shape[0], device=positions.device) if cache.rows is None else cache.rows
    if cache.begins_texts:
        layer.forget()
        output = reader._read_whole(**arguments)
        reader._states = layer.written()
        layer.store(reader._states, rows, (positions[:, -1] + 1) % num_slots)
        return output
    if reader._read_step is not None and reader._states in STATES_OF_STEPS:
        del arguments[reader._cache_name]
        conv, recurrent = layer.rings["conv_states", 0], layer.rings.get(("recurrent_states", 0))
        return reader._read_step(StepStates(conv, recurrent, positions, rows, cache.prompt_lengths), **arguments)
    hidden, outputs = arguments[reader._names[0]], []
    for index in range(hidden.shape[1]):
        layer.load(reader._states, rows, slots_before(positions[:, index], num_slots))
        arguments[reader._names[0]] = hidden[:, index : index + 1]
        outputs.append(reader._read_whole(**arguments))
        layer.store(reader._states, rows, (positions[:, index] + 1) % num_slots)
    # Drop the last states, because a compiled region must not leak tensors.
    layer.forget()
    return _joined(outputs)


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(_joined(each) for each in zip(*parts, strict=True))
    return torch.cat([*parts], 1) if isinstance(parts[0], Tensor) else parts[0]


def _kind(state: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return state.shape[1:], state.dtype, state.device
