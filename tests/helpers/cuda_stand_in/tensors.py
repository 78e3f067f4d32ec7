"""Tensors of a device that is not there, and what a torch function does with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .runtime import GARBAGE, HOST, LAUNCHES, MEMORY, Copy, current_stream, execute, index_of, synchronises, tensors_in

# The host waits for the device in these, whatever their arguments.
WAITING = {
    "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "allclose", "argwhere", "bincount",
    "equal", "is_nonzero", "item", "masked_select", "nonzero", "tolist", "unique", "unique_consecutive",
}  # fmt: skip
# Answered by the tensor itself, not by its data.
OWN = {"__hash__", "get_device", "requires_grad_"}
ATTRIBUTES_OF_DATA = {"T", "mT", "H", "mH", "real", "imag", "data"}
MIXES_DEVICES = {"copy_", "__getitem__", "__setitem__", "index_put_", "type_as"}
REFUSED = {
    "__array__", "backward", "numpy", "pin_memory", "resize_", "resize_as_", "set_", "squeeze_", "t_", "transpose_",
    "unsqueeze_",
}  # fmt: skip


class DeviceTensor(Tensor):
    """Its device is the one it names, its data lie on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> DeviceTensor:
        self = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        self.inner = inner
        MEMORY.hold(self, inner)
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
    if name in ("__get__", "__set__", "__delete__"):
        return _attribute(func, name, args)
    if name in OWN:
        return func(*args, **kwargs)
    if name == "_has_compatible_shallow_copy_type":
        return isinstance(args[0], DeviceTensor) == isinstance(args[1], DeviceTensor)
    if getattr(func, "namespace", None) == "specops":
        from torch_specops.ops import api, attention
        from torch_specops.ops.cpu import filters

        op = func._schema.name.removeprefix("specops::")
        elsewhere = {"attend": attention._attend, "filter_bounds": filters.filter_bounds}
        body = elsewhere.get(op) or getattr(api, f"_{op}")
        with StandIn():
            return body(*args, **kwargs)
    given = tensors_in((args, kwargs))
    own = [tensor for tensor in given if isinstance(tensor, DeviceTensor)]
    device = _device_named(name, args, kwargs)
    if not own and (device is None or device.type != "cuda"):
        return _on_cpu(func, name, args, kwargs)
    if name in REFUSED:
        raise TypeError(f"{name}: torch refuses a tensor of a CUDA device, or its stand-in does")
    if name in ("record_stream", "share_memory_"):
        return None
    if name in ("to", "cuda", "cpu"):
        return _moved(args, kwargs, device)
    devices = {tensor.device for tensor in own}
    on_cpu = [tensor for tensor in given if not isinstance(tensor, DeviceTensor) and tensor.dim() > 0]
    if (len(devices) > 1 or (devices and on_cpu)) and name not in MIXES_DEVICES:
        found = sorted({str(tensor.device) for tensor in given})
        raise RuntimeError(f"Expected all tensors to be on the same device, but found: {', '.join(found)} ({name})")
    if name == "copy_":
        return _copied(*args, **kwargs)
    if _waits(name, args, kwargs, device):
        synchronises(name)
    if device is None:
        device = next(iter(devices))
    elif kwargs.get("generator") is not None and getattr(kwargs["generator"], "on", "cpu") != device.type:
        raise RuntimeError(f"Expected a '{device.type}' device type for generator")
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "meta" if device.type == "meta" else "cpu"}
    function, args, kwargs = (_filled_with_garbage(func) if "empty" in name else func), _data(args), _data(kwargs)
    result = execute(function, args, kwargs)
    _note_launch(name, args, result)
    return _wrapped(result, own, device) if device.type == "cuda" else result


def launch(original: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any) -> None:
    """In place of the interpreter's launch of a kernel."""
    given = tensors_in((args, kwargs))
    own = [tensor for tensor in given if isinstance(tensor, DeviceTensor)]
    if own:
        if len(own) < len(given):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        for tensor in own:
            if tensor.device.index != HOST.device:
                raise RuntimeError(
                    "CUDA error: an illegal memory access was encountered: "
                    f"a kernel launched on cuda:{HOST.device} has a tensor of {tensor.device}"
                )
        LAUNCHES.append(executor.fn.__name__)
    with torch._C.DisableTorchFunction():
        execute(original, (executor, *_data(args)), _data(kwargs))


