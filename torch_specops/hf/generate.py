"""The decoding loop behind transformers' own `generate`, through its `custom_generate` argument."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    GenerationConfig,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteriaList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.configuration_utils import GenerationMode

from ..decode import SpeculativeDecoder
from ..decode.inputs import BatchRequest, Seed
from ..decode.output import GenerationStats
from ..decode.stopping import Stopping
from ..drafts import AnyDraft, LanguageModel
from ..drafts.base import LanguageModelWrapper
from ..sampling import SamplingParams
from ..schedules import Schedule
from .handover import check_ensemble_weight, takes_all_arguments
from .model_copy import ModelCopy
from .models import EncoderDecoderModel, language_model, placed
from .stopping import read_criteria

__all__ = ["DecoderOnlyOutput", "EncoderDecoderOutput", "custom_generate"]


@dataclass
class DecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """The output for `return_dict_in_generate=True`: `sequences` and `stats`; the other fields are None."""

    stats: GenerationStats | None = None


@dataclass
class EncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """The same for an encoder-decoder model."""

    stats: GenerationStats | None = None


@takes_all_arguments
def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft_model: AnyDraft = None,
    num_draft_tokens: int = 5,
    schedule: str | Schedule = "constant",
    verify: str = "exact",
    token_streamer: Any = None,
    seed: Seed = None,
    compile: bool | str = "auto",
    inputs_tensor: Tensor | None = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> Tensor | DecoderOnlyOutput | EncoderDecoderOutput:
    """Speculative decoding behind transformers' own `generate`.

    `model.generate(..., custom_generate=torch_specops.hf.custom_generate, assistant_model=...)` returns what
    `model.generate(...)` would: with `do_sample=False` the same tokens, with `do_sample=True` tokens of the same law.
    transformers prepares the other arguments; a user passes those from `draft_model` to `compile`.

    Args:
        model: the target.
        input_ids: [B, P] int64, the prompts with their padding.
        logits_processor: temperature; top-k, top-p and min-p as `SamplingParams` takes them; suppressed tokens,
            everywhere or at the start; renormalisation; removal of invalid values, which changes nothing here.
        stopping_criteria: any. A row ends with the token at which one says so. Lengths, eos tokens, stop strings and
            times are understood; any other is called as transformers would call it: once per token, with all rows and
            without scores.
        generation_config: as `generate` prepared it.
        draft_model: a smaller model, a `LanguageModel` or a `DraftSource`; None = one token per step from the target.
            `assistant_model=` is the same.
        num_draft_tokens, schedule, verify, compile: as `SpeculativeDecoder` takes them. What was compiled is kept for
            the model's next call with the same draft and the same of these, as long as the model lives.
        token_streamer: as `SpeculativeDecoder.generate` takes its `streamer`. A streamer of transformers is passed as
            `streamer=`.
        seed: as there.
        inputs_tensor: the input of the encoder; transformers passes it.
        tokenizer: not used here; `generate` needs it for stop strings.
        model_kwargs: masks, the encoder's output, and what transformers prepared for its own loop.

    Returns:
        [B, L] int64: `input_ids`, the new tokens, then the pad token. With `return_dict_in_generate=True` an output
        with these `sequences`, and with `stats`.

    Raises:
        NotImplementedError: a generation mode other than greedy decoding and sampling, a processor other than those
            above, a filter with min_tokens_to_keep above 1, scores, logits, attentions or hidden states, an
            `assistant_tokenizer`, an `assistant_ensemble_weight` below 1.
        TypeError, ValueError: an argument that `SpeculativeDecoder` refuses; a cache, positions or other inputs of the
            model that this loop would not read.

    Example:
        >>> import torch, transformers, torch_specops
        >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> prompt = torch.tensor([[5, 6, 7, 5, 6]])
        >>> output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8,
        ...     custom_generate=torch_specops.hf.custom_generate, draft_model=torch_specops.drafts.PromptLookup())
        >>> output.shape
        torch.Size([1, 13])
    """
    _check_mode(generation_config)
    processors = _processors(logits_processor)
    stops = read_criteria(stopping_criteria)
    mask = _prompt_mask(model, input_ids, model_kwargs)
    suppresses = bool(processors.keys() & {SuppressTokensLogitsProcessor, SuppressTokensAtBeginLogitsProcessor})
    choices = {"num_draft_tokens": num_draft_tokens, "schedule": schedule, "verify": verify, "compile": compile}
    kept = _kept_decoder(model, draft_model, suppresses, choices)
    target: Any = kept.decoder.target
    if suppresses:
        target.suppress(input_ids, mask, processors)
        target = target.model
    inputs = None
    if isinstance(target, EncoderDecoderModel):
        target.encoder_outputs, inputs = _encoder_inputs(model, input_ids, inputs_tensor, model_kwargs)
    pad = getattr(generation_config, "_pad_token_tensor", None)
    pad_token_id = 0 if pad is None else int(pad)
    stopping = None
    if stops.row_rules or stops.batch_rules:
        stopping = Stopping(
            input_ids.tolist(), stops.row_rules, stops.batch_rules, pad_token_id=pad_token_id, device=input_ids.device
        )
    request = BatchRequest(
        input_ids,
        attention_mask=mask,
        # transformers emits one token even if the prompt has max_length tokens already.
        max_new_tokens=max(stops.max_length - input_ids.shape[1], 1),
        sampling=_sampling(generation_config, processors),
        seed=seed,
        # transformers minds no eos that the model cannot emit.
        eos_token_id=[token for token in stops.eos_token_ids if token < target.vocab_size],
        pad_token_id=pad_token_id,
        inputs=inputs,
        stopping=stopping,
    )
    output = kept.decoder.run(request, token_streamer)
    # An eager decoder has nothing to keep but caches.
    if kept.decoder.compiled:
        _kept[model] = kept
    new = [torch.tensor(output.new_tokens(row), dtype=torch.int64) for row in range(len(input_ids))]
    sequences = torch.cat([input_ids, pad_sequence(new, True, pad_token_id).to(input_ids.device)], 1)
    if not generation_config.return_dict_in_generate:
        return sequences
    kind = EncoderDecoderOutput if model.config.is_encoder_decoder else DecoderOnlyOutput
    return kind(sequences=sequences, stats=output.stats)


class _Suppressing(LanguageModelWrapper):
    """A target that never emits some tokens, and some others never as the first new token."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self._never = torch.zeros(model.vocab_size, dtype=torch.bool, device=model.device)
        self._never_first = torch.zeros_like(self._never)
        self._first = torch.zeros(0, dtype=torch.int64, device=model.device)

    def suppress(self, input_ids: Tensor, mask: Tensor | None, processors: Mapping[type, Any]) -> None:
        """Read the processors of a call. The tensors keep their addresses, which CUDA graphs know."""
        tokens = torch.arange(self.vocab_size, device=self.device)
        never = processors.get(SuppressTokensLogitsProcessor)
        never_first = processors.get(SuppressTokensAtBeginLogitsProcessor)
        for suppressed, listed in (
            (self._never, None if never is None else never.suppress_tokens),
            (self._never_first, None if never_first is None else never_first.begin_suppress_tokens),
        ):
            suppressed.zero_() if listed is None else suppressed.copy_(torch.isin(tokens, listed.to(self.device)))
        # Where the first new token of each row stands: at its own length, without padding.
        padding = torch.zeros_like(input_ids[:, 0]) if mask is None else (mask == 0).sum(1)
        first = torch.full_like(padding, -1) if never_first is None else never_first.begin_index - padding
        self._first = placed(self._first, first.to(self.device))

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        logits = self.model.forward(tokens, positions, num_logits)
        is_first = positions[:, -logits.shape[1] :] + 1 == self._first.unsqueeze(1)
        return logits.masked_fill(self._never | (is_first.unsqueeze(2) & self._never_first), -torch.inf)

    def static_tensors(self) -> Sequence[Tensor] | None:
        tensors = super().static_tensors()
        return None if tensors is None else [*tensors, self._never, self._never_first, self._first]


