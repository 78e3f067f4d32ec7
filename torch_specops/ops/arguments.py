"""Named tuples with the arguments of each op, which the code in `cpu/` and `cuda/` takes, and the checks of the
arguments.

Names, order, defaults and meaning are the same as in the public functions of `api.py`. The checks read only metadata,
so they do not synchronise with the device, and they work on fake tensors too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_bool, check_bounds, check_fraction, check_number, check_tensor, is_int, is_number

if TYPE_CHECKING:
    PerRow = Tensor | float | None
else:
    # At run time the signatures must say `Tensor`, because the schemas of the ops are inferred from them.
    PerRow = Tensor | None

LOGITS = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = (torch.int64, torch.int32)
UNIFORMS = (torch.float32, torch.float64)
FLOAT32 = (torch.float32,)


class Filters(NamedTuple):
    """The temperature and the filters, with one entry per row, [N] or [B]; None = not used."""

    temperature: Tensor | None = None  # [N] float32
    top_k: Tensor | None = None  # [N] int64 or int32
    top_p: Tensor | None = None  # [N] float32
    min_p: Tensor | None = None  # [N] float32

    def at(self, rows: slice | list[int]) -> Filters:
        return Filters(*(None if value is None else value[rows] for value in self))

    @property
    def removes_tokens(self) -> bool:
        return self.top_k is not None or self.top_p is not None or self.min_p is not None


class VerifyArguments(NamedTuple):
    """The arguments of `verify_exact`. `verify_block` takes all of them except `argmax_lenience`."""

    target_logits: Tensor  # [B, K+1, V]
    draft_tokens: Tensor  # [B, K]
    draft_logits: Tensor | None  # [B, K, V]
    accept_uniforms: Tensor  # [B, K]
    sample_uniforms: Tensor  # [B]
    temperature: Tensor | None = None  # [B]
    draft_lse: Tensor | None = None  # [B, K], or [B, K, 3] with bounds
    lenience: float = 1.0
    top_k: Tensor | None = None  # [B]
    top_p: Tensor | None = None  # [B]
    min_p: Tensor | None = None  # [B]
    argmax_lenience: float = 1.0
    filter_draft: bool = True
    draft_is_one_hot: Tensor | None = None  # [B]

    @property
    def filters(self) -> Filters:
        """The filters for the target's rows."""
        return Filters(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def draft_filters(self) -> Filters:
        return self.filters if self.filter_draft else Filters(self.temperature)

    def without_bounds(self) -> VerifyArguments:
        """The same arguments with `draft_lse` [B, K]."""
        lse = self.draft_lse
        return self if lse is None or lse.dim() != 3 else self._replace(draft_lse=lse.select(2, 0))


class SigmoidArguments(NamedTuple):
    """The arguments of `verify_sigmoid`."""

    target_logits: Tensor  # [B, K+1, V]
    draft_tokens: Tensor  # [B, K]
    draft_logits: Tensor  # [B, K, V]
    accept_uniforms: Tensor  # [B, K]
    sample_uniforms: Tensor  # [B]
    alpha: float = -1e3
    beta: float = 1e3
    temperature: Tensor | None = None  # [B]


class GumbelArguments(NamedTuple):
    """The arguments of `verify_gumbel`. `sample_gumbel` uses them with K = 0."""

    target_logits: Tensor  # [B, K+1, V]
    draft_tokens: Tensor  # [B, K]
    seeds: Tensor  # [B] int64
    positions: Tensor  # [B] int64
    temperature: Tensor | None = None  # [B]
    top_k: Tensor | None = None  # [B]
    top_p: Tensor | None = None  # [B]
    min_p: Tensor | None = None  # [B]

    @property
    def filters(self) -> Filters:
        return Filters(*self[4:])


def check_verify_exact(args: VerifyArguments) -> None:
    """Check shapes, dtypes, devices and ranges, as documented in `torch_specops.verify_exact`."""
    _check_verify(args)
    if args.draft_lse is not None:
        if args.draft_logits is None:
            raise ValueError(
                "draft_lse: expected None when draft_logits is None (a one-hot draft has no logsumexp), "
                f"got shape {list(args.draft_lse.shape)}"
            )
        drafts, axes = tuple(args.draft_tokens.shape), "[B, K]"
        if args.draft_lse.dim() == 3:
            drafts, axes = (*drafts, 3), "[B, K] or [B, K, 3]"
        _check("draft_lse", args.draft_lse, drafts, axes, FLOAT32, args.target_logits.device)
    if args.draft_is_one_hot is not None:
        if args.draft_logits is None:
            raise ValueError(
                "draft_is_one_hot: expected None when draft_logits is None (all drafts are one-hot then), "
                f"got shape {list(args.draft_is_one_hot.shape)}"
            )
        batch = tuple(args.draft_tokens.shape[:1])
        _check("draft_is_one_hot", args.draft_is_one_hot, batch, "[B]", (torch.bool,), args.target_logits.device)
    check_fraction("lenience", args.lenience)
    _check_filters(args.filters, args.target_logits, "[B]")
    check_fraction("argmax_lenience", args.argmax_lenience)


def check_verify_block(args: VerifyArguments) -> None:
    if args.lenience != 1.0:
        raise ValueError(f"lenience: expected 1.0, as block verification has no other, got {args.lenience}")
    check_verify_exact(args)


def check_verify_sigmoid(args: SigmoidArguments) -> None:
    check_tensor("draft_logits", args.draft_logits, plain=False)
    _check_verify(args)
    _check_filters(Filters(args.temperature), args.target_logits, "[B]")
    check_bounds(args.alpha, args.beta)


def check_sample(logits: Tensor, uniforms: Tensor, filters: Filters) -> None:
    check_filter_logits(logits, filters)
    _check("uniforms", uniforms, (logits.shape[0],), "[N]", UNIFORMS, logits.device)


def check_filter_logits(logits: Tensor, filters: Filters) -> None:
    _check_logits("logits", logits, "[N, V]")
    _check_filters(filters, logits, "[N]")


def check_verify_gumbel(args: GumbelArguments) -> None:
    logits, tokens = args.target_logits, args.draft_tokens
    batch, num_drafts, _ = _check_target_logits(logits)
    _check("draft_tokens", tokens, (batch, num_drafts), "[B, K]", TOKENS, logits.device)
    _check_noise(args.seeds, args.positions, logits, "[B]")
    _check_filters(args.filters, logits, "[B]")


def check_sample_gumbel(logits: Tensor, seeds: Tensor, positions: Tensor, filters: Filters) -> None:
    check_filter_logits(logits, filters)
    _check_noise(seeds, positions, logits, "[N]")


def _check_noise(seeds: Tensor, positions: Tensor, logits: Tensor, axes: str) -> None:
    for name, value in (("seeds", seeds), ("positions", positions)):
        _check(name, value, (logits.shape[0],), axes, (torch.int64,), logits.device)


def _check_target_logits(logits: Tensor) -> tuple[int, int, int]:
    """Check the target logits, and return B, K and V."""
    _check_logits("target_logits", logits, "[B, K+1, V]")
    batch, num_rows, vocab_size = logits.shape
    if num_rows < 1:
        raise ValueError(f"target_logits: expected [B, K+1, V] with K >= 0, got {list(logits.shape)}")
    return batch, num_rows - 1, vocab_size


def _check_verify(args: VerifyArguments | SigmoidArguments) -> None:
    """The checks that all verify ops share. The temperature is checked by `_check_filters`."""
    logits = args.target_logits
    batch, num_drafts, vocab_size = _check_target_logits(logits)
    drafts, device = (batch, num_drafts), logits.device
    tokens, uniforms = args.draft_tokens, args.accept_uniforms
    are_tensors = isinstance(tokens, Tensor) and isinstance(uniforms, Tensor)
    if are_tensors and tokens.shape == uniforms.shape != drafts and tokens.dim() == 2 and tokens.shape[0] == batch:
        # `draft_tokens` and `accept_uniforms` agree on K, so report the logits as wrong.
        expected = f"[B, K+1, V] with K = {tokens.shape[1]}, as draft_tokens and accept_uniforms have"
        raise ValueError(f"target_logits: expected {expected}, got shape {list(logits.shape)}")
    _check("draft_tokens", args.draft_tokens, drafts, "[B, K]", TOKENS, device)
    if args.draft_logits is not None:
        _check("draft_logits", args.draft_logits, (*drafts, vocab_size), "[B, K, V]", LOGITS, device)
    _check("accept_uniforms", args.accept_uniforms, drafts, "[B, K]", UNIFORMS, device)
    _check("sample_uniforms", args.sample_uniforms, (batch,), "[B]", UNIFORMS, device)


def _check_filters(filters: Filters, logits: Tensor, axes: str) -> None:
    """Check that each filter has one entry for each index of the first dimension of the logits."""
    for name, value in zip(filters._fields, filters, strict=True):
        if value is not None:
            dtypes = TOKENS if name == "top_k" else FLOAT32
            _check(name, value, (logits.shape[0],), axes, dtypes, logits.device)


def _check_logits(name: str, logits: Tensor, axes: str) -> None:
    _check_strided(name, logits)
    rank = axes.count(",") + 1
    if logits.dim() != rank:
        raise ValueError(f"{name}: expected {rank} dimensions {axes}, got shape {list(logits.shape)}")
    _check_dtype(name, logits, LOGITS)
    if logits.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name}: expected a CPU or CUDA tensor, got a tensor on {logits.device}")
    # Limit the vocabulary, because token ids are 32-bit numbers inside the kernels.
    if not 1 <= logits.shape[-1] < 2**31 - 2**16:
        raise ValueError(f"{name}: expected a vocabulary of 1 to 2**31 - 2**16 entries, got shape {list(logits.shape)}")


