"""Read all tokens of a step with one call of the forward of a module with recurrent states.

A ring holds the states of each sequence: the state before position p is in slot p mod R. The module gets `StepStates`
as its cache. `StepStates` reports that there is no earlier state, so that the module takes its code path for prompts,
which reads several tokens. The convolution and the recurrence on that path are replaced by functions of this file. For
each token, they load the state from the ring and store the new state in the next slot.

In eager calls on a CPU, the states are bit-identical however many tokens a call reads, because each token is computed
with operations of the same shapes.

Shapes: A rows are read, S tokens of each. A ring has R slots. H is the number of heads (of channels in Mamba), G of
groups of heads that share keys (B and C in Mamba-2). X and Y are the sizes of a state. A convolution has C channels and
a window of W inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from ..ops.tracing import is_eager_cpu
from .cache import cache_argument

UNLIMITED = (0.0, float("inf"))


def slots_before(positions: Tensor, num_slots: int) -> Tensor:
    """The ring slots that hold the states before these positions."""
    return positions % num_slots


# Computes one token. Arguments: the state before the token, the tensor for the state after it, and the token's
# operands. Returns the token's output.
Update = Callable[..., Tensor]


class StepStates:
    """The cache that is passed to a module while it reads the tokens of a step.

    Args:
        conv: [B, R, C, W], for each slot the last W inputs of the convolution before its position.
        recurrent: [B, R, ...] float32, the states of the recurrence; None = the module has none.
        positions: [A, S] int64, the position of each token. The state before a position must have been stored by an
            earlier call or by an earlier token of this call. A position may occur twice.
        rows: [A] int64, the sequences that are read; None = all, so A = B.
        prompt_lengths: [B] int64, the number of prompt tokens of each sequence; None = 0.
    """

    def __init__(
        self,
        conv: Tensor,
        recurrent: Tensor | None,
        positions: Tensor,
        rows: Tensor | None = None,
        prompt_lengths: Tensor | None = None,
    ) -> None:
        self._prompt_lengths = prompt_lengths
        self.conv = conv
        self.recurrent = recurrent
        self.positions = positions
        self.rows = torch.arange(len(positions), device=positions.device) if rows is None else rows
        num_slots = conv.shape[1]
        self._slots = slots_before(positions, num_slots)
        # For each token: the index of the state before it among the B * R slots of all sequences, and the slot of the
        # state after it, 0 .. R - 1.
        self._before = (self.rows.unsqueeze(1) * num_slots + self._slots).unbind(1)
        self._behind = ((positions + 1) % num_slots).unbind(1)

    def limited_in_prompts(self, limit: float, free: float) -> Tensor:
        """[A, S] float32: `limit` for prompt tokens, `free` for later tokens."""
        lengths = self._prompt_lengths
        in_prompt = self.positions < (0 if lengths is None else lengths[self.rows].unsqueeze(1))
        return torch.where(in_prompt, limit, free)

    # transformers 5.17 calls `has_previous_state`; later versions call `get_conv_state` and `get_recurrent_state`.

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The inputs [A, C, S] of a convolution -> the window of the last W inputs at each token, [S, A, C, W]."""
        seen = []
        for index, token in enumerate(inputs.unbind(2)):
            state = self._load(self.conv, index)
            state = torch.cat([state[..., 1:], token.unsqueeze(2).to(state.dtype)], 2)
            self._store(self.conv, index, state)
            seen.append(state)
        return torch.stack(seen)

    def update_recurrent_state(self, state: Tensor | Callable[[StepStates], object], *args: Any, **kwargs: Any) -> None:
        """The module calls this with the second result of our recurrence. A tensor is ignored, because `read` has
        already stored the states. For `mamba` it is a function that calls `read`."""
        if not isinstance(state, Tensor):
            state(self)

    def read(self, update: Update, *operands: Tensor) -> Tensor:
        """Apply `update` to each token: operands [A, S, ...] -> outputs [A, S, ...]."""
        assert self.recurrent is not None
        # Disable autocast, which would multiply states in 16 bits.
        with torch.autocast(self.recurrent.device.type, enabled=False):
            return self._read(self.recurrent, update, *operands)

    def _read(self, ring: Tensor, update: Update, *operands: Tensor) -> Tensor:
        outputs = []
        if is_eager_cpu(ring, self.positions):
            rows, num_slots = self.rows.tolist(), ring.shape[1]
            # Process one row at a time, so that its state stays in the CPU's cache, and write each new state directly
            # to its slot.
            places = self._slots.tolist(), self.positions.tolist()
            for row, before, positions, *tokens in zip(rows, *places, *operands, strict=True):
                slots = ring[row].unbind()
                for first, position, *token_operands in zip(before, positions, *tokens, strict=True):
                    outputs.append(update(slots[first], slots[(position + 1) % num_slots], *token_operands))
            return torch.stack(outputs).unflatten(0, self.positions.shape)
        for index, token in enumerate(zip(*(each.unbind(1) for each in operands), strict=True)):
            state = self._load(ring, index)
            outputs.append(update(state, state, *token))
            self._store(ring, index, state)
        return torch.stack(outputs, 1)

    def _load(self, ring: Tensor, index: int) -> Tensor:
        """The states [A, ...] before token `index` of each row."""
        return ring.flatten(0, 1).index_select(0, self._before[index])

    def _store(self, ring: Tensor, index: int, state: Tensor) -> None:
        # Index the ring directly: for a write to a view of it, Inductor would copy the whole ring.
        ring[self.rows, self._behind[index]] = state