def _device_named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """What a call says of the device of its result; None if nothing."""
    named = kwargs.get("device")
    if name == "cuda" and named is None:
        named = args[1] if len(args) > 1 and args[1] is not None else "cuda"
    elif name == "cpu":
        named = "cpu"
    elif name == "to" and named is None:
        first = args[1] if len(args) > 1 else kwargs.get("other")
        if isinstance(first, Tensor):
            named = first.device
        elif isinstance(first, (str, torch.device, int)):
            named = first
    if named is None:
        return None
    named = torch.device("cuda", named) if isinstance(named, int) else torch.device(named)
    return torch.device("cuda", index_of(named)) if named.type == "cuda" else named


def _attribute(func: Any, name: str, args: tuple[Any, ...]) -> Any:
    tensor, attribute = args[0], func.__self__.__name__
    if not isinstance(tensor, DeviceTensor):
        if name == "__set__" and attribute == "data" and isinstance(args[1], DeviceTensor):
            raise TypeError("a tensor of the CPU cannot become one of a CUDA device in place")
        return func(*args)
    if name == "__get__" and attribute in ATTRIBUTES_OF_DATA:
        return _wrapped(func(tensor.inner), [tensor], tensor.device)
    if name == "__set__" and attribute == "data":
        tensor.inner = args[1].inner
        return None
    return func(*args)


def _on_cpu(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that has nothing to do with a CUDA device, but perhaps with pinned memory."""
    if name == "is_pinned":
        return _is_pinned(args[0])
    pinned = kwargs.pop("pin_memory", False) if "pin_memory" in kwargs else name == "pin_memory"
    if name == "pin_memory":
        result = args[0].clone()
    else:
        result = (_filled_with_garbage(func) if pinned and "empty" in name else func)(*args, **kwargs)
    if pinned:
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
    if device.type == "meta":
        return torch.empty_like(_data(source), device="meta")
    dtype = kwargs.get("dtype")
    for value in args[1:]:
        dtype = value if isinstance(value, torch.dtype) else value.dtype if isinstance(value, Tensor) else dtype
    dtype = source.dtype if dtype is None else dtype
    if device == source.device and dtype == source.dtype and not kwargs.get("copy", False):
        return source
    if device != source.device:
        pinned = kwargs.get("non_blocking", False) and _is_pinned(source)
        if "cpu" in (device.type, source.device.type) and not pinned:
            synchronises(f"copy from {source.device} to {device}")
            if device.type == "cpu":
                current_stream(source.device).finish()
    data = execute(_cloned, (_data(source), dtype), {})
    return _wrapped(data, [], device) if device.type == "cuda" else data


def _copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`Tensor.copy_`."""
    if isinstance(target, DeviceTensor):
        if not isinstance(source, DeviceTensor) and source.dim() > 0 and not (non_blocking and _is_pinned(source)):
            synchronises("copy from the CPU")
        LAUNCHES.append("copy_")
        execute(Tensor.copy_, (target.inner, _data(source)), {})
    elif non_blocking and _is_pinned(target) and HOST.capture is None:
        current_stream(source.device).copies.append(Copy(target, _data(source)))
    else:
        synchronises("copy to the CPU")
        current_stream(source.device).finish()
        target.copy_(_data(source))
    return target


def _cloned(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.to(dtype, copy=True)


def _waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None) -> bool:
    if name in WAITING or (name in ("tensor", "as_tensor", "new_tensor") and device != "cpu"):
        return True
    if name == "where":
        return len(args) == 1
    if name == "repeat_interleave":
        return any(isinstance(value, Tensor) for value in args[1:]) and kwargs.get("output_size") is None
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        masks = any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in index)
        # The host looks at a bound of a slice.
        bounds = [bound for part in index if isinstance(part, slice) for bound in (part.start, part.stop)]
        looks = any(isinstance(bound, Tensor) for bound in bounds)
        return looks or (masks and name == "__getitem__") or any(isinstance(part, list) for part in index)
    return False


def _filled_with_garbage(func: Any) -> Callable[..., Any]:
    """`func` allocates memory without writing it."""

    def fill(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        result.untyped_storage().fill_(1 if result.dtype == torch.bool else GARBAGE)
        return result

    return fill


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
        if value.device.type == "meta":
            return value
        same = next((tensor for tensor in own if tensor.inner is value), None)
        return DeviceTensor(value, device) if same is None else same
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        return type(value)([_wrapped(item, own, device) for item in value])
    return value


def _note_launch(name: str, args: Any, result: Any) -> None:
    """A view or an allocation launches nothing; a change in place does."""
    if not isinstance(result, Tensor):
        made = tensors_in(result)
        if not made and name != "__setitem__":
            return
        result = made[0] if made else args[0]
    inputs = {tensor.untyped_storage()._cdata for tensor in tensors_in(args)}
    is_view = result.untyped_storage()._cdata in inputs and not name.endswith("_")
    if not is_view and "empty" not in name and result.numel() > 0:
        LAUNCHES.append(name)
