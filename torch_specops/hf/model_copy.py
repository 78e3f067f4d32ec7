"""A second set of modules over a model's weights, so that the loop can prepare a model without changing it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .rebinding import NotSeenThroughError, Rebinding

__all__ = ["ModelCopy"]

# Most attributes are of these types, and refer to nothing that has a copy. They are skipped at once, because every call
# of a decoder brings its copy up to date.
PLAIN = {type(None), bool, int, float, str, set, dict, OrderedDict}


class ModelCopy:
    """Copies a model's modules and configs; parameters and hooks stay the same objects.

    The copy is in evaluation mode, and so is every module that a `forward` set on a module calls. A different attention
    function or fewer layers can be set in it, and everybody else who uses the model, in another thread too, sees
    nothing of that.
    """

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
        self._configs: dict[int, Any] = {}
        self._rebinding = Rebinding(self._copy_of)
        # Since the last call of `of`: the modules that were copied, and those with a forward that was not.
        self._done: set[nn.Module] = set()
        self._not_seen_through: list[str] = []

    def __reduce__(self) -> tuple[type[ModelCopy], tuple[()]]:
        # Weak references cannot be pickled, and the next call of `of` makes the copies anew.
        return ModelCopy, ()

    @property
    def configs(self) -> list[PreTrainedConfig]:
        """The copies of the configs that the modules have."""
        return [value for value in self._configs.values() if isinstance(value, PreTrainedConfig)]

    def of(self, model: PreTrainedModel, own_layers: bool = False) -> PreTrainedModel:
        """The copy of `model`: the same object in every call, brought up to date with what has changed in the model
        (its device, a module that was exchanged, an active LoRA adapter). Configs are copied once.

        Args:
            model: the model.
            own_layers: whether a forward that runs the model's layers in place of the copy's is an error.

        Raises:
            ValueError: a module has a `forward` of its own that may run modules in training mode.
        """
        self._done.clear()
        self._not_seen_through.clear()
        self._rebinding.begin()
        copied = self._copy_of(model)
        assert isinstance(copied, PreTrainedModel)
        self._done.clear()
        if self._not_seen_through:
            names = ", ".join(sorted(set(self._not_seen_through)))
            found = f"model: {names} has a forward of its own that may run the model's own layers"
            if any(module.training for module in model.modules()):
                raise ValueError(f"{found}, in training mode and with dropout; call model.eval() first")
            if own_layers:
                raise ValueError(f"{found}, and this draft reads fewer layers or their features; remove that forward")
        return copied

    def _copy_of(self, module: nn.Module) -> nn.Module:
        clone = self._copies.get(module)
        if clone is None:
            clone = self._copies[module] = type(module).__new__(type(module))
        if module in self._done:
            return clone
        self._done.add(module)
        attributes = vars(clone)
        attributes.clear()
        attributes.update(vars(module))
        attributes["training"] = False
        # Drop the result of `Module.compile`: it calls the original.
        attributes.pop("_compiled_call_impl", None)
        # Some rotary embeddings register a new buffer in a forward, and longrope writes to its own (transformers 5.23).
        writes = "longrope" in str(attributes.get("rope_type"))
        attributes["_buffers"] = copy.deepcopy(module._buffers) if writes else dict(module._buffers)
        attributes["_modules"] = {
            name: child if child is None else self._copy_of(child) for name, child in module._modules.items()
        }
        for name, value in vars(module).items():
            if type(value) in PLAIN:
                continue
            if isinstance(value, PreTrainedConfig):
                # One memory for all: configs that are one object, or one inside another, are so in the copy.
                attributes[name] = copy.deepcopy(value, self._configs)
            elif name == "forward" or isinstance(value, (MethodType, partial, FunctionType, nn.Module)):
                self._rebind(module, name, value)
        return clone

    def _rebind(self, module: nn.Module, name: str, value: Any) -> None:
        try:
            vars(self._copies[module])[name] = self._rebinding.of(value, module)
        except NotSeenThroughError:
            # Such as accelerate's `_old_forward`.
            if name.endswith("forward"):
                self._not_seen_through.append(type(module).__name__)
