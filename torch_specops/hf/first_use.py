"""Checks of a model of an untested family at its first use."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..ops.attention import DTYPES
from .models import TransformersModel

__all__ = ["check_reading", "has_own_forward"]

# Slots of the cache: more than a window that a model keeps to itself has (256 in GPT-Neo).
CAPACITY = 512
# The architectures that were read right -> whether their attention may get spans.
_right: dict[Hashable, bool] = {}


def check_reading(adapter: TransformersModel) -> None:
    """Compare logits read through the cache, after a rollback, with those of a forward without one. Attention may get
    spans in place of masks if the logits are then the same. An architecture that was read right is not read again.

    Raises:
        ValueError: the logits differ, or the model takes no cache and masks.
    """
    architecture = _architecture(adapter.model)
    if architecture in _right:
        adapter.can_take_spans = _right[architecture]
        return
    _check(adapter)
    if architecture is not None:
        _right[architecture] = adapter.can_take_spans


def has_own_forward(model: PreTrainedModel) -> bool:
    """True if a module has a forward that its class does not have."""
    return any("forward" in vars(module) for module in model.modules())


def _architecture(model: PreTrainedModel) -> Hashable:
    """The key of a model's forward apart from its weights: the classes of its modules, their settings, the storage of
    weights. It holds no reference to the model. None = unknown, because a module has a forward of its own."""
    if has_own_forward(model):
        return None
    settings = repr([vars(config) for config in (model.config, model.config.get_text_config(decoder=True))])
    weights = frozenset((type(weight), weight.dtype, weight.device.type) for weight in model.parameters())
    return tuple(map(type, model.modules())), settings, weights


@torch.inference_mode()
def _check(adapter: TransformersModel) -> None:
    name = type(adapter.model).__name__
    tokens = torch.arange(8, device=adapter.device).unsqueeze(0) % adapter.vocab_size
    attention = adapter.model.config.get_text_config(decoder=True)._attn_implementation
    takes_spans = attention == "sdpa" and adapter.dtype in DTYPES
    if takes_spans:
        adapter.can_take_spans = True
        try:
            difference, bound = _difference(adapter, tokens, takes_spans=True)
            takes_spans = difference <= bound
        # An attention of the model's own takes the spans for a mask.
        except Exception:
            takes_spans = False
    adapter.can_take_spans = takes_spans
    try:
        difference, bound = _difference(adapter, tokens, takes_spans=False)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(
            f"model: {name} takes no cache and mask of ragged rows; decode with transformers alone: {error}"
        ) from error
    if not difference <= bound:
        raise ValueError(
            f"model: {name} does not read ragged rows right: its logits differ by {difference:.1e} from those of a "
            "forward without a cache; decode with transformers alone"
        )


def _difference(adapter: TransformersModel, tokens: Tensor, takes_spans: bool) -> tuple[float, float]:
    """The largest difference between the logits, and how much rounding may explain."""
    capacity = min(CAPACITY, adapter.max_length or CAPACITY)
    adapter.start(2, capacity)
    expected = adapter.prepared(input_ids=tokens, use_cache=False).logits.float()
    begin = torch.arange(3, device=adapter.device).expand(2, -1)
    positions = torch.tensor([[3], [1]], device=adapter.device) + torch.arange(5, device=adapter.device)
    adapter.read(tokens[0, begin], begin, takes_spans)
    adapter.read(tokens.flip(1)[0, positions], positions, takes_spans)
    # Once as eager steps read, once as compiled ones.
    found = [adapter.read(tokens[0, positions], positions, takes_spans, width=width) for width in (None, capacity)]
    # Rounding differs by far less, a missing or wrong token by far more. Many models compute rotary embeddings or
    # experts' weights in float32, whatever their dtype; under autocast they compute in 16 bits.
    dtypes = adapter.dtype, torch.float32, adapter.key_values[0].values.dtype
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    difference = torch.stack(found).float() - expected[0, positions]
    return float(difference.abs().amax()), eps**0.5 * float(expected.abs().amax())
