"""The contract: the ops `torch.ops.specops.*`, each registered once by `torch.library.triton_op`.

The body checks its arguments and branches on the device: CPU (and fake or meta) tensors go to `cpu.py`, whose torch
code Inductor inlines and fuses; CUDA tensors to the Triton launchers of `kernels/`, which compile, export and
AOTInductor inline as kernels. A separate CPU registration would not compile: a triton_op is decomposed to its
Triton body on every device.
"""

from __future__ import annotations

from torch import Tensor
from torch.library import triton_op

from . import checks, cpu

__all__ = ["sample", "verify_exact", "verify_sigmoid"]


@triton_op("specops::verify_exact", mutates_args={})
def verify_exact(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
    temperature: Tensor | None = None,
    draft_lse: Tensor | None = None,
    lenience: float = 1.0,
) -> tuple[Tensor, Tensor]:
    args = (target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms, temperature, draft_lse, lenience)
    checks.check_verify_exact(*args)
    if target_logits.device.type != "cuda":
        return cpu.verify_exact(*args)
    from .kernels import verify

    return verify.verify_exact(*args)


@triton_op("specops::verify_sigmoid", mutates_args={})
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
    args = (target_logits, draft_tokens, draft_logits, accept_uniforms, sample_uniforms, alpha, beta, temperature)
    checks.check_verify_sigmoid(*args)
    if target_logits.device.type != "cuda":
        return cpu.verify_sigmoid(*args)
    from .kernels import verify

    return verify.verify_sigmoid(*args)


@triton_op("specops::sample", mutates_args={})
def sample(logits: Tensor, uniforms: Tensor, temperature: Tensor | None = None) -> tuple[Tensor, Tensor]:
    checks.check_sample(logits, uniforms, temperature)
    if logits.device.type != "cuda":
        return cpu.sample(logits, uniforms, temperature)
    from .kernels import sample as kernel

    return kernel.sample(logits, uniforms, temperature)
