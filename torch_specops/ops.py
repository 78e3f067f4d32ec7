"""The contract: the ops `torch.ops.specops.*`, each registered once by `torch.library.triton_op`.

The body checks its arguments and branches on the device: CPU (and fake or meta) tensors go to `cpu/`, whose torch
code Inductor inlines and fuses; CUDA tensors to the Triton launchers of `kernels/`, which compile, export and
AOTInductor inline as kernels. A separate CPU registration would not compile: a triton_op is decomposed to its
Triton body on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from . import checks, cpu
from .arguments import Filters, SigmoidArguments, VerifyArguments

__all__ = ["filter_logits", "sample", "verify_block", "verify_exact", "verify_sigmoid"]


def _source_digest() -> str:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


# torch caches compiled graphs on disk by the names of ops, not by their bodies: without this, a new version of the
# package would go on running what was compiled from the old one.
torch.compiler.config.cache_key_tag += f":torch_specops-{_source_digest()}"


def _triton_op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """torch.library.triton_op without its search of the body for kernels, which would import Triton and Inductor here
    (2 s, and a warning for each op where there is no Triton) and cannot see behind the imports in the bodies anyway."""

    def register(fn: Callable[..., Any]) -> Any:
        library: Any = torch._library.triton
        search = library.get_inner_triton_kernels
        library.get_inner_triton_kernels = lambda fn: []
        try:
            return torch.library.triton_op(name, fn, mutates_args={})
        finally:
            library.get_inner_triton_kernels = search

    return register


def _on_device_of(logits: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, whichever the tensors are on. A call that is traced launches nothing, and
    what Inductor generates sets the device itself."""
    return nullcontext() if is_fake(logits) else torch.cuda.device(logits.device)


@_triton_op("specops::verify_exact")
def verify_exact(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor | None = None,
    draft_lse: Tensor | None = None,
    lenience: float = 1.0,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    argmax_lenience: float = 1.0,
) -> tuple[Tensor, Tensor]:
    data = (target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms)
    args = (*data, temperature, draft_lse, lenience, top_k, top_p, min_p, argmax_lenience)
    checks.check_verify_exact(*args)
    if target_logits.device.type != "cuda":
        return cpu.verify_exact(*args)
    from .kernels import verify

    with _on_device_of(target_logits):
        return verify.verify_exact(VerifyArguments(*args))


@_triton_op("specops::verify_block")
def verify_block(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor | None = None,
    draft_lse: Tensor | None = None,
    lenience: float = 1.0,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    data = (target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms)
    args = (*data, temperature, draft_lse, lenience, top_k, top_p, min_p)
    checks.check_verify_block(*args)
    if target_logits.device.type != "cuda":
        return cpu.verify_block(*args)
    from .kernels import verify

    with _on_device_of(target_logits):
        return verify.verify_block(VerifyArguments(*args))


@_triton_op("specops::verify_sigmoid")
def verify_sigmoid(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    alpha: float = -1e3,
    beta: float = 1e3,
    temperature: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    data = (target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms)
    args = (*data, alpha, beta, temperature)
    checks.check_verify_sigmoid(*args)
    if target_logits.device.type != "cuda":
        return cpu.verify_sigmoid(*args)
    from .kernels import verify

    with _on_device_of(target_logits):
        return verify.verify_sigmoid(SigmoidArguments(*args))


@_triton_op("specops::sample")
def sample(
    logits: Tensor,
    uniforms: Tensor,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    args = (logits, uniforms, temperature, top_k, top_p, min_p)
    checks.check_sample(*args)
    if logits.device.type != "cuda":
        return cpu.sample(*args)
    from .kernels import sample as kernel

    with _on_device_of(logits):
        return kernel.sample(logits, uniforms, Filters(*args[2:]))


@_triton_op("specops::filter_logits")
def filter_logits(
    logits: Tensor,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    args = (logits, temperature, top_k, top_p, min_p)
    checks.check_filter_logits(*args)
    if logits.device.type != "cuda":
        return cpu.filter_logits(*args)
    from .kernels import filter as kernel

    with _on_device_of(logits):
        return kernel.filter_logits(logits, Filters(*args[1:]))


def _mark_non_differentiable(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*((output,) if isinstance(output, Tensor) else output))


def _no_gradient(ctx: Any, *gradients: Tensor) -> None:
    raise RuntimeError("the specops ops have no gradient")


# Without this, floating-point outputs ask for the gradient of logits that require one, and a compiled model outside
# no_grad fails.
sample.register_autograd(_no_gradient, setup_context=_mark_non_differentiable)
filter_logits.register_autograd(_no_gradient, setup_context=_mark_non_differentiable)


def _register_vmap(op: Any) -> None:
    """torch.func.vmap: what is mapped over joins the rows, which do not see each other."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        def joined(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            mapped = value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            return mapped.flatten(0, 1)

        def parted(result: Tensor) -> Tensor:
            # Said in full: a batch of none leaves no size to be inferred.
            return result.reshape(info.batch_size, result.shape[0] // info.batch_size, *result.shape[1:])

        result = op(*(joined(value, dim) for value, dim in zip(args, in_dims, strict=True)))
        if isinstance(result, Tensor):
            return parted(result), 0
        return tuple(parted(each) for each in result), (0,) * len(result)

    op.register_vmap(rule)


for _op in (verify_exact, verify_sigmoid, sample, filter_logits):
    _register_vmap(_op)
