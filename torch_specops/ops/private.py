"""All private names of torch that the package uses. Other modules import them from here.

All of them exist in torch 2.11 to 2.15. If another release lacks one, the ImportError names it. Submodules that `import
torch` does not load are imported inside the functions that use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

try:
    from torch._C import _len_torch_dispatch_stack
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    from torch._C._functorch import is_functorch_wrapped_tensor
    from torch._library.triton import wrap_triton_enabled
    from torch._subclasses.fake_tensor import FakeTensor, is_fake
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
    from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
    from torch.utils._pytree import tree_leaves
except ImportError as error:
    raise ImportError(f"torch_specops: expected torch 2.11 to 2.15, got {torch.__version__}: {error}") from error

# The dispatch mode in which AOTAutograd traces an op, a test for fake tensors, and the leaves of a pytree.
__all__ = ["FunctionalTensorMode", "is_fake", "tree_leaves"]

# The tensor subclasses that AOTAutograd passes to an op.
TRACED = FakeTensor, FunctionalTensor

# The number of active dispatch modes, such as tracers, and whether a tensor is inside `vmap`.
num_modes: Callable[[], int] = _len_torch_dispatch_stack
is_mapped: Callable[[Tensor], bool] = is_functorch_wrapped_tensor

# True while `torch.jit.trace` records. Type checkers treat the name as private.
is_recording: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


@contextmanager
def launching_directly() -> Iterator[None]:
    """Launch kernels without `wrap_triton`, which makes an eager launch ten times slower. This replaces torch's
    `set_wrap_triton_enabled`, which raises an UnboundLocalError if it is interrupted at its first line."""
    before = getattr(wrap_triton_enabled, "value", True)
    try:
        wrap_triton_enabled.value = False
        yield
    finally:
        wrap_triton_enabled.value = before


def all_gather(x: Tensor, num_ranks: int, group: Any) -> Tensor:
    """Concatenate the tensors [n, ...] of all ranks along the first dimension."""
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_gather_into_tensor(x, num_ranks, group.group_name))


def leave_uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Prevent Dynamo from compiling a function that eager code calls; calls inside traced code are still traced. This
    replaces `torch.compiler.disable`, which imports Dynamo (this takes seconds) and adds 10 us to every call."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def inlines_ops() -> bool:
    """True if the code is traced for compilation and not for export."""
    from torch._functorch import config

    return config.decompose_custom_triton_ops is True


def makes_python() -> bool:
    """True if Inductor generates code that runs in Python, as opposed to AOTInductor."""
    from torch._inductor.virtualized import V

    return V.aot_compilation is False


def is_compiler_error(error: Exception) -> bool:
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def is_limit_of_graphs(error: Exception) -> bool:
    """True if torch has reached its limit of recompilations for one function."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


def global_hooks() -> list[Any]:
    """The global hooks, which run before and after the forward of every module."""
    return [*_global_forward_pre_hooks.values(), *_global_forward_hooks.values()]


def hint(size: torch.SymInt) -> int:
    """The value of a symbolic size in the example that is traced, or 1 if there is none."""
    return size.node.hint or 1


def inductor_hook() -> tuple[Any, Any]:
    """Inductor's config, which has the hook for graph passes, and the base class of passes that have a cache key."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return config, CustomGraphPass


def schema(op: Any) -> Any:
    """The schema of an overload, for which `torch.library` has no public function."""
    return op._schema


def storage_of(tensor: Tensor) -> int:
    """An id of a tensor's storage. It is equal for tensors that share memory, and fake tensors have one too."""
    return tensor.untyped_storage()._cdata
