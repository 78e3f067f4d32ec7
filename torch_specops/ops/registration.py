"""Register the ops with torch: schema, fake kernel, decomposition, vmap rule, and an autograd rule without
gradients."""

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

# Name of an op -> the function that runs it. Tests that replace CUDA tensors by other objects call the function
# directly, because the dispatcher would refuse these objects.
bodies: dict[str, Callable[..., Any]] = {}


def register_op(
    public: Callable[..., Any], is_opaque: Callable[..., bool] = lambda **_: False
) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the body of `torch.ops.specops.<name>`, with the name and the signature of `public`.
    Returns the function that `public` calls. In an eager call on a CPU, that function calls the body directly, which
    saves the dispatch; otherwise it calls the op.

    This replaces `torch.library.triton_op`, which searches the body's source for kernels. That search imports Triton
    and Inductor (2 s, and a warning per op if Triton is missing), and it does not find kernels that the body imports.

    Args:
        is_opaque: a function of the op's arguments, passed by name. If it returns True, compiled code on a CPU calls
            the op instead of inlining its body. Compiled code on CUDA always calls the op. AOTInductor always inlines
            the body, because its code runs without Python.
    """

    parameters = inspect.signature(public).parameters
    floats = {index for index, each in enumerate(parameters.values()) if each.annotation == "float"}

    def register(body: Callable[..., Any]) -> Any:
        def run(*args: Any) -> Any:
            # Run the body for None too: the dispatcher accepts None for a required tensor, and the checks in the body
            # raise an error that names it.
            if args[0] is None or args[0].device.type != "cuda":
                return body(*args)
            from .cuda import plans

            # Set the device, because Triton launches on the current device.
            with torch.cuda.device(args[0].device):
                return plans.call(body, args)

        def call(*args: Any) -> Any:
            tensors = [x for x in args if isinstance(x, Tensor)]
            # If a tensor requires a gradient, call the op: autograd would record the operations of the body.
            if is_eager_cpu(*tensors) and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
                # Convert numbers to float, as the dispatcher would.
                return body(*(float(x) if index in floats else x for index, x in enumerate(args)))
            return op(*args)

        # If a public function raises while Dynamo traces it, Dynamo runs the function eagerly. Without this line,
        # Dynamo would then compile `call` as a separate graph.
        private.leave_uncompiled(call)

        def decompose(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
            """Called when AOTAutograd traces the op. Traces the body of the op, or records a call of the op if it is
            opaque or the program is exported."""
            named = dict(zip(parameters, args, strict=False)) | kwargs
            device = next(iter(named.values())).device.type
            opaque = is_opaque(**named) if device == "cpu" else device == "cuda"
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
        # Without this rule, the outputs would require a gradient if the logits do, and a compiled model outside
        # `no_grad` would fail.
        torch.library.register_autograd(name, _no_gradient, setup_context=_mark_non_differentiable)
        return call

    return register


def _map_over_rows(op: Any) -> Callable[..., Any]:
    """The rule for torch.func.vmap: merge the mapped axis with the rows, which are independent of each other."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        def joined(value: Any, dim: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            mapped = value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            return mapped.flatten(0, 1)

        def parted(result: Tensor) -> Tensor:
            # Compute the size, because with zero rows a size of -1 would be ambiguous.
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
    """The files whose code is traced into compiled graphs or their guards."""
    folder = Path(__file__).parent
    return [folder.parent / "checks.py", *sorted(folder.rglob("*.py"))]


def digest(files: Sequence[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


# torch's caches on disk identify a graph by the names of its ops, not by their bodies. Without this tag, a new version
# of the package would run graphs that were compiled from the old version.
torch.compiler.config.cache_key_tag += f":torch_specops-{digest(compiled_sources())}"