def _check(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    axes: str,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    # The fast path calls no functions, because in an eager step the calls would take longer than the comparisons.
    is_strided = isinstance(tensor, Tensor) and tensor.layout == torch.strided
    if is_strided and tensor.shape == shape and tensor.dtype in dtypes and tensor.device == device:
        return
    _check_strided(name, tensor)
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected {axes} = {list(shape)}, got shape {list(tensor.shape)}")
    _check_dtype(name, tensor, dtypes)
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, as the logits are, got a tensor on {tensor.device}")


def _check_strided(name: str, tensor: Tensor) -> None:
    # Check for None too, because the dispatcher accepts None for a required tensor.
    check_tensor(name, tensor, plain=False)
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: expected a strided tensor, got layout {tensor.layout}")


def _check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected {expected}, got {str(tensor.dtype).removeprefix('torch.')}")


def filters_of(
    name: str,
    logits: Tensor,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    *,
    plain: bool = True,
) -> Filters:
    """The temperature and the filters as tensors with one entry per row. A number is checked and repeated for all rows.
    Other values are returned unchanged, and `check_kinds` raises for them."""
    check_tensor(name, logits, plain)
    return Filters(
        _per_row("temperature", temperature, logits),
        _per_row("top_k", top_k, logits),
        _per_row("top_p", top_p, logits),
        _per_row("min_p", min_p, logits),
    )


# The largest number allowed for each filter, and the words for the error message.
LARGEST = {
    "temperature": (torch.finfo(torch.float32).max, "a number >= 0 that is finite in float32"),
    "top_k": (2**63 - 1, "a number >= 0 that int64 has"),
    "top_p": (1, "a number in [0, 1]"),
    "min_p": (1, "a number in [0, 1]"),
}


def _per_row(name: str, value: Any, logits: Tensor) -> Any:
    if value is None or isinstance(value, Tensor) or not (is_int(value) if name == "top_k" else is_number(value)):
        return value
    value = check_number(name, value)
    largest, expected = LARGEST[name]
    if not 0 <= value <= largest:
        raise ValueError(f"{name}: expected {expected}, got {value}")
    dtype = torch.int64 if name == "top_k" else torch.float32
    # Use a product, because `torch.full` would specialise a traced graph to this number.
    return torch.ones(logits.shape[:1], dtype=dtype, device=logits.device) * value


NUMBERS = ("lenience", "argmax_lenience", "alpha", "beta")
FLAGS = ("filter_draft",)
# The expected types, for error messages, of arguments that may be tensors or numbers.
KINDS = {"top_k": "a tensor or an int"} | dict.fromkeys(("temperature", "top_p", "min_p"), "a tensor or a number")


def check_kinds(args: VerifyArguments | SigmoidArguments | GumbelArguments | Filters, plain: bool = True) -> None:
    """Check that numbers are numbers, flags are bools, and all other values are None or tensors. This is checked here
    because the dispatcher's error does not name the argument, and because the dispatcher accepts a bool as a number."""
    for name, value in zip(args._fields, args, strict=True):
        if name in NUMBERS:
            check_number(name, value)
        elif name in FLAGS:
            check_bool(name, value)
        elif value is not None:
            check_tensor(name, value, plain, KINDS.get(name, "a tensor"))
