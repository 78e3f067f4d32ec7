"""One look at a model: what it is now, and what the modules of its copy consist of."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from contextlib import suppress
from functools import partial
from itertools import count
from types import FunctionType, MethodType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..ops import private
from .references import (
    MUTABLE,
    PLAIN,
    Parts,
    are_same,
    calls_nothing,
    globals_of,
    is_foreign,
    package,
    parts_of,
    reaches_module,
)

# Attributes that are not followed: parameters, hooks and names, which every module has and other code handles; and
# `rope_deltas`, which every call of an image model sets and no forward of this loop reads.
NOT_FOLLOWED = frozenset({*vars(nn.Module()), "rope_deltas"})


class NotSeenThroughError(Exception):
    """An object may call modules in a way that cannot be changed."""


class Look:
    """What a model was when it was looked at.

    A look walks over all modules and follows what their attributes refer to. Whatever it meets it records in order:
    two looks with equal records found the same model.

    Attributes:
        attributes: module -> the attributes of its copy.
        code: numbers that are equal in two looks if the modules have the same hooks and methods.
        is_observed: True = code is called that may keep what a forward computes: hooks, a `forward` or a function set
            on a module, parametrizations, classes and methods of other packages.
    """

    def __init__(self, copies: WeakKeyDictionary[nn.Module, nn.Module], before: Look | None) -> None:
        self.attributes: dict[nn.Module, dict[str, Any]] = {}
        self.code = [_number(hook) for hook in private.global_hooks()]
        self.is_observed = len(self.code) > 0
        self._copies = copies
        self._record: list[Any] = []
        self._classes: set[type] = set()
        self._unfollowable: set[str] = set()
        self._configs: _ConfigCopies = _ConfigCopies(None if before is None else before._configs)
        # Parts -> what was made of them, in this look and in the look before: compiled code looks at the identity of a
        # function. Older parts are forgotten, because some trainers wrap a model anew in every step.
        self._made: dict[Hashable, Any] = {}
        self._made_before = {} if before is None else before._made
        # Ids of the values that are being followed. They may refer to themselves.
        self._inside: set[int] = set()

    @property
    def configs(self) -> list[PreTrainedConfig]:
        """The copies of the configs that the modules have."""
        return list(self._configs.copies.values())

    @property
    def not_followed(self) -> str:
        """Which attributes may call modules of the model itself; "" = none."""
        names = ", ".join(sorted(self._unfollowable))
        return names and f"{names} may call modules in a way that cannot be followed"

    def is_same_as(self, other: Look) -> bool:
        return (
            self.code == other.code
            and len(self._record) == len(other._record)
            and all(
                mine is theirs or (type(mine) is type(theirs) and type(mine) in PLAIN and mine == theirs)
                for mine, theirs in zip(self._record, other._record, strict=True)
            )
        )

    def copy_of(self, module: nn.Module) -> nn.Module:
        """The copy of a module, which is looked at if this look has not met it yet."""
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"model: expected modules of Python, got {type(module).__name__} (torch.jit)")
        clone = self._copies.get(module)
        if clone is None:
            # A class's own `__new__` may take arguments.
            clone = self._copies[module] = object.__new__(type(module))
        self._record.append(clone)
        if module not in self.attributes:
            self._look_at(module)
        return clone

    def _look_at(self, module: nn.Module) -> None:
        own = vars(module)
        attributes = self.attributes[module] = own | {"training": False}
        # Some rotary embeddings register a new buffer in a forward; longrope overwrites its buffer (transformers 5.23).
        writes = "longrope" in str(own.get("rope_type"))
        attributes["_buffers"] = copy.deepcopy(module._buffers) if writes else dict(module._buffers)
        # A forward that keeps hidden states, as many of images do, adds hooks to its layers first (transformers).
        attributes["_forward_hooks"] = own["_forward_hooks"].copy()
        attributes["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
        self._record += (type(module), *module._modules)
        self.is_observed |= "forward" in own or "parametrizations" in module._modules
        self._look_at_class(type(module))
        self._look_at_hooks(module, "_forward_pre_hooks")
        self._look_at_hooks(module, "_forward_hooks")
        for weight in module._parameters.values():
            if isinstance(weight, nn.UninitializedParameter):
                raise ValueError(f"model: {type(module).__name__} has no weights yet; run the model once")
            # Not the weight, which its owner may want to free.
            self._record += (type(weight), getattr(weight, "dtype", None), getattr(weight, "device", None))
        attributes["_modules"] = {
            name: child if child is None else self.copy_of(child) for name, child in module._modules.items()
        }
        for name, value in own.items():
            if name not in NOT_FOLLOWED:
                self._record.append(name)
                self.is_observed |= type(value) in (FunctionType, MethodType) and is_foreign(value)
                try:
                    attributes[name] = self._in_copy(value, module)
                except NotSeenThroughError:
                    self._unfollowable.add(f"{type(module).__name__}.{name}")

    def _look_at_class(self, kind: type[nn.Module]) -> None:
        if kind in self._classes:
            return
        self._classes.add(kind)
        self.is_observed |= is_foreign(kind) or is_foreign(kind.forward)
        self.code.append(_number(kind.forward))
        for each in filter(is_foreign, kind.__mro__[:-1]):
            for name, value in vars(each).items():
                if isinstance(value, FunctionType):
                    self.code.append(_number(value))
                if reaches_module(value):
                    self._unfollowable.add(f"{kind.__name__}.{name}")

    def _look_at_hooks(self, module: nn.Module, name: str) -> None:
        """The copy has the hooks of its module. A module or its method is a hook of copies; other hooks are called
        unchanged, because many take notes on the model."""
        hooks, with_kwargs = vars(module)[name], vars(module)[f"{name}_with_kwargs"]
        for key, hook in hooks.items():
            # transformers' own take note of what a forward shall return.
            self.is_observed |= package(hook) != "transformers"
            self.code += (_number(hook), key in with_kwargs)
            if type(hook) in (MethodType, partial) or isinstance(hook, nn.Module):
                with suppress(NotSeenThroughError):
                    if (new := self._in_copy(hook, module)) is not hook:
                        self.attributes[module][name] = self.attributes[module][name] | {key: new}
        self.code.append(len(hooks))

    def _in_copy(self, value: Any, owner: nn.Module) -> Any:
        """What the copy of module `owner` has for a value of `owner`: the value itself, if no reference leads from it
        to a module, else the same made of copies.

        Raises:
            NotSeenThroughError: it may refer to modules in a way that cannot be followed.
        """
        new = value if type(value) in PLAIN else self._followed(value, owner)
        # Not `value`: what refers to the model itself would keep it alive.
        self._record.append(new)
        return new

    def _followed(self, value: Any, owner: nn.Module) -> Any:
        # Not isinstance, which believes a proxy.
        kind = type(value)
        if issubclass(kind, nn.Module):
            return self.copy_of(value)
        if issubclass(kind, PreTrainedConfig):
            return self._configs.copy_of(value)
        if calls_nothing(kind):
            return value
        if kind is FunctionType:
            # Unwrap the result of `torch.compile`: the loop compiles its own steps.
            compiled = getattr(value, "_torchdynamo_orig_callable", None)
            if compiled is not None and not getattr(value, "_torchdynamo_disable", False):
                return self._in_copy(compiled, owner)
            # A function of the owner's class.
            if any(vars(each).get(value.__name__) is value for each in type(owner).__mro__):
                return value
        parts = None if id(value) in self._inside else parts_of(value)
        if parts is not None:
            return self._of_parts(value, owner, parts)
        if reaches_module(value):
            raise NotSeenThroughError
        return value

    def _of_parts(self, value: Any, owner: nn.Module, parts: Parts) -> Any:
        """The value made of what the copy has for its parts."""
        old, make, key = parts
        kind = type(value)
        self._inside.add(id(value))
        try:
            if kind is MethodType and isinstance(value.__self__, nn.Module):
                owner = value.__self__
            for each in globals_of(value) if kind is FunctionType else ():
                # A function made anew has the same globals.
                if id(each) not in self._inside and self._in_copy(each, owner) is not each:
                    raise NotSeenThroughError
            new = [self._in_copy(part, owner) for part in old]
        finally:
            self._inside.discard(id(value))
        if are_same(new, old):
            return value
        whole = kind, *key, *map(id, new)
        made = self._made.get(whole, self._made_before.get(whole))
        # A forward may have written to a container of the copy.
        if made is None or (kind in MUTABLE and (held := parts_of(made)) and not are_same(held[0], new)):
            made = make(*new)
        self._made[whole] = made
        return made


class _ConfigCopies:
    """Copies of a model's configs, kept from look to look until any config changes. Copies keep identity and nesting:
    configs that are one object, or inside each other, stay so."""

    def __init__(self, before: _ConfigCopies | None) -> None:
        # Id -> the copy of a config.
        self.copies: dict[int, PreTrainedConfig] = {}
        # Id -> a config that was copied, and its attributes then.
        self._copied: dict[int, tuple[PreTrainedConfig, dict[str, Any]]] = {}
        self._met: set[int] = set()
        if before is not None and before._are_valid():
            self.copies, self._copied = dict(before.copies), dict(before._copied)

    def _are_valid(self) -> bool:
        """Whether the configs that were met are all that was copied, and have not changed since."""
        try:
            return self._met == set(self._copied) and all(
                vars(config) == then for config, then in self._copied.values()
            )
        # Tensors and arrays are neither equal nor different.
        except (RuntimeError, ValueError):
            return False

    def copy_of(self, config: PreTrainedConfig) -> PreTrainedConfig:
        self._met.add(id(config))
        if id(config) not in self._copied:
            try:
                self._copied[id(config)] = config, copy.deepcopy(vars(config))
                memory: dict[int, Any] = dict(self.copies)
                copy.deepcopy(config, memory)
            except TypeError as error:
                raise ValueError(f"model: {type(config).__name__} cannot be copied: {error}") from error
            self.copies |= {key: each for key, each in memory.items() if isinstance(each, PreTrainedConfig)}
        return self.copies[id(config)]


# Id -> an object and its number, because another object may get its id later.
_numbers: dict[int, tuple[ReferenceType[Any], int]] = {}
_next_number = count()


def _number(value: Any) -> int:
    """A number that no other object gets."""
    known = _numbers.get(id(value))
    if known is None or known[0]() is not value:
        try:
            known = ref(value, partial(_forget, id(value))), next(_next_number)
        # It has no weak references.
        except TypeError:
            return next(_next_number)
        _numbers[id(value)] = known
    return known[1]


def _forget(key: int, _: Any) -> None:
    _numbers.pop(key, None)
