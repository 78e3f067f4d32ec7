"""Early exit: the target's first layers as the draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .. import checks
from ..models.base import LanguageModel, Part
from .model import ModelDraft


class EarlyExit(ModelDraft):
    """Drafts with the first layers of the target, its final norm and its head. No weight is copied.

    The draft has a separate KV cache. Use it with a model that was trained to exit early: the first layers of other
    models rarely agree with the whole model.

    Args:
        num_layers: the number of the target's layers that the draft runs, >= 1. In an encoder-decoder model, these are
            decoder layers.

    Raises:
        TypeError: `num_layers` is not an int. `bind` raises it for a target without `first_layers`.
        ValueError: `num_layers` is below 1. `bind` raises it if the target has fewer layers.

    Examples:
        >>> import torch, transformers, torch_specops
        >>> config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, eos_token_id=None)
        >>> target = transformers.GPT2LMHeadModel(config).eval()
        >>> draft = torch_specops.drafts.EarlyExit(num_layers=2)
        >>> output = torch_specops.generate(target, torch.tensor([[5, 6, 7]]), draft=draft, max_new_tokens=8, seed=0)
        >>> output.lengths
        tensor([11])
    """

    # The vocabulary and the device are the target's, which is not known before `bind`.
    vocab_size = device = None

    def __init__(self, num_layers: int) -> None:
        self.num_layers = checks.check_int("num_layers", num_layers, 1)
        self._layers_of: LanguageModel | None = None

    @property
    def inside(self) -> Sequence[Part]:  # type: ignore[override]
        return () if self._layers_of is None else super().inside

    def bind(self, target: LanguageModel) -> None:
        if target is not self._layers_of:
            super().__init__(target.first_layers(self.num_layers))
            self._layers_of = target
        super().bind(target)

    def start(self, tokens: Tensor, lengths: Tensor, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        if self._layers_of is None:
            raise RuntimeError("start: an EarlyExit has no layers before bind was called with the target")
        super().start(tokens, lengths, capacity, inputs)
