"""Chooses the adapter of a transformers model, and checks a model of an untested family at its first use."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress

import torch
from torch import nn
from transformers import PreTrainedModel

from ..ops.attention import DTYPES
from .architecture import unwrapped
from .encoder_decoder import EncoderDecoderModel
from .models import TESTED_FAMILIES, TransformersModel
from .rereading import RereadingModel
from .rotary import rereads_at

__all__ = ["language_model"]

# Slots of the cache: more than a window that a model keeps to itself has (256 in GPT-Neo).
CAPACITY = 512
# The architectures that passed the check -> whether their attention may get spans.
_passed: dict[Hashable, bool] = {}


def language_model(model: PreTrainedModel | nn.Module) -> TransformersModel:
    """The adapter that reads ragged rows with an unmodified transformers model.

    Args:
        model: a `PreTrainedModel` with a language head, all of it on one device, or a `PeftModel` around one: its base
            with the active adapter.

    Raises:
        TypeError: no transformers model.
        ValueError: a model that cannot be rolled back (recurrent layers), one without a language head, offloaded or on
            several devices, an attention implementation that takes no mask, a `forward` set on a module that may run
            modules in training mode, an encoder-decoder model other than Whisper and T5, or a model of an untested
            family that takes no cache and masks, or whose logits with them differ from those without.
    """
    model = unwrapped(model)
    # Use the outer model type: a wrapper may read in its own way.
    is_tested = model.config.model_type in TESTED_FAMILIES
    if model.config.is_encoder_decoder:
        if not is_tested:
            raise ValueError(
                f"model: of encoder-decoder models Whisper and T5 are supported, got {type(model).__name__}"
            )
        return EncoderDecoderModel(model)
    adapter = TransformersModel(model) if rereads_at(model) is None else RereadingModel(model)
    # A forward of its own is unknown code: it is checked every time.
    if any("forward" in vars(module) for module in model.modules()):
        adapter.supports_spans = _check(adapter)
    elif not is_tested:
        architecture = _architecture(model)
        if architecture not in _passed:
            _passed[architecture] = _check(adapter)
        adapter.supports_spans = _passed[architecture]
    return adapter


def _architecture(model: PreTrainedModel) -> Hashable:
    """The key of a model's forward apart from its weights: the classes of its modules, their settings, the storage of
    weights. It holds no reference to the model."""
    settings = repr([vars(config) for config in (model.config, model.config.get_text_config(decoder=True))])
    weights = frozenset((type(weight), weight.dtype, weight.device.type) for weight in model.parameters())
    return tuple(map(type, model.modules())), settings, weights


@torch.inference_mode()
def _check(adapter: TransformersModel) -> bool:
    """Compare logits read through the cache, after a rollback, with those of a forward without one. True = the logits
    are also the same if attention gets spans in place of masks.

    Raises:
        ValueError: the logits differ, or the model takes no cache and masks.
    """
    name = type(adapter.model).__name__
    attention = adapter.model.config.get_text_config(decoder=True)._attn_implementation
    adapter.supports_spans = attention == "sdpa" and adapter.dtype in DTYPES
    supports_spans = False
    if adapter.supports_spans:
        # An attention of the model's own takes the spans for a mask.
        with suppress(Exception):
            difference, bound = _difference(adapter, use_spans=True)
            supports_spans = difference <= bound
    adapter.supports_spans = supports_spans
    try:
        difference, bound = _difference(adapter, use_spans=False)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ValueError(
            f"model: {name} takes no cache and mask of ragged rows; decode with transformers alone: {error}"
        ) from error
    if not difference <= bound:
        raise ValueError(
            f"model: {name} does not read ragged rows right: its logits differ by {difference:.1e} from those of a "
            "forward without a cache; decode with transformers alone"
        )
    return supports_spans


def _difference(adapter: TransformersModel, use_spans: bool) -> tuple[float, float]:
    """The largest difference between the logits, and how much rounding may explain."""
    tokens = torch.arange(8, device=adapter.device).unsqueeze(0) % adapter.vocab_size
    capacity = min(CAPACITY, adapter.max_length or CAPACITY)
    adapter.start(2, capacity)
    expected = adapter.prepared(input_ids=tokens, use_cache=False).logits.float()
    begin = torch.arange(3, device=adapter.device).expand(2, -1)
    positions = torch.tensor([[3], [1]], device=adapter.device) + torch.arange(5, device=adapter.device)
    adapter.read(tokens[0, begin], begin, use_spans)
    adapter.read(tokens.flip(1)[0, positions], positions, use_spans)
    # Test both widths: that of eager steps and that of compiled ones.
    found = [adapter.read(tokens[0, positions], positions, use_spans, width=width) for width in (None, capacity)]
    # Rounding differs by far less, a missing or wrong token by far more. Many models compute rotary embeddings or
    # experts' weights in float32, whatever their dtype; under autocast they compute in 16 bits.
    dtypes = adapter.dtype, torch.float32, adapter.key_values[0].values.dtype
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    difference = torch.stack(found).float() - expected[0, positions]
    return float(difference.abs().amax()), eps**0.5 * float(expected.abs().amax())
