"""What the ops accept. Only metadata is read, so a check costs no synchronisation and holds for fake tensors too."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "check_filter_logits",
    "check_int",
    "check_numbers",
    "check_optional_plain_tensors",
    "check_optional_tensors",
    "check_plain_tensors",
    "check_sample",
    "check_tensors",
    "check_verify_block",
    "check_verify_exact",
    "check_verify_sigmoid",
]

LOGITS = (torch.float32, torch.bfloat16, torch.float16)
TOKENS = (torch.int64, torch.int32)
UNIFORMS = (torch.float32, torch.float64)
FLOAT32 = (torch.float32,)


def check_verify_exact(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor | None,
    draft_lse: Tensor | None,
    lenience: float,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    argmax_lenience: float,
) -> None:
    _check_verify(target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms, temperature)
    if draft_lse is not None:
        if draft_logits is None:
            raise ValueError(
                "draft_lse: expected None when draft_logits is None (a one-hot draft has no logsumexp), "
                f"got shape {_shape(draft_lse)}"
            )
        batch, num_drafts = draft_tokens.shape
        _check("draft_lse", draft_lse, (batch, num_drafts), "[B, K]", FLOAT32, target_logits.device)
    if not 0.0 < lenience <= 1.0:
        raise ValueError(f"lenience: expected a number in (0, 1], got {lenience}")
    _check_filters(top_k, top_p, min_p, (target_logits.shape[0],), "[B]", target_logits.device)
    if not 0.0 < argmax_lenience <= 1.0:
        raise ValueError(f"argmax_lenience: expected a number in (0, 1], got {argmax_lenience}")


def check_verify_block(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor | None,
    draft_lse: Tensor | None,
    lenience: float,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> None:
    data = (target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms, temperature, draft_lse)
    if lenience != 1.0:
        raise ValueError(f"lenience: expected 1.0, the only one that block verification has, got {lenience}")
    check_verify_exact(*data, lenience, top_k, top_p, min_p, argmax_lenience=1.0)


def check_verify_sigmoid(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    alpha: float,
    beta: float,
    temperature: Tensor | None,
) -> None:
    check_tensors(draft_logits=draft_logits)
    _check_verify(target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms, temperature)
    if not (-math.inf < alpha < 0.0):
        raise ValueError(f"alpha: expected a finite number below 0, got {alpha}")
    if not (0.0 < beta < math.inf):
        raise ValueError(f"beta: expected a finite number above 0, got {beta}")


def check_sample(
    logits: Tensor,
    uniforms: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> None:
    check_filter_logits(logits, temperature, top_k, top_p, min_p)
    _check("uniforms", uniforms, (logits.shape[0],), "[N]", UNIFORMS, logits.device)


def check_filter_logits(
    logits: Tensor, temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> None:
    _check_rank("logits", logits, "[N, V]", LOGITS)
    _check_vocabulary("logits", logits)
    rows = (logits.shape[0],)
    if temperature is not None:
        _check("temperature", temperature, rows, "[N]", FLOAT32, logits.device)
    _check_filters(top_k, top_p, min_p, rows, "[N]", logits.device)


def _check_filters(
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    shape: tuple[int, ...],
    axes: str,
    device: torch.device,
) -> None:
    if top_k is not None:
        _check("top_k", top_k, shape, axes, TOKENS, device)
    if top_p is not None:
        _check("top_p", top_p, shape, axes, FLOAT32, device)
    if min_p is not None:
        _check("min_p", min_p, shape, axes, FLOAT32, device)


def _check_verify(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor | None,
) -> None:
    _check_rank("target_logits", target_logits, "[B, K+1, V]", LOGITS)
    _check_vocabulary("target_logits", target_logits)
    batch, num_rows, vocab_size = target_logits.shape
    if num_rows < 1:
        raise ValueError(f"target_logits: expected [B, K+1, V] with K >= 0, got {_shape(target_logits)}")
    device = target_logits.device
    drafts = (batch, num_rows - 1)
    _check("draft_tokens", draft_tokens, drafts, "[B, K]", TOKENS, device)
    if draft_logits is not None:
        _check("draft_logits", draft_logits, (*drafts, vocab_size), "[B, K, V]", LOGITS, device)
    _check("accept_uniforms", accept_uniforms, drafts, "[B, K]", UNIFORMS, device)
    _check("sample_uniforms", sample_uniforms, (batch,), "[B]", UNIFORMS, device)
    if temperature is not None:
        _check("temperature", temperature, (batch,), "[B]", FLOAT32, device)


def _check_rank(name: str, tensor: Tensor, axes: str, dtypes: tuple[torch.dtype, ...]) -> None:
    rank = axes.count(",") + 1
    _check_strided(name, tensor)
    if tensor.dim() != rank:
        raise ValueError(f"{name}: expected {rank} dimensions {axes}, got shape {_shape(tensor)}")
    _check_dtype(name, tensor, dtypes)
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name}: expected a CPU or CUDA tensor, got one on {tensor.device}")


def _check_vocabulary(name: str, logits: Tensor) -> None:
    # Token indices are 32-bit inside the kernels.
    if not 1 <= logits.shape[-1] < 2**31 - 2**16:
        raise ValueError(f"{name}: expected a vocabulary of 1 to 2**31 - 2**16 entries, got shape {_shape(logits)}")


def _check(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    axes: str,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    _check_strided(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected {axes} = {list(shape)}, got shape {_shape(tensor)}")
    _check_dtype(name, tensor, dtypes)
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, as the logits are, got one on {tensor.device}")


def _check_strided(name: str, tensor: Tensor) -> None:
    # A required tensor of an op may come as None: the dispatcher takes it for an undefined tensor.
    check_tensors(**{name: tensor})
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: expected a strided tensor, got layout {tensor.layout}")


def _check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected {expected}, got {str(tensor.dtype).removeprefix('torch.')}")


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def check_tensors(**arguments: object) -> None:
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(value)}")


def check_optional_tensors(**arguments: object) -> None:
    check_tensors(**{name: value for name, value in arguments.items() if value is not None})


# Their own dispatch would refuse the op, in words that name no argument.
REFUSED_KINDS = {"DTensor": "; torch_specops.parallel takes sharded logits", "NestedTensor": "", "MaskedTensor": ""}


def check_plain_tensors(**arguments: object) -> None:
    """Tensors that hold what they seem to hold. Other subclasses pass: what they do with an op is their own affair."""
    check_tensors(**arguments)
    for name, value in arguments.items():
        kind = "NestedTensor" if isinstance(value, Tensor) and value.is_nested else type(value).__name__
        if kind in REFUSED_KINDS:
            raise TypeError(f"{name}: expected a plain tensor, got a {kind}{REFUSED_KINDS[kind]}")


def check_optional_plain_tensors(**arguments: object) -> None:
    check_plain_tensors(**{name: value for name, value in arguments.items() if value is not None})


def check_numbers(**arguments: object) -> None:
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}: expected a number, got {type(value)}")


def check_int(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value)}")
    if value < least:
        raise ValueError(f"{name}: expected a number >= {least}, got {value}")
