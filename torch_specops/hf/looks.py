"""What a model is when it is looked at, and what its copy is made of."""

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
    are_same,
    calls_nothing,
    globals_of,
    is_foreign,
    package,
    parts_of,
    reaches_module,
)

__all__ = ["Look"]

# What is not looked at. Every module has parameters and hooks, which a copy shares, and names. Each call of a model of
# images leaves its `rope_deltas`, which no forward of this loop reads.
NOT_LOOKED_AT = frozenset({*vars(nn.Module()), "rope_deltas"})

# Id -> an object and its number, because another object may get its id later.
_numbers: dict[int, tuple[ReferenceType[Any], int]] = {}
_next_number = count()


class NotSeenThroughError(Exception):
    """An object may call modules in a way that cannot be changed."""


class Look:
    """What a model was when it was looked at.

    Attributes:
        attributes: module -> the attributes of its copy.
        code: numbers that are equal in two looks if the modules have the same hooks and methods.
        is_observed: True = code is called that may keep what a forward computes: hooks, a `forward` or a function set
            on a module, parametrizations, classes and methods of other packages.
    """

    def __init__(self, copies: WeakKeyDictionary[nn.Module, nn.Module], before: Look | None) -> None:
        self._copies = copies
        self.attributes: dict[nn.Module, dict[str, Any]] = {}
        self.code: list[int] = []
        self._classes: set[type] = set()
        self.is_observed = False
        self._not_followed: set[str] = set()
        # All that was met, in order.
        self._met: list[Any] = []
        # Id -> a config, and what it said when it was copied; and its copy. Configs that are the same object, or inside
        # each other, are so in the copy.
        self._said: dict[int, tuple[PreTrainedConfig, dict[str, Any]]] = {}
        self._configs: dict[int, PreTrainedConfig] = {}
        self._met_configs: set[int] = set()
        if before is not None and before._says_the_same():
            self._said, self._configs = dict(before._said), dict(before._configs)
        # Parts -> what was made of them, in this look and the look before. Compiled code looks at the identity of a
        # function. Older parts are forgotten: some trainers wrap a model anew in every step.
        self._made: dict[Hashable, Any] = {}
        self._made_before = {} if before is None else before._made
        # What is being followed.
        self._inside: list[Any] = []

    @property
    def configs(self) -> list[PreTrainedConfig]:
        """The copies of the configs that the modules have."""
        return list(self._configs.values())

    @property
    def not_followed(self) -> str:
        """Which attributes may call modules of the model itself; "" = none."""
        names = ", ".join(sorted(self._not_followed))
        return names and f"{names} may call modules in a way that cannot be followed"

    def _says_the_same(self) -> bool:
        """Whether the configs that were met are all that was copied, and have not changed since."""
        try:
            return self._met_configs == set(self._said) and all(
                vars(each) == said for each, said in self._said.values()
            )
        # Tensors and arrays are neither equal nor different.
        except (RuntimeError, ValueError):
            return False

    def is_same_as(self, other: Look) -> bool:
        return (
            self.code == other.code
            and len(self._met) == len(other._met)
            and all(
                one is two or (type(one) is type(two) and type(one) in PLAIN and one == two)
                for one, two in zip(self._met, other._met, strict=True)
            )
        )

    def copy_of(self, module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"model: expected modules of Python, got {type(module).__name__} (torch.jit)")
        clone = self._copies.get(module)
        if clone is None:
            # A class's own `__new__` may take arguments.
            clone = self._copies[module] = object.__new__(type(module))
        self._met.append(clone)
        if module in self.attributes:
            return clone
        own = vars(module)
        attributes = self.attributes[module] = own | {"training": False}
        # Some rotary embeddings register a new buffer in a forward, and longrope writes to its own (transformers 5.23).
        writes = "longrope" in str(own.get("rope_type"))
        attributes["_buffers"] = copy.deepcopy(module._buffers) if writes else dict(module._buffers)
        # A forward that keeps hidden states, as many of images do, adds hooks to its layers first (transformers).
        attributes["_forward_hooks"] = own["_forward_hooks"].copy()
        attributes["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
        self._met += (type(module), *module._modules)
        self._look_at_class(type(module))
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            self._follow_hooks(own[name], own[f"{name}_with_kwargs"], module, name)
        for weight in module._parameters.values():
            if isinstance(weight, nn.UninitializedParameter):
                raise ValueError(f"model: {type(module).__name__} has no weights yet; run the model once")
            # Not the weight, which its owner may want to free.
            self._met += (type(weight), getattr(weight, "dtype", None), getattr(weight, "device", None))
        self.is_observed |= "forward" in own or "parametrizations" in module._modules
        attributes["_modules"] = {
            name: child if child is None else self.copy_of(child) for name, child in module._modules.items()
        }
        for name, value in own.items():
            if name not in NOT_LOOKED_AT:
                self._met.append(name)
                self.is_observed |= type(value) in (FunctionType, MethodType) and is_foreign(value)
                try:
                    attributes[name] = self._rebound(value, module)
                except NotSeenThroughError:
                    self._not_followed.add(f"{type(module).__name__}.{name}")
        return clone

    def _follow_hooks(self, hooks: dict[int, Any], with_kwargs: dict[int, bool], module: nn.Module, name: str) -> None:
        """The copy has the hooks of its module. A module or its method is a hook of copies; other hooks are called
        unchanged, because many take notes on the model."""
        for key, hook in hooks.items():
            # transformers' own take note of what a forward shall return.
            self.is_observed |= package(hook) != "transformers"
            self.code += (_number(hook), key in with_kwargs)
            if type(hook) in (MethodType, partial) or isinstance(hook, nn.Module):
                with suppress(NotSeenThroughError):
                    if (rebound := self._rebound(hook, module)) is not hook:
                        self.attributes[module][name] = self.attributes[module][name] | {key: rebound}
        self.code.append(len(hooks))

    def look_at_global_hooks(self) -> None:
        for hook in private.global_hooks():
            self.is_observed = True
            self.code.append(_number(hook))

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
                    self._not_followed.add(f"{kind.__name__}.{name}")

    def _rebound(self, value: Any, owner: nn.Module) -> Any:
        """`value`, which a module `owner` refers to, with copies in the places of modules; itself if there are none.

        Raises:
            NotSeenThroughError: it may refer to modules in another way.
        """
        # Not `value`: what refers to the model itself would keep it alive.
        new = value if type(value) in PLAIN else self._followed(value, owner)
        self._met.append(new)
        return new

    def _followed(self, value: Any, owner: nn.Module) -> Any:
        # Not isinstance, which believes a proxy.
        kind = type(value)
        if issubclass(kind, nn.Module):
            return self.copy_of(value)
        if issubclass(kind, PreTrainedConfig):
            return self._config(value)
        if calls_nothing(kind):
            return value
        if kind is FunctionType:
            # Unwrap the result of `torch.compile`: the loop compiles its own steps.
            compiled = getattr(value, "_torchdynamo_orig_callable", None)
            if compiled is not None and not getattr(value, "_torchdynamo_disable", False):
                return self._rebound(compiled, owner)
            if any(vars(each).get(value.__name__) is value for each in type(owner).__mro__):
                return value
        parts = None if any(value is each for each in self._inside) else parts_of(value)
        if parts is None:
            if reaches_module(value):
                raise NotSeenThroughError
            return value
        old, make, key = parts
        self._inside.append(value)
        try:
            if kind is MethodType and isinstance(value.__self__, nn.Module):
                owner = value.__self__
            for each in globals_of(value) if kind is FunctionType else ():
                if not any(each is one for one in self._inside) and self._rebound(each, owner) is not each:
                    raise NotSeenThroughError
            new = [self._rebound(part, owner) for part in old]
        finally:
            self._inside.pop()
        if are_same(new, old):
            return value
        whole = kind, *key, *map(id, new)
        made = self._made.get(whole, self._made_before.get(whole))
        # A forward may have written to a container of the copy.
        if made is None or (kind in MUTABLE and (held := parts_of(made)) and not are_same(held[0], new)):
            made = make(*new)
        self._made[whole] = made
        return made

    def _config(self, config: PreTrainedConfig) -> PreTrainedConfig:
        self._met_configs.add(id(config))
        if id(config) not in self._said:
            try:
                self._said[id(config)] = config, copy.deepcopy(vars(config))
                memory: dict[int, Any] = dict(self._configs)
                copy.deepcopy(config, memory)
            except TypeError as error:
                raise ValueError(f"model: {type(config).__name__} cannot be copied: {error}") from error
            self._configs |= {key: each for key, each in memory.items() if isinstance(each, PreTrainedConfig)}
        return self._configs[id(config)]


def _number(value: Any) -> int:
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