@dataclass(frozen=True)
class _Kept:
    """A decoder, what it was made for, and what makes the model that it reads."""

    made_for: tuple[Any, ...]
    copy: ModelCopy
    decoder: SpeculativeDecoder


# The compiled decoder of each model. It reads a copy of the model, so that an entry does not keep its own key alive.
_kept: WeakKeyDictionary[PreTrainedModel, _Kept] = WeakKeyDictionary()


def _kept_decoder(
    model: PreTrainedModel,
    draft_model: AnyDraft,
    suppresses: bool,
    choices: dict[str, Any],
) -> _Kept:
    draft_is_model = draft_model is model
    # A graph of another device or dtype cannot be used again.
    made_for = (
        *(None if draft_is_model else draft_model, draft_is_model, suppresses, choices),
        *(model.device, model.dtype, model.config._attn_implementation),
    )
    kept = _kept.get(model)
    # Taken out while it is in use: a call from another thread makes its own.
    if kept is not None and kept.made_for == made_for and _kept.pop(model, None) is kept:
        kept.copy.of(model)
        return kept
    copy = ModelCopy()
    own = copy.of(model)
    target: LanguageModel = language_model(own)
    if suppresses:
        target = _Suppressing(target)
    decoder = SpeculativeDecoder(target, own if draft_is_model else draft_model, **choices)
    return _Kept(made_for, copy, decoder)


