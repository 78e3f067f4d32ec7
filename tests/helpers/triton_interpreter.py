"""Triton's interpreter, quicker, and with the arithmetic of a device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

__all__ = ["prepare", "record_loads"]


def fuse_products(
    _: Any, x: interpreter.TensorHandle, y: interpreter.TensorHandle, z: interpreter.TensorHandle
) -> interpreter.TensorHandle:
    """`tl.fma` as devices have it, rounded once; the interpreter rounds the product too. Float64 holds it exactly."""
    product = x.data.astype(np.float64) * y.data
    return interpreter.TensorHandle((product + z.data).astype(z.data.dtype), z.dtype.scalar)


def widened(x: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """Numbers of bfloat16, which numpy holds as integers, in float32."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def larger(self: Any, left: interpreter.TensorHandle, right: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """`tl.maximum` as devices have it: of a number and NaN the number."""
    return self.binary_op(left, right, np.fmax)


def remembering(numpy_dtype: Callable[[Any], np.dtype]) -> Callable[[Any], np.dtype]:
    """The function of a Triton type, which looks at the type of a block's elements alone."""
    known: dict[str, np.dtype] = {}

    def remembered(dtype: Any) -> np.dtype:
        scalar = dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = numpy_dtype(scalar)
        return known[scalar.name]

    return remembered


def making_shapes_once(make: Callable[..., None]) -> Callable[..., None]:
    """What makes a tensor, with the Triton tuple of its sizes that the first tensor of a shape got."""
    known: dict[tuple[int, ...], dict[str, Any]] = {}

    def made(self: tl.tensor, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in known:
            make(self, handle, type)
            known[sizes] = dict(vars(self))
        vars(self).update(known[sizes], handle=handle, type=type, dtype=type.scalar)

    return made


def describing_blocks_once(make: Callable[..., None]) -> Callable[..., None]:
    """What makes the type of a block, with the sizes and the name that the first type like it got."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def made(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        like = (element_ty.name, *shape)
        if like not in known:
            make(self, element_ty, shape)
            known[like] = dict(vars(self))
        vars(self).update(known[like], element_ty=element_ty)

    return made


# Of two such types the type of a result is the same, whatever the operation. Numbers of 16 bits are divided in 32.
PLAIN_TYPES = {"fp32", "fp64", "int1", "int32", "int64", "uint32", "uint64"}


def meeting_once(meet: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """What brings both operands of an operation to one type and shape: most have them, and a number becomes a block
    once for all blocks of a type."""
    known: dict[tuple[Any, ...], tl.tensor] = {}

    def met(self: Any, left: Any, right: Any, *rest: bool) -> tuple[Any, Any]:
        if not isinstance(left, tl.tensor):
            return meet(self, left, right, *rest)
        if isinstance(right, tl.tensor):
            is_same = left.dtype.name == right.dtype.name and left.dtype.name in PLAIN_TYPES
            return self.broadcast_impl_value(left, right) if is_same else meet(self, left, right, *rest)
        like = (left.type.name, type(right), right, *rest)
        if like not in known:
            other, block = meet(self, left, right, *rest)
            if other is not left:
                return other, block
            known[like] = block
        return left, known[like]

    return met


def broadcasting_if_needed(broadcast: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """What brings two tensors to one shape: most have it."""

    def broadcasted(self: Any, left: tl.tensor, right: tl.tensor) -> tuple[Any, Any]:
        is_same = left.type.is_block() == right.type.is_block() and left.handle.data.shape == right.handle.data.shape
        return (left, right) if is_same else broadcast(self, left, right)

    return broadcasted


def equal_sizes(self: tl.tuple, other: Any) -> tl.constexpr:
    """What `tl.tuple` says, which makes another of both first."""
    return tl.constexpr(self is other or self.values == list(other))


def prepare() -> None:
    """Change the interpreter for as long as this process lives."""
    # It makes many objects and no cycles.
    gc.set_threshold(100_000)
    interpreter.InterpreterBuilder.create_fma = fuse_products
    dot = interpreter.InterpreterBuilder.create_dot
    # The interpreter would multiply the integers.
    interpreter.InterpreterBuilder.create_dot = lambda self, x, y, *rest: dot(self, widened(x), widened(y), *rest)
    interpreter.InterpreterBuilder.create_maxnumf = larger
    # It would compute whether integers overflow, which takes a third of the time, and say so in debug mode alone.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    # It would compare the size of every tensor's numbers with its type.
    interpreter.TensorHandle.__post_init__ = lambda self: None
    # It would make a table of all types in every call.
    interpreter._get_np_dtype = remembering(interpreter._get_np_dtype)
    # It would make a tuple of the sizes of every tensor, and look for the types of these.
    tl.tensor.__init__ = making_shapes_once(tl.tensor.__init__)
    tl.block_type.__init__ = describing_blocks_once(tl.block_type.__init__)
    tl.tuple.__eq__ = equal_sizes
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = broadcasting_if_needed(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = meeting_once(semantic.binary_op_type_checking_impl)
    run_kernel, patch_language = interpreter.GridExecutor.__call__, interpreter._patch_lang

    def run_quietly(*args: Any, **kwargs: Any) -> None:
        patched: dict[int, Any] = {}

        def patch_once(function: Any) -> Any:
            module = id(function.__globals__)
            if module not in patched:
                patched[module] = patch_language(function)
                # Triton 3.6 lets a loop end at no number that was loaded.
                tl.tensor.__index__ = lambda self: int(self.handle.data.item())
            return patched[module]

        # The interpreter would look through all of Triton's language in every call of a device function.
        interpreter._patch_lang = patch_once
        try:
            # numpy warns of what the law makes ordinary: 1 / 0, inf - inf, log 0.
            with np.errstate(all="ignore"):
                run_kernel(*args, **kwargs)
        finally:
            interpreter._patch_lang = patch_language

    interpreter.GridExecutor.__call__ = run_quietly


@contextmanager
def record_loads() -> Iterator[list[np.ndarray]]:
    """Fills a list with the addresses that kernels load from."""
    addresses: list[np.ndarray] = []
    load = interpreter.InterpreterBuilder.create_masked_load

    def recorded(
        self: Any, pointers: interpreter.TensorHandle, mask: interpreter.TensorHandle, *rest: Any
    ) -> interpreter.TensorHandle:
        addresses.append(pointers.data[mask.data.astype(bool)].ravel())
        return load(self, pointers, mask, *rest)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_masked_load", recorded):
        yield addresses