def step_forward(module: nn.Module) -> Callable[..., Any] | None:
    """A function that calls the module's forward for all tokens of a step at once; None = the module's recurrence is
    not supported here. The function takes a `StepStates` and the keyword arguments of the module's forward except the
    cache. The module and its class do not change.
    """
    forward = inspect.unwrap(type(module).forward)
    names = set(forward.__code__.co_names)
    if "causal_conv1d_fn" not in names or ("update_recurrent_state" in names and not names & RECURRENCES.keys()):
        return None
    # Zamba is not supported: it calls the recurrence for each head and stacks the states.
    if "stack" in names:
        return None
    function, cache_name = _exchanged(forward), cache_argument(forward)
    names_of_states = (cache_name, "step") if "update_recurrent_state" in names else (cache_name,)

    def read(states: StepStates, **arguments: Any) -> Any:
        return function(module, **arguments, **dict.fromkeys(names_of_states, states))

    return read


@cache
def _exchanged(forward: FunctionType) -> FunctionType:
    """A copy of a forward in which the global names in `EXCHANGED` refer to functions of this file."""
    # Leave out `__name__`, because Dynamo would resolve global names in the module with that name.
    names = {name: value for name, value in forward.__globals__.items() if name != "__name__"} | EXCHANGED
    function = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    function.__kwdefaults__ = forward.__kwdefaults__
    return function


