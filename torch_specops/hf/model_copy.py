"""A second set of modules over a model's weights, so that the loop can prepare a model without changing it."""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["ModelCopy"]


class ModelCopy:
    """Copies a model's modules and configs; parameters and hooks stay the same objects.

    The copy is in evaluation mode. A different attention function or fewer layers can be set in it, and everybody else
    who uses the model, in another thread too, sees nothing of that.
    """

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
        self._configs: dict[int, Any] = {}

    def __reduce__(self) -> tuple[type[ModelCopy], tuple[()]]:
        # Weak references cannot be pickled, and the next call of `of` makes the copies anew.
        return ModelCopy, ()

    @property
    def configs(self) -> list[PreTrainedConfig]:
        """The copies of the configs that the modules have."""
        return [value for value in self._configs.values() if isinstance(value, PreTrainedConfig)]

    def of(self, model: PreTrainedModel) -> PreTrainedModel:
        """The copy of `model`: the same object in every call, brought up to date with what has changed in the model
        (its device, a module that was exchanged, an active LoRA adapter). Configs are copied once.
        """
        copied = self._copy_of(model)
        assert isinstance(copied, PreTrainedModel)
        return copied

    def _copy_of(self, module: nn.Module) -> nn.Module:
        clone = self._copies.get(module)
        if clone is None:
            clone = self._copies[module] = type(module).__new__(type(module))
        attributes = vars(clone)
        attributes.clear()
        attributes.update(vars(module))
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                # One memory for all: configs that are one object, or one inside another, are so in the copy.
                attributes[name] = copy.deepcopy(value, self._configs)
        attributes["training"] = False
        # What `Module.compile` made calls the original.
        attributes.pop("_compiled_call_impl", None)
        # Some rotary embeddings register a new buffer in a forward.
        attributes["_buffers"] = dict(module._buffers)
        attributes["_modules"] = {
            name: child if child is None else self._copy_of(child) for name, child in module._modules.items()
        }
        return clone