def _check_mode(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise NotImplementedError(f"generation_config: expected greedy decoding or sampling, got {mode.value}")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise NotImplementedError(f"{name}: expected False, sequences and statistics are the only outputs")
    check_ensemble_weight(getattr(config, "assistant_ensemble_weight", None))


# Processors that are understood, and their order: filters in another order keep other tokens.
_PROCESSORS: dict[type, int] = {
    # It changes logits that are not finite, whose meaning here is fixed (docs/law.md).
    InfNanRemoveLogitsProcessor: 0,
    SuppressTokensLogitsProcessor: 0,
    SuppressTokensAtBeginLogitsProcessor: 0,
    TemperatureLogitsWarper: 1,
    TopKLogitsWarper: 2,
    TopPLogitsWarper: 3,
    MinPLogitsWarper: 4,
    LogitNormalization: 5,
}


def _processors(processors: LogitsProcessorList) -> dict[type, Any]:
    known: dict[type, Any] = {}
    last = 0
    for processor in processors:
        kind = type(processor)
        # Not isinstance: a subclass may do anything.
        if kind not in _PROCESSORS:
            raise NotImplementedError(
                f"logits_processor: {kind.__name__} may depend on the text so far, or is not known here"
            )
        if kind in known or _PROCESSORS[kind] < last:
            raise NotImplementedError(
                f"logits_processor: expected each kind once and in transformers' order, got {kind.__name__} "
                f"after {', '.join(earlier.__name__ for earlier in known)}"
            )
        known[kind], last = processor, _PROCESSORS[kind]
    return known


def _sampling(config: GenerationConfig, processors: Mapping[type, Any]) -> SamplingParams:
    if not config.do_sample:
        # The processors that are understood, but for suppressed tokens, do not change the argmax.
        return SamplingParams(temperature=0.0)
    values: dict[str, Any] = {}
    for kind, processor in processors.items():
        kept, value = getattr(processor, "min_tokens_to_keep", 1), getattr(processor, "filter_value", -math.inf)
        if kept != 1 or value != -math.inf:
            raise NotImplementedError(
                f"logits_processor: expected {kind.__name__} to keep 1 token at least and to set the others to -inf, "
                f"got {kept} and {value}"
            )
        for name in ("temperature", "top_k", "top_p", "min_p"):
            if hasattr(processor, name):
                values[name] = getattr(processor, name)
    return SamplingParams(**values)


# What transformers prepares for its own loop. Ours has its own cache and needs none of it.
_PREPARED = frozenset(["cache_position", "encoder_outputs", "logits_to_keep", "past_key_values", "use_cache"])


def _prompt_mask(model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> Tensor | None:
    """The mask of the prompts. Refuses inputs of the model that this loop would leave out."""
    if getattr(model_kwargs.get("past_key_values"), "_is_user_defined", False):
        raise ValueError("past_key_values: the loop has a cache of its own and would neither read nor fill this one")
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    read = {"attention_mask", f"{prefix}attention_mask", f"{prefix}position_ids"}
    for name, value in model_kwargs.items():
        if name not in read | _PREPARED and value is not None and value is not False:
            raise ValueError(f"{name}: this loop does not pass it to the model")
    mask = model_kwargs.get(f"{prefix}attention_mask")
    positions = model_kwargs.get(f"{prefix}position_ids")
    if positions is not None:
        is_token = torch.ones_like(input_ids) if mask is None else mask.long()
        if bool(((positions != is_token.cumsum(1) - 1) & (is_token != 0)).any()):
            raise ValueError(f"{prefix}position_ids: expected each row's tokens counted from 0, got others")
    return mask


def _encoder_inputs(
    model: PreTrainedModel, input_ids: Tensor, inputs_tensor: Tensor | None, model_kwargs: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the target's encoder, and its input, which a draft with its own encoder reads."""
    inputs = {}
    # transformers fills in tokens of -100 where the encoder's output was given instead of its input.
    if inputs_tensor is not None and not bool((inputs_tensor == -100).all()):
        copies = input_ids.shape[0] // inputs_tensor.shape[0]
        inputs[model.main_input_name] = inputs_tensor.repeat_interleave(copies, 0)
    if model_kwargs.get("attention_mask") is not None:
        inputs["attention_mask"] = model_kwargs["attention_mask"]
    return model_kwargs["encoder_outputs"][0], inputs