def convolve(
    seen: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Tensor:
    """Replaces `causal_conv1d_fn`: the windows from `update_conv_state` [S, A, C, W], weight [C, W], bias [C] -> [A, C,
    S]."""
    dtype = torch.promote_types(seen.dtype, torch.float32)
    inputs, factors = seen.to(dtype).unbind(3), weight.to(dtype).unbind(1)
    total = inputs[0] * factors[0] if bias is None else torch.addcmul(bias.to(dtype), inputs[0], factors[0])
    for each, factor in zip(inputs[1:], factors[1:], strict=True):
        total = total.addcmul(each, factor)
    total = total.to(seen.dtype)
    # Apply the activation to each token separately: the vectorised loop may round the last elements of a tensor
    # differently, and a token's result would depend on the number of tokens.
    if activation is not None:
        total = torch.stack([ACT2FN[activation](token) for token in total.unbind()])
    return total.permute(1, 2, 0)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, step: StepStates, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: query, key [A, S, G, X], value [A, S, H, Y], beta [A, S, H], g [A, S, H], or [A, S, H, X]
    if each channel has its decay (Kimi) -> output [A, S, H, Y], and a dummy that the module passes to
    `update_recurrent_state`."""
    num_heads, dtype = value.shape[2], query.dtype
    # Stack key and query as [A, S, H, 2, X], so that one product with the state serves both.
    key_query = torch.stack([key, query], 3).float()
    key_query = key_query * torch.rsqrt((key_query * key_query).sum(-1, keepdim=True) + 1e-6)
    key_query = key_query.repeat_interleave(num_heads // key.shape[2], 2)
    g = g if g.dim() == 4 else g.unsqueeze(3)
    operands = key_query, value.float(), g.float(), beta.float().unsqueeze(3)
    return step.read(_delta_update, *operands).to(dtype), beta


def _delta_update(state: Tensor, new: Tensor, key_query: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    # [..., H, 1 or X]
    decay = g.exp()
    # The products of key and query with the decayed state, [..., H, Y]
    known, answer = _products(key_query * decay.unsqueeze(-2), state).unbind(-2)
    delta = (value - known) * beta
    key, query = key_query.unbind(-2)
    torch.mul(state, decay.unsqueeze(-1), out=new).addcmul_(key.unsqueeze(-1), delta.unsqueeze(-2))
    return (answer + (key * query).sum(-1, keepdim=True) * delta) * query.shape[-1] ** -0.5


def mamba2(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    step: StepStates,
    dt_limit: tuple[float, float] = UNLIMITED,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The recurrence of Mamba-2: hidden_states [A, S, H, X], dt [A, S, H], A, D, dt_bias [H], B, C [A, S, G, Y] ->
    output [A, S, H, X], and a dummy that the module passes to `update_recurrent_state`."""
    # Clamp `dt` only for prompt tokens: transformers clamps it in prefill, but not in decode steps.
    pairs = zip(dt_limit, UNLIMITED, strict=True) if dt_limit != UNLIMITED else ()
    limits = [step.limited_in_prompts(*pair)[..., None, None] for pair in pairs]
    groups = B.shape[2]
    # [..., G, H / G, ...]
    hidden, dt = (each.unflatten(2, (groups, -1)) for each in (hidden_states.float(), dt))
    A, D, dt_bias = (each.unflatten(0, (groups, -1)) for each in (A, D.float(), dt_bias.to(dt.dtype)))

    def update(state: Tensor, new: Tensor, hidden: Tensor, dt: Tensor, B: Tensor, C: Tensor, *limits: Tensor) -> Tensor:
        state, new = (each.unflatten(-3, (groups, -1)) for each in (state, new))
        dt = F.softplus(dt + dt_bias).float()
        if limits:
            dt = dt.clamp(*limits)
        torch.mul(state, (dt * A).exp()[..., None, None], out=new)
        new.addcmul_((hidden * dt.unsqueeze(-1)).unsqueeze(-1), B[..., None, None, :])
        return _products(C.unsqueeze(-2), new.flatten(-3, -2).transpose(-1, -2))

    output = step.read(update, hidden, dt, B.float(), C.float(), *limits).view(hidden.shape)
    output = (output + hidden * D.unsqueeze(2)).to(hidden_states.dtype)
    return output.reshape(hidden_states.shape).contiguous(), dt


def mamba(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    **kwargs: Any,
) -> tuple[Tensor, Callable[[StepStates], Tensor]]:
    """The recurrence of Mamba: hidden_states, dt, z [A, H, S], A [H, Y], D, delta_bias [H], B, C [A, Y, S] -> output
    [A, H, S], and a function that fills the output. The module passes the cache only to `update_recurrent_state`, which
    calls that function."""
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    D, delta_bias = D.to(dtype), delta_bias.to(dt.dtype)

    def update(state: Tensor, new: Tensor, hidden: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor) -> Tensor:
        dt = F.softplus(dt + delta_bias).to(dtype)
        torch.mul(state, (dt.unsqueeze(-1) * A).exp(), out=new)
        new.addcmul_((hidden * dt).unsqueeze(-1), B.unsqueeze(-2))
        output = _products(C.unsqueeze(-2), new.transpose(-1, -2)).squeeze(-2)
        return (output + hidden * D) * F.silu(z)

    output = torch.empty_like(hidden_states)
    operands = [each.transpose(1, 2) for each in (hidden_states.to(dtype), dt, B.to(dtype), C.to(dtype), z.to(dtype))]
    return output, lambda step: output.copy_(step.read(update, *operands).transpose(1, 2))


def _products(vectors: Tensor, matrix: Tensor) -> Tensor:
    """vectors [..., N, X] @ matrix [..., X, Y]. On CUDA this multiplies and sums, because a matrix product may round to
    TF32."""
    return vectors @ matrix if matrix.is_cpu else (vectors.unsqueeze(-1) * matrix.unsqueeze(-3)).sum(-2)


RECURRENCES: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2,
    "mamba_selective_scan": mamba,
}
EXCHANGED = RECURRENCES | {"causal_conv1d_fn": convolve}
