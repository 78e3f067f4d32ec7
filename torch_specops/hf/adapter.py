"""Chooses the adapter of a transformers model, and checks a model of an untested family at its first use."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..ops.attention import DTYPES
from .architecture import Reading, unwrapped, windows
from .encoder_decoder import EncoderDecoderModel
from .hybrid import HybridModel
from .images import HybridImageModel, ImageTextModel, reads_images
from .models import TESTED_FAMILIES, TransformersModel
from .references import are_same, is_foreign
from .rereading import OTHER_ROTARY, RereadingModel
from .rotary import rereads_at
from .states import state_modules

# Slots of the cache: more than a window that a model keeps to itself has (256 in GPT-Neo).
CAPACITY = 512
# Fields of a config: the lengths at which a model changes what tokens see, or how they are rotated.
THRESHOLDS = (
    *("attention_chunk_size", "index_topk", "local_attention", "original_max_position_embeddings", "sliding_window"),
    *("sliding_window_size", "window_size"),
)
# What the check sets them to.
LOWERED = 4

# The architectures that passed the check.
_passed: dict[Hashable, Reading] = {}


def language_model(model: PreTrainedModel | nn.Module) -> TransformersModel:
    """The adapter that reads ragged rows with an unmodified transformers model.

    Args:
        model: a `PreTrainedModel` with a language head, all of it on one device, or a `PeftModel` around it: its base
            with the active adapter.

    Raises:
        TypeError: no transformers model.
        ValueError: a model that cannot be rolled back (states outside of transformers' cache, indexed attention), has
            no language head, is offloaded or on several devices; an attention implementation that takes no mask, a
            `forward` set on a module that may run modules in training mode, an encoder-decoder model other than Whisper
            and T5, or a model of an untested family that takes no cache and masks, or whose logits with them differ
            from those without.
    """
    model = unwrapped(model)
    if model.config.is_encoder_decoder:
        # Check the type of the outer model: a wrapper may read its input differently from the model inside.
        if model.config.model_type not in TESTED_FAMILIES:
            raise ValueError(
                f"model: of encoder-decoder models Whisper and T5 are supported, got {type(model).__name__}"
            )
        return EncoderDecoderModel(model)
    kind = ImageTextModel if reads_images(model) else TransformersModel
    if rereads_at(model) is not None:
        kind = RereadingModel
    if any(state_modules(model)):
        kind = HybridImageModel if reads_images(model) else HybridModel
    return kind(model, check=_Check())


class _Check:
    """Checks a model when it is first used, and again when its architecture, or a `forward` or a class of its owner's
    changes."""

    def __init__(self) -> None:
        # Of the newest check of code of the owner's.
        self._architecture: Hashable = None
        self._own: list[Any] = []
        self._reading: Reading | None = None

    def __reduce__(self) -> tuple[type[_Check], tuple[()]]:
        # The last check may hold code that its owner has removed since.
        return _Check, ()

    def __call__(self, adapter: TransformersModel) -> Reading | None:
        """How the model is read; None = as its family was tested."""
        model = adapter.model
        if (rereads_at(model) is not None) != isinstance(adapter, RereadingModel):
            raise ValueError(OTHER_ROTARY)
        # Unknown code, whatever the architecture.
        own = [vars(module).get("forward", type(module)) for module in model.modules()]
        own = [each for each in own if not isinstance(each, type) or is_foreign(each)]
        if not own:
            # What was removed is not kept.
            self._own = []
            if model.config.model_type in TESTED_FAMILIES:
                return None
            if (architecture := _architecture(model)) not in _passed:
                _passed[architecture] = _check(adapter)
            return _passed[architecture]
        architecture = _architecture(model)
        if architecture != self._architecture or not are_same(own, self._own):
            self._reading = _check(adapter)
            self._architecture, self._own = architecture, own
        return self._reading


def _architecture(model: PreTrainedModel) -> Hashable:
    """The key of a model's forward apart from its weights: the classes of its modules, their settings, the storage of
    weights. It holds no reference to the model."""
    settings = repr([vars(config) for config in (model.config, model.config.get_text_config(decoder=True))])
    weights = frozenset((type(weight), weight.dtype, weight.device.type) for weight in model.parameters())
    return tuple(map(type, model.modules())), settings, weights


# Code of the user's may keep what it sees.
@torch.inference_mode(False)
@torch.no_grad()
def _check(adapter: TransformersModel) -> Reading:
    """Compare logits read through the cache, after a rollback, with a forward that has no cache; with the lengths
    lowered at which the model changes, so that a few tokens cross them.

    Raises:
        ValueError: the logits differ below these lengths too, or the model takes no cache and masks.
    """
    config = adapter.model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    lengths = {
        name: length
        for fields in (rope, *(each for each in rope.values() if isinstance(each, dict)), vars(config))
        for name in THRESHOLDS
        if type(length := fields.get(name)) is int and length > LOWERED
    }
    supports_spans, wrong = _compare(adapter, list(lengths))
    if wrong is None:
        return Reading(supports_spans, adapter.max_length, adapter.limited_by)
    if lengths:
        supports_spans, wrong = _compare(adapter, [])
    if wrong is not None:
        raise ValueError(f"model: {type(adapter.model).__name__} {wrong}; decode with transformers alone")
    changing = [name for name in lengths if _compare(adapter, [name])[1] is not None] or list(lengths)
    name = min(changing, key=lengths.__getitem__)
    if adapter.max_length is not None and adapter.max_length <= lengths[name]:
        return Reading(supports_spans, adapter.max_length, adapter.limited_by)
    return Reading(supports_spans, lengths[name], f"its cache or masks are others beyond ({name})")


def _compare(adapter: TransformersModel, lowered: list[str]) -> tuple[bool, str | None]:
    """Whether attention may get spans instead of masks, and packed rows; what is wrong with masks, None = nothing."""
    attention = adapter.model.config.get_text_config(decoder=True)._attn_implementation
    supports_spans = False
    if attention == "sdpa" and adapter.dtype in DTYPES:
        # An attention of the model's own takes the spans for a mask.
        with suppress(Exception):
            difference, bound = _difference(adapter, lowered, use_spans=True)
            supports_spans = difference <= bound
    try:
        difference, bound = _difference(adapter, lowered, use_spans=False, supports_spans=supports_spans)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        return False, f"takes no cache and mask of ragged rows: {error}"
    if not difference <= bound:
        return False, (
            f"does not read ragged rows right: its logits differ by {difference:.1e} from a forward without a cache"
        )
    return supports_spans, None


def _difference(
    adapter: TransformersModel, lowered: list[str], use_spans: bool, supports_spans: bool = True
) -> tuple[float, float]:
    """The largest difference between the logits, and how much rounding may explain."""
    # Its configs are changed, and are not used again.
    reading = Reading(supports_spans, adapter.max_length, adapter.limited_by)
    adapter = type(adapter)(adapter.model, check=lambda adapter: reading)
    device = adapter.device
    # Some tokens are equal.
    count = min(12, adapter.max_length or 12)
    tokens = (torch.arange(count, device=device) * 5 % 7).unsqueeze(0) % adapter.vocab_size
    capacity = min(CAPACITY, adapter.max_length or CAPACITY)
    adapter.expect(count)
    adapter.start(2, capacity)
    _lower(adapter, lowered)
    adapter.begin_texts(torch.full((2,), 1 if isinstance(adapter, HybridModel) else count, device=device))
    # Some families with states decode other logits than they read in a prompt.
    expected = adapter.decoded(tokens).float() if isinstance(adapter, HybridModel) else _logits(adapter, tokens)
    if isinstance(adapter, RereadingModel) and adapter.switch < count:
        expected = torch.cat([_logits(adapter, tokens[:, : adapter.switch]), expected[:, adapter.switch :]], 1)
    index = torch.arange(count - 3, device=device).expand(2, -1)
    positions = torch.tensor([[3], [1]], device=device) + index
    # A prompt, from which nothing is rolled back, and drafts.
    for begin in (index[:, :1], index[:, 1:3]):
        adapter.read(tokens[0, begin], begin, use_spans)
    adapter.read(tokens.flip(1)[0, positions], positions, use_spans)
    # Test both widths: of eager and of compiled steps.
    tokens, wanted = tokens[0, positions], expected[0, positions]
    found = [adapter.read(tokens, positions, use_spans, width=width) - wanted for width in (None, capacity)]
    if use_spans and adapter.packs_rows:
        is_read = index < torch.tensor([[2], [count]], device=device)
        found.append(adapter.forward_packed(tokens, positions, is_read) - wanted[is_read])
    difference = torch.cat([each.flatten() for each in found])
    return float(difference.abs().amax()), adapter.rounding_of(expected)


def _lower(adapter: TransformersModel, names: list[str]) -> None:
    """Let the copy of the model change at LOWERED tokens what it changes at the lengths of these names, in its configs
    and modules. Nothing sets them back: the adapter is for a comparison, not for texts."""
    for config in adapter._copy.newest.configs:
        rope = getattr(config, "rope_parameters", None) or {}
        for fields in (vars(config), rope, *(each for each in rope.values() if isinstance(each, dict))):
            fields.update({name: LOWERED for name in names if type(fields.get(name)) is int})
    for module in adapter.prepared.modules():
        vars(module).update({name: LOWERED for name in names if type(vars(module).get(name)) is int})
    config = adapter.prepared.config.get_text_config(decoder=True)
    adapter._windows = windows(config)
    if isinstance(adapter, RereadingModel):
        adapter.switch = config.original_max_position_embeddings


def _logits(adapter: TransformersModel, tokens: Tensor) -> Tensor:
    return adapter.prepared(input_ids=tokens, use_cache=False).logits.float()
