"""Tensors of a device that is not there, and what a torch function does with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .runtime import GARBAGE, HOST, current_stream, execute, hold, index_of, synchronises, tensors_in

# The host waits for the device in these; a tensor of numbers is copied from memory that is not pinned.
WAITING = {
    "__bool__", "__contains__", "__float__", "__index__", "__int__", "allclose", "as_tensor", "bincount", "equal",
    "item", "masked_select", "nonzero", "tensor", "tolist", "unique",
}  # fmt: skip
# Answered by the tensor itself, not by its data.
OWN = {"__hash__", "requires_grad_"}
MIXES_DEVICES = {"__getitem__", "__setitem__", "index_put_"}


class DeviceTensor(Tensor):
    """Its device is the one it names, its data lie on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> DeviceTensor:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        self = Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=device, **layout)
        self.inner = inner
        hold(self, inner)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})


class StandIn(TorchFunctionMode):
    """Every torch function of this thread goes through `call`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return call(func, args, kwargs or {})


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    if name == "__set__" and func.__self__.__name__ == "data" and isinstance(args[0], DeviceTensor):
        args[0].inner = args[1].inner
        return None
    if name in ("__get__", "__set__") or name in OWN:
        return func(*args, **kwargs)
    if name == "_has_compatible_shallow_copy_type":
        return isinstance(args[0], DeviceTensor) == isinstance(args[1], DeviceTensor)
    if getattr(func, "namespace", None) == "specops":
        with StandIn():
            return _body_of(func)(*args, **kwargs)
    given = tensors_in((args, kwargs))
    own = [tensor for tensor in given if isinstance(tensor, DeviceTensor)]
    device = _device_named(name, args, kwargs)
    if not own and (device is None or device.type != "cuda"):
        return _on_cpu(func, name, args, kwargs)
    if name in ("to", "cuda", "cpu"):
        return _moved(args, kwargs, device)
    if name == "copy_":
        return _copied(*args, **kwargs)
    found = {str(tensor.device) for tensor in given if isinstance(tensor, DeviceTensor) or tensor.dim() > 0}
    if len(found) > 1 and name not in MIXES_DEVICES:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found: {sorted(found)} ({name})")
    if name in WAITING or (name == "__getitem__" and _index_waits(args[1])):
        synchronises(name)
    if "device" in kwargs:
        kwargs = kwargs | {"device": "cpu"}
    result = execute(func, _data(args), _data(kwargs))
    if "empty" in name:
        result.untyped_storage().fill_(1 if result.dtype == torch.bool else GARBAGE)
    return _wrapped(result, own, device or own[0].device)


def launch(run_kernel: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any) -> None:
    """In place of the interpreter's launch of a kernel."""
    devices = {str(tensor.device) for tensor in tensors_in((args, kwargs))}
    if "cuda" in "".join(devices) and devices != {f"cuda:{HOST.device}"}:
        raise RuntimeError(f"CUDA error: an illegal memory access: tensors of {devices} on cuda:{HOST.device}")
    with torch._C.DisableTorchFunction():
        execute(run_kernel, (executor, *_data(args)), _data(kwargs))


def _body_of(op: Any) -> Callable[..., Any]:
    """Python's body of an op of ours."""
    from torch_specops.ops.cpu.filters import filter_bounds
    from torch_specops.ops.registration import bodies

    return bodies.get(op._schema.name, filter_bounds)


def _device_named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """What a call says of the device of its result; None if nothing."""
    named = kwargs.get("device", name if name in ("cuda", "cpu") else None)
    if name == "to" and named is None:
        first = args[1] if len(args) > 1 else None
        named = first.device if isinstance(first, Tensor) else None if isinstance(first, torch.dtype) else first
    if named is None:
        return None
    named = torch.device(named)
    return torch.device("cuda", index_of(named)) if named.type == "cuda" else named


def _on_cpu(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that has nothing to do with a CUDA device, but perhaps with pinned memory."""
    if name == "pin_memory":
        result = args[0].clone()
    elif kwargs.get("pin_memory"):
        result = func(*args, **kwargs | {"pin_memory": False})
        result.untyped_storage().fill_(GARBAGE)
    else:
        return func(*args, **kwargs)
    synchronises("pinning memory", implicitly=False)
    result.lies_in_pinned_memory = True
    return result


def _is_pinned(tensor: Tensor) -> bool:
    """Views of a pinned tensor do not count."""
    return getattr(tensor, "lies_in_pinned_memory", False)


def _moved(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None) -> Any:
    """`Tensor.to`, `cuda` and `cpu`."""
    source = args[0]
    device = source.device if device is None else device
    dtypes = [value for value in (*args[1:], kwargs.get("dtype")) if isinstance(value, torch.dtype)]
    dtypes += [value.dtype for value in args[1:] if isinstance(value, Tensor)]
    dtype = dtypes[0] if dtypes else source.dtype
    if device == source.device and dtype == source.dtype and not kwargs.get("copy", False):
        return source
    if "cpu" in (device.type, source.device.type) and not (kwargs.get("non_blocking", False) and _is_pinned(source)):
        synchronises(f"copy from {source.device} to {device}")
        if device.type == "cpu":
            current_stream(source.device).finish()
    data = execute(_cloned, (_data(source), dtype), {})
    return DeviceTensor(data, device) if device.type == "cuda" else data


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`Tensor.copy_`."""
    if isinstance(target, DeviceTensor):
        if not isinstance(source, DeviceTensor) and source.dim() > 0 and not (non_blocking and _is_pinned(source)):
            synchronises("copy from the CPU")
        execute(Tensor.copy_, (target.inner, _data(source)), {})
    elif non_blocking and _is_pinned(target) and HOST.capture is None:
        current_stream(source.device).copies.append((target, _data(source).clone()))
    else:
        synchronises("copy to the CPU")
        current_stream(source.device).finish()
        target.copy_(_data(source))
    return target


def _cloned(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.to(dtype, copy=True)


def _index_waits(index: Any) -> bool:
    """The host looks at masks, and at bounds of slices."""
    parts = index if isinstance(index, tuple) else (index,)
    bounds = [bound for part in parts if isinstance(part, slice) for bound in (part.start, part.stop)]
    return bool(tensors_in(bounds)) or any(tensor.dtype == torch.bool for tensor in tensors_in(parts))


def _data(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.inner
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        items = [_data(item) for item in value]
        return type(value)(*items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, slice):
        return slice(_data(value.start), _data(value.stop), _data(value.step))
    return {key: _data(item) for key, item in value.items()} if isinstance(value, dict) else value


def _wrapped(value: Any, own: list[DeviceTensor], device: torch.device) -> Any:
    """Data -> a tensor of the device: the argument whose data they are, if there is one."""
    if isinstance(value, Tensor):
        same = next((tensor for tensor in own if tensor.inner is value), None)
        return DeviceTensor(value, device) if same is None else same
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        return type(value)([_wrapped(item, own, device) for item in value])
    return value
