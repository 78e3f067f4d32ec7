"""A second set of modules over a model's weights, so that the loop can prepare a model without changing it."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from .looks import Look


class ShadowModel:
    """Modules in evaluation mode over the parameters and the hooks of a model.

    Each look makes all of the copy anew from what the model is then: the classes of its modules, their attributes and
    configs; or none of it, if the look is interrupted. What a module refers to, its copy refers to as well, but for
    modules, which are copies too: child modules, and those in methods, `functools.partial`, closures, default
    arguments, objects made with `functools.wraps`, weak references and containers, one inside another. Nothing is
    written to the model. A different attention function or fewer layers can be set in the copy, and everybody else who
    uses the model, in another thread too, sees nothing of that.

    Attributes:
        newest: the newest look.
        version: another number after each look that found a change.
    """

    def __init__(self) -> None:
        self._copies: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
        self.newest = Look(self._copies, None)
        self.version = 0

    def of(self, model: PreTrainedModel, own_layers: bool = False) -> PreTrainedModel:
        """Look at `model`; returns its copy, the same object in every call.

        Args:
            own_layers: True = an attribute that may run the model's layers and not the copy's is an error.

        Raises:
            ValueError: there is such an attribute, and `own_layers` is set or the model is in training.
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
        # Last: after an interrupted look, the next is compared with the look before it.
        look.attributes = {}
        self.newest = look
        return copied
