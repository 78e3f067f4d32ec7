"""Chooses the adapter of a transformers model, and checks a model of an untested family at its first use."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..ops.attention import DTYPES
from .architecture import Reading, architecture_key, unwrapped, windows
from .encoder_decoder import EncoderDecoderModel
from .gemma4_assistant import is_gemma4_assistant
from .hybrid import HybridModel
from .images import HybridImageModel, ImageTextModel, reads_images
from .invariant import refuse_family
from .models import TESTED_FAMILIES, TransformersModel
from .references import are_same, is_foreign
from .rereading import OTHER_ROTARY, RereadingModel
from .rotary import rereads_at
from .states import state_modules

# Slots of the check's cache. Some models hard-code a window (256 tokens in GPT-Neo), and the cache must exceed this
# window.
CAPACITY = 512
# Config fields that give the sequence length at which a model changes its attention window or its rotary embedding.
THRESHOLDS = (
    *("attention_chunk_size", "index_topk", "local_attention", "original_max_position_embeddings", "sliding_window"),
    *("sliding_window_size", "window_size"),
)
# The check lowers the lengths in THRESHOLDS to this many tokens, so that a short sequence crosses them.
LOWERED = 4

# The architectures that passed the check.
_passed: dict[Hashable, Reading] = {}


def language_model(model: PreTrainedModel | nn.Module, *, invariant: bool = False) -> TransformersModel:
    """The adapter that reads ragged rows with an unmodified transformers model.

    Args:
        model: a `PreTrainedModel` with a language head, all on one device, or a `PeftModel` around one, which is read
            with its active adapter.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: the model cannot be rolled back (states outside of transformers' cache, indexed attention), has no
            language head, or is offloaded or on several devices; its attention implementation takes no mask; a
            `forward` set on one of its modules may run modules in training mode; it is a Gemma 4 assistant, or an
            encoder-decoder model other than Whisper and T5; or the model's family is untested, and the model does not
            take a cache and masks, or gives other logits with a cache and masks than without; or `invariant` is True,
            and something in the model may depend on what is read with a token.
    """
    model = unwrapped(model)
    if invariant:
        refuse_family(model)
        return TransformersModel(model, check=_Check(), invariant=True)
    if is_gemma4_assistant(model):
        raise ValueError("model: a Gemma 4 assistant reads its target's keys; expected drafts.Gemma4Assistant(model)")
    if model.config.is_encoder_decoder:
        # Check the outermost model, because a wrapper may read its inputs differently from the model inside.
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
    """Checks a model when it is first used, and again when its architecture or the user's code in it changes: a class,
    or a `forward` set on a module."""

    def __init__(self) -> None:
        # The architecture, the user's code and the result of the last check of a model with such code.
        self._architecture: Hashable = None
        self._own: list[Any] = []
        self._reading: Reading | None = None

    def __reduce__(self) -> tuple[type[_Check], tuple[()]]:
        # Pickle nothing: the results may hold code that the user has removed since.
        return _Check, ()

    def __call__(self, adapter: TransformersModel) -> Reading | None:
        """How to read the model; None = as the tests read its family."""
        model = adapter.model
        if (rereads_at(model) is not None) != isinstance(adapter, RereadingModel):
            raise ValueError(OTHER_ROTARY)
        # Find the user's own code: with such code, even a model of a tested family is checked.
        own = [vars(module).get("forward", type(module)) for module in model.modules()]
        own = [each for each in own if not isinstance(each, type) or is_foreign(each)]
        if not own:
            # Drop references to removed code.
            self._own = []
            if model.config.model_type in TESTED_FAMILIES:
                return None
            if (architecture := architecture_key(model)) not in _passed:
                _passed[architecture] = _check(adapter)
            return _passed[architecture]
        architecture = architecture_key(model)
        if architecture != self._architecture or not are_same(own, self._own):
            self._reading = _check(adapter)
            self._architecture, self._own = architecture, own
        return self._reading


# The user's code may keep tensors that it gets, so they must be normal tensors.
@torch.inference_mode(False)
@torch.no_grad()
def _check(adapter: TransformersModel) -> Reading:
    """Compare the logits of reads through the cache, a rollback included, with those of a forward without a cache. The
    lengths at which the model changes (THRESHOLDS) are lowered, so that a few tokens cross them.

    Returns how to read the model. If only reads beyond one of these lengths are wrong, the returned `max_length` is
    that length.

    Raises:
        ValueError: the logits differ even below these lengths, or the model does not take a cache and masks.
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
    """Whether attention may get spans of slots and packed rows, and the reason why reads with a mask are wrong; None =
    they are right."""
    attention = adapter.model.config.get_text_config(decoder=True)._attn_implementation
    supports_spans = False
    if attention == "sdpa" and adapter.dtype in DTYPES:
        # A model with its own attention code misreads spans as a mask: it raises, or its logits differ.
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
    """The largest difference between the logits of reads through the loop's cache and those of transformers, and the
    largest difference that rounding explains."""
    reading = Reading(supports_spans, adapter.max_length, adapter.limited_by)
    # Use another adapter, because `_lower` changes the configs of an adapter's copy.
    adapter = type(adapter)(adapter.model, check=lambda adapter: reading)
    device = adapter.device
    # The tokens are 0, 5, 3, 1, ..., and repeat after seven, as tokens of real sequences do.
    count = min(12, adapter.max_length or 12)
    tokens = (torch.arange(count, device=device) * 5 % 7).unsqueeze(0) % adapter.vocab_size
    capacity = min(CAPACITY, adapter.max_length or CAPACITY)
    adapter.expect(count)
    adapter.start(2, capacity)
    _lower(adapter, lowered)
    adapter.begin_texts(torch.full((2,), 1 if isinstance(adapter, HybridModel) else count, device=device))
    # In some families with states, decode steps give other logits than a prefill of the same tokens.
    expected = adapter.decoded(tokens).float() if isinstance(adapter, HybridModel) else _logits(adapter, tokens)
    if isinstance(adapter, RereadingModel) and adapter.switch < count:
        expected = torch.cat([_logits(adapter, tokens[:, : adapter.switch]), expected[:, adapter.switch :]], 1)
    index = torch.arange(count - 3, device=device).expand(2, -1)
    positions = torch.tensor([[3], [1]], device=device) + index
    # Read a prompt of one token, which is never rolled back, then two draft tokens.
    for begin in (index[:, :1], index[:, 1:3]):
        adapter.read(tokens[0, begin], begin, use_spans)
    adapter.read(tokens.flip(1)[0, positions], positions, use_spans)
    tokens, wanted = tokens[0, positions], expected[0, positions]
    # Compare with both values of `width`: None, as in eager steps, and the capacity, as in compiled steps.
    found = [adapter.read(tokens, positions, use_spans, width=width) - wanted for width in (None, capacity)]
    if use_spans and adapter.packs_rows:
        is_read = index < torch.tensor([[2], [count]], device=device)
        found.append(adapter.forward_packed(tokens, positions, is_read) - wanted[is_read])
    difference = torch.cat([each.flatten() for each in found])
    return float(difference.abs().amax()), adapter.rounding_of(expected)


def _lower(adapter: TransformersModel, names: list[str]) -> None:
    """Set the fields with these names to LOWERED, in the configs and modules of the adapter's copy of the model.
    Nothing restores them, because the adapter is used for one comparison only."""
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
