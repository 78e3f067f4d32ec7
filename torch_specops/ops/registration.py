"""Registers the ops with torch: schema, fake kernel, decomposition, vmap, and no gradient."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import private
from .tracing import is_eager_cpu

# Op -> the function that runs it. Tests with stand-ins for CUDA tensors call it without the dispatcher.
bodies: dict[str, Callable[..., Any]] = {}


def register_op(
    public: Callable[..., Any], is_opaque: Callable[..., bool] = lambda **_: False, opaque_on_cuda: bool = False
) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the body of `torch.ops.specops.<name>`, with the name and the signature of `public`, and
    return the function that `public` calls: it calls the op or, to save the dispatch, the body if the call is eager and
    on a CPU.

    This replaces `torch.library.triton_op`, which searches the body's source for kernels. That search imports Triton
    and Inductor (2 s, and a warning per op without Triton) and misses kernels that the body imports.

    Args:
        is_opaque: takes the arguments by name, and returns whether compiled code on a CPU calls the op instead of
            inlining its body. Code of AOTInductor, which runs without Python, always inlines it.
        opaque_on_cuda: the same for compiled code on CUDA.
    """

    parameters = inspect.signature(public).parameters
    floats = {index for index, each in enumerate(parameters.values()) if each.annotation == "float"}

    def register(body: Callable[..., Any]) -> Any:
        def run(*args: Any) -> Any:
            # The dispatcher passes an undefined tensor as None; the body refuses it.
            if args[0] is None or args[0].device.type != "cuda":
                return body(*args)
            # Triton launches on the current device. Outside of tracing, kernels are launched directly, which takes a
            # tenth of the time.
            with torch.cuda.device(args[0].device), private.launching_directly():
                return body(*args)

        def call(*args: Any) -> Any:
            tensors = [x for x in args if isinstance(x, Tensor)]
            # The body would record operations on a tensor that requires a gradient.
            if is_eager_cpu(*tensors) and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
                # Convert numbers to float, as the dispatcher does.
                return body(*(float(x) if index in floats else x for index, x in enumerate(args)))
            return op(*args)

        # If Dynamo falls back to eager code for the public function, so that it raises its error, it must skip this one
        # too.
        private.leave_uncompiled(call)

        def decompose(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
            """What a compiler sees: the body of the op, or the op itself. An exported program keeps the op."""
            named = dict(zip(parameters, args, strict=False)) | kwargs
            device = next(iter(named.values())).device.type
            opaque = is_opaque(**named) if device == "cpu" else opaque_on_cuda and device == "cuda"
            if not private.inlines_ops() or (private.makes_python() and opaque):
                return mode.__torch_dispatch__(op, types, args, kwargs)
            if not all(kind is Tensor or issubclass(kind, private.TRACED) for kind in types):
                return NotImplemented
            with mode:
                return body(*args, **kwargs)

        name = f"specops::{public.__name__}"
        schema = torch.library.infer_schema(public, mutates_args=())
        torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
        bodies[name] = run
        torch.library.impl(name, "default", private.leave_uncompiled(run))
        torch.library.register_fake(name, body)
        torch.library.register_torch_dispatch(name, private.FunctionalTensorMode, decompose)
        op = getattr(torch.ops.specops, public.__name__).default
        torch.library.register_vmap(name, _map_over_rows(op))
        # Without it the outputs require a gradient when the logits do, and a compiled model outside no_grad fails.
        torch.library.register_autograd(name, _no_gradient, setup_context=_mark_non_differentiable)
        return call

    return register


def _map_over_rows(op: Any) -> Callable[..., Any]:
    """The rule for torch.func.vmap: the mapped axis is merged with the rows, which are independent of each other."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        def joined(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            mapped = value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            return mapped.flatten(0, 1)

        def parted(result: Tensor) -> Tensor:
            # With zero rows, a size of -1 would be ambiguous.
            return result.reshape(info.batch_size, result.shape[0] // info.batch_size, *result.shape[1:])

        result = op(*(joined(value, dim) for value, dim in zip(args, in_dims, strict=True)))
        if isinstance(result, Tensor):
            return parted(result), 0
        return tuple(parted(each) for each in result), (0,) * len(result)

    return rule


def _mark_non_differentiable(ctx: Any, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*((output,) if isinstance(output, Tensor) else output))


def _no_gradient(ctx: Any, *gradients: Tensor) -> None:
    raise RuntimeError("the specops ops have no gradient")


def compiled_sources() -> list[Path]:
    """The files whose code ends up in compiled graphs or their guards."""
    folder = Path(__file__).parent
    return [folder.parent / "checks.py", *sorted(folder.rglob("*.py"))]


def digest(files: Sequence[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


# torch's caches on disk identify a graph by the names of its ops, not by their bodies: without this tag, a new version
# of the package would run graphs that were compiled from the old version.
torch.compiler.config.cache_key_tag += f":torch_specops-{digest(compiled_sources())}"
