"""Every private name of torch and Triton that the package uses: no other module uses any.

Such a name may go in any release, and importing the package needs none. Each entry says what the name is for, and what
happens without it: the same results, more slowly, but for the opt-in Inductor pass, which raises. All are in torch 2.11
and Triton 3.6 or before, and still in torch 2.15 and Triton 3.9.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


def find(name: str) -> Any:
    """The object that "module:attribute.attribute" names; None if this release lacks it."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None


def needed(name: str) -> Any:
    """The same, or ImportError."""
    if (found := find(name)) is None:
        raise ImportError(
            f"torch_specops.inductor: expected {name.replace(':', '.')}, torch {torch.__version__} has none"
        )
    return found


# The mode in which AOTAutograd sees an op, and the tensors that it gives it. If either is missing (TRACED empty), ops
# have no rule for that mode, and compiled code calls them whole.
FunctionalTensorMode = find("torch._subclasses.functional_tensor:FunctionalTensorMode")
_kinds = find("torch._subclasses.fake_tensor:FakeTensor"), find("torch._subclasses.functional_tensor:FunctionalTensor")
TRACED: tuple[type, ...] = () if None in (FunctionalTensorMode, *_kinds) else _kinds

# Says whether launches go through `wrap_triton`. Without it an eager launch takes ten times as long.
_wraps_triton = find("torch._library.triton:wrap_triton_enabled")


@contextmanager
def launching_directly() -> Iterator[None]:
    """Leaves `wrap_triton` out of launches. torch's own `set_wrap_triton_enabled` turns an interrupt at its first line
    into an UnboundLocalError."""
    before = getattr(_wraps_triton, "value", True)
    try:
        if _wraps_triton is not None:
            _wraps_triton.value = False
        yield
    finally:
        if _wraps_triton is not None:
            _wraps_triton.value = before


# The number of tracers that see the calls, and a test for mapped tensors. If either is missing, no data is read, and
# eager calls on a CPU run the dense form.
num_modes: Callable[[], int] = find("torch._C:_len_torch_dispatch_stack") or (lambda: 1)
is_mapped: Callable[[Tensor], bool] = find("torch._C._functorch:is_functorch_wrapped_tensor") or (lambda _: True)

# Says whether `torch.jit.trace` records the calls. Without the name it records what eager calls compute.
is_recording: Callable[[], bool] = find("torch.jit:is_tracing") or (lambda: False)

# A test for CUDA tensors without data. Without the name every tensor has data once CUDA was used: traced launches then
# keep Triton's default (`fusing_products`).
is_fake: Callable[[Tensor], bool] = find("torch._subclasses.fake_tensor:is_fake") or (
    lambda _: not torch.cuda.is_initialized()
)

# Functional collectives. Without them torch.distributed's own, which write into tensors.
_gather = find("torch.ops:_c10d_functional.all_gather_into_tensor")
_wait = find("torch.ops:_c10d_functional.wait_tensor")


def all_gather(x: Tensor, num_ranks: int, group: Any) -> Tensor:
    """[n, ...] of every rank, one below the other."""
    if _gather is not None and _wait is not None:
        return _wait(_gather(x, num_ranks, group.group_name))
    gathered = x.new_empty(num_ranks * x.shape[0], *x.shape[1:])
    torch.distributed.all_gather(list(gathered.chunk(num_ranks)), x, group=group)
    return gathered


def leave_uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep compiled callers from compiling a function. `torch.compiler.disable` does it without these names, but
    imports Dynamo, for seconds, and takes 10 us in every call."""
    return function if runs_eagerly(function) else torch.compiler.disable(function)


def runs_eagerly(function: Callable[..., Any]) -> bool:
    """Keep Dynamo from compiling a function that eager code calls; it still traces the calls that it sees. False, and
    nothing is done, without these names."""
    set_strategy = find("torch._C._dynamo.eval_frame:set_code_exec_strategy")
    strategy = find("torch._C._dynamo.eval_frame:_FrameExecStrategy")
    skip = find("torch._C._dynamo.eval_frame:_FrameAction.SKIP")
    found = None not in (set_strategy, strategy, skip)
    if found:
        set_strategy(function.__code__, strategy(skip, skip))
    return found


def inlines_ops() -> bool:
    """True if the traced code is compiled, not exported. Without the name ops are called whole."""
    return find("torch._functorch.config:decompose_custom_triton_ops") is True


def makes_python() -> bool:
    """True if Inductor makes code that runs in Python. Without the name no op is left to such code."""
    return find("torch._inductor.virtualized:V.aot_compilation") is False


def is_compiler_error(error: Exception) -> bool:
    """Without the name, errors of torch's compiler stay as long as they are."""
    kind = find("torch._dynamo.exc:TorchDynamoException")
    return kind is not None and isinstance(error, kind)


def global_hooks() -> list[Any]:
    """The hooks around the forward of every module. Without the names, what they see is made in inference mode, and
    compiled code does not see that a hook was added."""
    before = find("torch.nn.modules.module:_global_forward_pre_hooks") or {}
    after = find("torch.nn.modules.module:_global_forward_hooks") or {}
    return [*before.values(), *after.values()]


def is_limit_of_graphs(error: Exception) -> bool:
    """Without the name, a model whose attributes get more values than torch keeps graphs for is an error."""
    kind = find("torch._dynamo.exc:FailOnRecompileLimitHit")
    return kind is not None and isinstance(error, kind)


def hint(size: torch.SymInt) -> int:
    """The size of the example that is traced, 1 if there is none. Without the name 1, which means small tiles."""
    return getattr(getattr(size, "node", None), "hint", None) or 1


def interprets_kernels() -> bool:
    """True if Triton's interpreter runs kernels. Without the name, its environment variable decides."""
    found = find("triton.knobs:runtime.interpret")
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes") if found is None else found


@contextmanager
def fusing_products(enable_fp_fusion: bool) -> Iterator[None]:
    """Triton's default for code that is asked for inside. Without the name it stays, and Triton 3.9 warns."""
    knobs = find("triton.knobs:language")
    with nullcontext() if knobs is None else knobs.scope():
        if knobs is not None:
            knobs.default_fp_fusion = enable_fp_fusion
        yield


def inductor_hook() -> tuple[Any, Any]:
    """Inductor's settings, with the hook for passes, and the class of a pass that has a key for its cache."""
    return needed("torch._inductor:config"), needed("torch._inductor.custom_graph_pass:CustomGraphPass")


def tree_leaves(tree: Any) -> list[Any]:
    return needed("torch.utils._pytree:tree_leaves")(tree)


def schema(op: Any) -> Any:
    """The schema of an overload. `torch.library` writes schemas and reads none."""
    return op._schema


def storage_of(tensor: Tensor) -> int:
    """A number that tensors share if they share memory, also without data."""
    return tensor.untyped_storage()._cdata
