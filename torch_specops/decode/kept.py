"""The function `generate`, and the decoders that calls of a transformers model keep for its next call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..drafts import MTP, AnyDraft, DFlash, DraftSource, EarlyExit, Gemma4Assistant, PromptLookup
from ..models.base import LanguageModel
from ..models.conversion import new_shadow
from ..schedules import Schedule
from .decoder import SpeculativeDecoder
from .inputs import AnyGrammar, AttentionMask, EosTokenIds, PromptIds, Sampling, Seed, StopStrings
from .keywords import refuse_unknown
from .output import GenerationOutput, Streamer
from .step import Verifier


def generate(
    target: LanguageModel | nn.Module,
    input_ids: PromptIds,
    *,
    draft: AnyDraft = None,
    num_draft_tokens: int | None = None,
    schedule: str | Schedule | None = None,
    verify: str | Verifier | None = None,
    compile: bool | str = "auto",
    invariant: bool = False,
    streamer: Streamer | None = None,
    progress: bool = False,
    attention_mask: AttentionMask = None,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: Sampling = None,
    seed: Seed = None,
    eos_token_id: EosTokenIds = None,
    pad_token_id: int | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    logprobs: str | None = None,
    top_logprobs: int = 0,
    num_return_sequences: int = 1,
    stop_strings: StopStrings = None,
    tokenizer: Any = None,
    grammar: AnyGrammar = None,
    **unknown: NoReturn,
) -> GenerationOutput:
    """Continue prompts with a target model, faster if there is a draft. The output has exactly the target's
    distribution.

    The function makes a `SpeculativeDecoder`. If this compiled or captured its steps, a transformers model's next call
    with the same draft and options uses it again (docs/gpu.md, "What is kept"). Other calls begin anew, so for many
    batches use `SpeculativeDecoder`.

    Arguments, result and errors are those of `SpeculativeDecoder` and its method `generate`. Only the eos and pad
    tokens of a transformers model's generation config are used; `SamplingParams.from_generation_config` takes the
    temperature, filters and penalties of that config. Beam search is `torch_specops.beam.beam_search`. After an
    interrupt the tokens so far are lost; `SpeculativeDecoder.output` would still return them.

    Examples:
        >>> import torch, transformers, torch_specops
        >>> config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, eos_token_id=None)
        >>> target = transformers.GPT2LMHeadModel(config).eval()
        >>> prompts = torch.tensor([[5, 6, 7, 5, 6], [0, 0, 9, 8, 9]])
        >>> mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
        >>> output = torch_specops.generate(target, prompts, attention_mask=mask, max_new_tokens=[8, 4], seed=0,
        ...     draft=torch_specops.drafts.PromptLookup(), sampling=torch_specops.SamplingParams(temperature=0.0))
        >>> output.lengths
        tensor([13,  7])
    """
    refuse_unknown("generate", unknown)
    with decoder_of(
        target,
        draft,
        num_draft_tokens=num_draft_tokens,
        schedule=schedule,
        verify=verify,
        compile=compile,
        invariant=invariant,
    ) as decoder:
        return decoder.generate(
            input_ids,
            streamer=streamer,
            progress=progress,
            attention_mask=attention_mask,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            inputs=inputs,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            num_return_sequences=num_return_sequences,
            stop_strings=stop_strings,
            tokenizer=tokenizer,
            grammar=grammar,
        )


class _Kept(NamedTuple):
    """A decoder, what it was made for, and the `ShadowModel` whose copy of the model it runs."""

    made_for: tuple[Any, ...]
    shadow: Any
    decoder: SpeculativeDecoder


# Model -> its newest decoder with compiled or captured steps. A freed model frees its decoder, because the dict holds
# its keys weakly. The decoder runs a copy of the model: one that refers to the model itself would keep it alive.
_kept: WeakKeyDictionary[nn.Module, _Kept] = WeakKeyDictionary()

# Values of these types are compared by value, all others by identity: a decoder holds an object and sees its changes.
_BY_VALUE = {bool, int, float, str, tuple, torch.device, torch.dtype, PromptLookup, Verifier}
# Drafts that callers make anew for each call, and which then keep nothing but what is compared here.
_REMADE: dict[type, Callable[[Any], Any]] = {
    EarlyExit: attrgetter("num_layers"),
    MTP: attrgetter("head"),
    DFlash: attrgetter("head", "confidence"),
    Gemma4Assistant: attrgetter("model.model"),
}


@contextmanager
def decoder_of(
    target: LanguageModel | nn.Module, draft: AnyDraft, *, not_compiled: str | None = None, **options: Any
) -> Iterator[SpeculativeDecoder]:
    """A decoder for one call: the one that the model's newest call has kept, or a new one.

    It is kept if its steps are compiled or captured and the call raises nothing. While a call uses it, other calls make
    their own.

    Args:
        target: as in `SpeculativeDecoder`. The decoder of a `LanguageModel` is not kept, because it refers to it.
        draft: as in `SpeculativeDecoder`. A decoder is used again for the same object, not for an equal one.
        not_compiled: the caller's reason not to compile.
        options: `num_draft_tokens`, `schedule`, `verify`, `compile` and `invariant` of `SpeculativeDecoder`.
    """
    compile, found = options["compile"], None
    if not_compiled is None and (compile is True or compile == "auto"):
        found = new_shadow(target)
    if found is None or (compile == "auto" and found[0].device.type != "cuda"):
        decoder = SpeculativeDecoder(target, draft, **options)
        if not_compiled is not None:
            decoder.target.eager_because = not_compiled  # type: ignore[attr-defined]
        yield decoder
        return
    model, shadow = found
    is_itself = draft is target or draft is model
    # A captured matrix product keeps its precision.
    reading = model.device, model.dtype, torch.backends.cuda.matmul.fp32_precision
    choices = (options[name] for name in sorted(options))
    made_for = (*reading, is_itself, *_settings_of(None if is_itself else draft), *choices)
    # Take the decoder out while it is in use. One for other settings is freed before the new one takes memory.
    kept = _kept.pop(model, None)
    if kept is not None and not _are_same(kept.made_for, made_for):
        kept = None
    shadow = shadow if kept is None else kept.shadow
    version, copied = shadow.version, shadow.of(model)
    if kept is None:
        kept = _Kept(made_for, shadow, SpeculativeDecoder(copied, copied if is_itself else draft, **options))
    decoder = kept.decoder
    keeps_model = version != shadow.version and shadow.is_reached(model, decoder.target, decoder.draft, made_for)
    yield decoder
    decoder.forget_call()
    if decoder.compiled and not keeps_model:
        _kept[model] = kept


def _settings_of(draft: AnyDraft) -> tuple[Any, ...]:
    """What a decoder of this draft is made for."""
    own = _REMADE[type(draft)](draft) if type(draft) in _REMADE else draft
    if not isinstance(draft, DraftSource):
        return type(draft), own
    return type(draft), own, draft.default_draft_tokens, draft.max_draft_tokens, draft.deterministic


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(
        one is other or (type(one) is type(other) and type(one) in _BY_VALUE and one == other)
        for one, other in zip(some, others, strict=True)
    )
