"""`Look` scans a model once. It computes the attributes for the copied modules and detects changes since an earlier
scan."""

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

# Attributes that a look does not follow like others. Those of every module, such as parameters and hooks, are handled
# separately. `rope_deltas` is skipped because it changes in every call of an image model, and the loop does not read
# it.
NOT_FOLLOWED = frozenset({*vars(nn.Module()), "rope_deltas"})


class NotSeenThroughError(Exception):
    """An object may call modules, and its references to them cannot be replaced by references to copies."""


class Look:
    """The state of a model at one moment.

    A look visits all modules and follows the references in their attributes. It records every object it visits, in
    order. If two looks have equal records, the model did not change between them.

    Attributes:
        attributes: module -> the attributes of its copy.
        code: numbers for the hooks and methods of the modules; equal in two looks if hooks and methods are the same.
        is_observed: True = a forward calls code that may store intermediate results: hooks, a `forward` or another
            function set on a module, parametrizations, or classes and methods of other packages.
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
        # Parts -> the object rebuilt from them, in this look and in the previous one. Rebuilt functions are reused
        # because Dynamo guards on the identity of a function. Entries of older looks are dropped: some trainers wrap
        # the model again in every step, so the dict would grow without limit.
        self._made: dict[Hashable, Any] = {}
        self._made_before = {} if before is None else before._made
        # Ids of the values that are being followed, because a value that refers to itself would recurse without end.
        self._inside: set[int] = set()

    @property
    def configs(self) -> list[PreTrainedConfig]:
        """The copies of all configs in the model."""
        return list(self._configs.copies.values())

    @property
    def not_followed(self) -> str:
        """A message that names the attributes through which the copy may call modules of the original model; "" =
        none."""
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
        """The copy of a module. Visits the module if this look has not visited it yet."""
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(f"model: expected modules of Python, got {type(module).__name__} (torch.jit)")
        clone = self._copies.get(module)
        if clone is None:
            # Call `object.__new__`, because the `__new__` of the class may require arguments.
            clone = self._copies[module] = object.__new__(type(module))
        self._record.append(clone)
        if module not in self.attributes:
            self._look_at(module)
        return clone

    def _look_at(self, module: nn.Module) -> None:
        module_vars = vars(module)
        attributes = self.attributes[module] = module_vars | {"training": False}
        # A forward may write buffers. Some rotary embeddings register a new buffer, for which a copied dict is enough;
        # longrope overwrites the buffer itself, which needs a copied tensor (transformers 5.23).
        writes = "longrope" in str(module_vars.get("rope_type"))
        attributes["_buffers"] = copy.deepcopy(module._buffers) if writes else dict(module._buffers)
        # Copy the dict, because transformers adds hooks to the layers when a forward returns hidden states, as many
        # image models do.
        attributes["_forward_hooks"] = module_vars["_forward_hooks"].copy()
        attributes["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
        self._record += (type(module), *module._modules)
        self.is_observed |= "forward" in module_vars or "parametrizations" in module._modules
        self._look_at_class(type(module))
        self._look_at_hooks(module, "_forward_pre_hooks")
        self._look_at_hooks(module, "_forward_hooks")
        for weight in module._parameters.values():
            if isinstance(weight, nn.UninitializedParameter):
                raise ValueError(f"model: {type(module).__name__} has no weights yet; run the model once")
            # Do not record the weight itself: the record would keep it alive when the user frees it.
            self._record += (type(weight), getattr(weight, "dtype", None), getattr(weight, "device", None))
        attributes["_modules"] = {
            name: child if child is None else self.copy_of(child) for name, child in module._modules.items()
        }
        for name, value in module_vars.items():
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
        """Give the copy the hooks of its module. A hook that is a module, a bound method or a `partial` is rebuilt from
        copies. Other hooks stay the same objects, because many store results on the original model."""
        hooks, with_kwargs = vars(module)[name], vars(module)[f"{name}_with_kwargs"]
        for key, hook in hooks.items():
            # The hooks of transformers only collect the hidden states and attentions that a caller requested.
            self.is_observed |= package(hook) != "transformers"
            self.code += (_number(hook), key in with_kwargs)
            if type(hook) in (MethodType, partial) or isinstance(hook, nn.Module):
                with suppress(NotSeenThroughError):
                    if (new := self._in_copy(hook, module)) is not hook:
                        self.attributes[module][name] = self.attributes[module][name] | {key: new}
        self.code.append(len(hooks))

    def _in_copy(self, value: Any, owner: nn.Module) -> Any:
        """Convert an attribute value of the module `owner` for the copy. Returns the value itself if no reference leads
        from it to a module, otherwise a value rebuilt with references to copies of the modules.

        Raises:
            NotSeenThroughError: the value may refer to modules in a way that cannot be followed.
        """
        new = value if type(value) in PLAIN else self._followed(value, owner)
        # Do not record `value`: it may refer to the model, and the record would keep the model alive.
        self._record.append(new)
        return new

    def _followed(self, value: Any, owner: nn.Module) -> Any:
        # Use `type` instead of isinstance, because a proxy object may report the class of the object it wraps.
        kind = type(value)
        if issubclass(kind, nn.Module):
            return self.copy_of(value)
        if issubclass(kind, PreTrainedConfig):
            return self._configs.copy_of(value)
        if calls_nothing(kind):
            return value
        if kind is FunctionType:
            # Unwrap the result of `torch.compile`, because the loop compiles whole steps itself.
            compiled = getattr(value, "_torchdynamo_orig_callable", None)
            if compiled is not None and not getattr(value, "_torchdynamo_disable", False):
                return self._in_copy(compiled, owner)
            # A function of the owner's class gets the module as an argument, so it refers to no particular module.
            if any(vars(each).get(value.__name__) is value for each in type(owner).__mro__):
                return value
        parts = None if id(value) in self._inside else parts_of(value)
        if parts is not None:
            return self._of_parts(value, owner, parts)
        if reaches_module(value):
            raise NotSeenThroughError
        return value

    def _of_parts(self, value: Any, owner: nn.Module, parts: Parts) -> Any:
        """Convert the parts of a value for the copy, and rebuild the value if any of them changed."""
        old, make, key = parts
        kind = type(value)
        self._inside.add(id(value))
        try:
            if kind is MethodType and isinstance(value.__self__, nn.Module):
                owner = value.__self__
            for each in globals_of(value) if kind is FunctionType else ():
                # A rebuilt function keeps the globals of the original, so its reference to a module could not be
                # replaced.
                if id(each) not in self._inside and self._in_copy(each, owner) is not each:
                    raise NotSeenThroughError
            new = [self._in_copy(part, owner) for part in old]
        finally:
            self._inside.discard(id(value))
        if are_same(new, old):
            return value
        whole = kind, *key, *map(id, new)
        made = self._made.get(whole, self._made_before.get(whole))
        # Do not reuse a container that an earlier look rebuilt if a forward has changed it since.
        if made is None or (kind in MUTABLE and (held := parts_of(made)) and not are_same(held[0], new)):
            made = make(*new)
        self._made[whole] = made
        return made


class _ConfigCopies:
    """Copies of a model's configs. The next look reuses them unless any config has changed. Two modules that share a
    config share its copy, and a config nested in another stays nested."""

    def __init__(self, before: _ConfigCopies | None) -> None:
        # Id of a config -> its copy.
        self.copies: dict[int, PreTrainedConfig] = {}
        # Id of a config -> the config, and a copy of its attributes at the time it was copied.
        self._copied: dict[int, tuple[PreTrainedConfig, dict[str, Any]]] = {}
        self._met: set[int] = set()
        if before is not None and before._are_valid():
            self.copies, self._copied = dict(before.copies), dict(before._copied)

    def _are_valid(self) -> bool:
        """True if the look visited every copied config and none has changed since it was copied."""
        try:
            return self._met == set(self._copied) and all(
                _are_equal(vars(config), then) for config, then in self._copied.values()
            )
        # Comparing tensors or arrays in a config raises, because a comparison result with several elements has no truth
        # value.
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


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values of configs are equal. `==` of a nested config raises if its layers have different sizes."""
    if isinstance(one, PreTrainedConfig):
        return type(one) is type(other) and _are_equal(vars(one), vars(other))
    if type(one) is not dict or type(other) is not dict:
        return bool(one == other)
    return one.keys() == other.keys() and all(_are_equal(value, other[key]) for key, value in one.items())


# Id -> a weak reference to an object, and the object's number. The reference is compared because a later object may get
# the same id.
_numbers: dict[int, tuple[ReferenceType[Any], int]] = {}
_next_number = count()


def _number(value: Any) -> int:
    """A number that is unique to this object, also after the object is freed."""
    key = id(value)
    known = _numbers.get(key)
    if known is None or known[0]() is not value:
        try:
            known = ref(value, lambda _: _numbers.pop(key, None)), next(_next_number)
        # The object does not support weak references.
        except TypeError:
            return next(_next_number)
        _numbers[key] = known
    return known[1]
