"""A copy of a model's modules that shares its weights, so that the loop can change modules without changing the
model."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from .looks import Look
from .references import reaches_module


class ShadowModel:
    """A copy of a model's modules in evaluation mode. It shares the parameters and hooks of the model.

    Each call of `of` updates the whole copy from the current model: the classes, attributes and configs of its modules.
    If the call is interrupted, the copy does not change.

    A copied module refers to the same objects as its original, except that every module is replaced by its copy. This
    holds for child modules and for modules inside methods, `functools.partial`, closures, default arguments, objects
    made with `functools.wraps`, weak references and containers, at any depth.

    Nothing is written to the model. The loop can set another attention function or fewer layers in the copy, and other
    users of the model, in any thread, are not affected.

    Attributes:
        newest: the most recent completed look.
        version: a number that increases with each look that finds a change.
    """

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
        self.newest = Look(self._copies, None)
        self.version = 0

    def of(self, model: PreTrainedModel, own_layers: bool = False) -> PreTrainedModel:
        """Update the copy from `model` and return it. Every call returns the same object.

        Args:
            own_layers: True = raise if an attribute may run layers of the model instead of layers of the copy.

        Raises:
            ValueError: an attribute may run layers of the model, and `own_layers` is True or the model is in training
                mode.
        """
        look = Look(self._copies, self.newest)
        copied = look.copy_of(model)
        assert isinstance(copied, PreTrainedModel)
        if look.not_followed and any(module.training for module in model.modules()):
            raise ValueError(f"model: {look.not_followed}, in training mode and with dropout; call model.eval() first")
        if look.not_followed and own_layers:
            raise ValueError(f"model: {look.not_followed}, and this draft reads others; remove that attribute")
        self.version += not look.is_same_as(self.newest)
        for module, attributes in look.attributes.items():
            clone = self._copies[module]
            object.__setattr__(clone, "__class__", type(module))
            object.__setattr__(clone, "__dict__", attributes)
        look.attributes = {}
        # Set `newest` last, so that after an interrupted call the next look is compared with the last completed look.
        self.newest = look
        return copied

    def is_reached(self, model: PreTrainedModel, *holders: object) -> bool:
        """True if a chain of references leads from a holder of the copy to the model, which it then keeps alive: from a
        hook, or from a draft that refers to the model."""
        return reaches_module(holders, model)
