"""Speculative decoding through transformers' `generate` and its `custom_generate` argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.generation import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode

from ...decode import Verifier
from ...decode.inputs import AnyGrammar, GenerateArguments, Seed
from ...decode.kept import decoder_of
from ...decode.rows import BatchRules
from ...drafts import MTP, AnyDraft, DFlash, EarlyExit, Gemma4Assistant, PromptLookup
from ...drafts.dflash_files import read_drafter
from ...schedules import Schedule
from ..architecture import ranks_of
from ..cache import CACHE_NAMES
from ..encoder_decoder import EncoderDecoderModel
from ..gemma4_assistant import is_gemma4_assistant
from ..mtp import read_mtp_head
from .assistant_settings import read_assistant_settings
from .grammars import take_grammars
from .outputs import DecoderOnlyOutput, EncoderDecoderOutput, Predictions
from .patch import hand_on_arguments
from .processors import read_processors
from .stopping import read_criteria


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft_model: AnyDraft = None,
    num_draft_tokens: int | None = None,
    schedule: str | Schedule | None = None,
    verify: str | Verifier | None = None,
    token_streamer: Any = None,
    seed: Seed = None,
    compile: bool | str = "auto",
    invariant: bool = False,
    inputs_tensor: Tensor | None = None,
    tokenizer: Any = None,
    grammar: AnyGrammar = None,
    has_mask: bool = False,
    image_inputs: Mapping[str, Tensor] | None = None,
    num_assistant_tokens: int | None = None,
    num_assistant_tokens_schedule: str | None = None,
    assistant_confidence_threshold: float | None = None,
    **model_kwargs: Any,
) -> Tensor | DecoderOnlyOutput | EncoderDecoderOutput:
    """Speculative decoding through transformers' `generate`.

    `model.generate(..., custom_generate=torch_specops.hf.custom_generate, assistant_model=...)` returns what
    `model.generate(...)` would: with `do_sample=False` the same tokens, with `do_sample=True` tokens from the same
    distribution. Users pass the arguments from `draft_model` to `invariant`, `grammar`, and the three that contain
    "assistant" in their names. transformers passes all others.

    Args:
        model: the target.
        input_ids: [B, P] int64, the prompts with their padding.
        logits_processor: any processors. With a draft, they must not depend on earlier calls. Most processors are
            converted to `SamplingParams`. If a processor has no equivalent in `SamplingParams`, this processor and
            others are called as transformers would call them, and the steps are not compiled.
        stopping_criteria: any criteria. A row ends with the token for which a criterion returns True. Criteria other
            than lengths, eos tokens, stop strings and times are called as transformers would call them: once per token,
            with all rows, and with scores if requested.
        generation_config: the config that `generate` prepared.
        draft_model: a smaller model, a `LanguageModel` or a `DraftSource`; None = one token per step from the target.
            `assistant_model=` means the same. `prompt_lookup_num_tokens=`, `assistant_early_exit=` and `use_mtp=True`
            select a draft as in transformers. With `speculation_type="dflash"`, the draft model must be a DFlash
            drafter of transformers or a `DFlash`. MTP layers and DFlash drafters are loaded once per model. A Gemma 4
            assistant of transformers becomes a `Gemma4Assistant`.
        num_draft_tokens, schedule, verify, compile, invariant: arguments of `SpeculativeDecoder`. The next call of the
            same model with the same draft and the same values reuses the compiled code. If the first two are None,
            `num_assistant_tokens` and `num_assistant_tokens_schedule` set them. If those are None too, the number
            defaults to the draft's default, and the schedule to "auto" for drafts that are not sampled, else to
            "constant".
        num_assistant_tokens, num_assistant_tokens_schedule: transformers' names for `num_draft_tokens` and `schedule`.
            The schedules "heuristic" and "heuristic_transient" both start again in each call. None = the value in
            `generation_config` if it is not transformers' default (20, "constant"), else the value in the generation
            config of the draft model.
        assistant_confidence_threshold: 0 or None.
        token_streamer: the `streamer` of `SpeculativeDecoder.generate`. Pass a transformers streamer as `streamer=`.
        seed, grammar: arguments of `SpeculativeDecoder.generate`. A logits processor of xgrammar, or of outlines with
            xgrammar or llguidance, is converted to a grammar unless it has been called before.
        tokenizer: the tokenizer that decodes text for stop strings.
        has_mask: True = the caller passed an attention mask.
        image_inputs: the images of the prompts.
        inputs_tensor: the encoder's input.
        model_kwargs: masks, the encoder's output and other inputs for transformers' loop.

    Returns:
        [B, L] int64: `input_ids`, the new tokens, then the pad token. With `return_dict_in_generate=True` an output
        object with these `sequences` and with `stats`. The object also has `scores` and `logits` if the config requests
        them. As in transformers, both hold one [B, V] float32 tensor per new token: logits before processors, scores
        after processors. Rows that have ended contain NaN. Scores and logits take B x L x V x 4 bytes each, and steps
        that keep them are not compiled.

    Raises:
        NotImplementedError: an unsupported argument. These are a generation mode other than greedy decoding, sampling
            and their assisted forms; a `speculation_type` other than "dflash"; attentions or hidden states as outputs;
            an `assistant_tokenizer`; an `assistant_ensemble_weight` below 1; an `assistant_confidence_threshold` above
            0 with a draft model; PEFT's `adapter_names`; and `output_scores` with `grammar`. With a draft or
            `output_scores`, also raised for a processor that depends on earlier calls (classifier-free guidance,
            SynthID, other grammars) or that raises in a later call.
        TypeError, ValueError: `SpeculativeDecoder` refuses an argument, an argument is given under two names, or the
            caller passes a cache, positions or other model inputs that this loop would ignore.

    Examples:
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
    draft_model = _read_draft(model, generation_config, draft_model)
    num_draft_tokens, schedule = read_assistant_settings(
        generation_config,
        draft_model,
        num_draft_tokens,
        schedule,
        num_assistant_tokens=num_assistant_tokens,
        num_assistant_tokens_schedule=num_assistant_tokens_schedule,
        assistant_confidence_threshold=assistant_confidence_threshold,
    )
    # Convert only now, because the settings were read from the assistant's own generation config.
    if is_gemma4_assistant(draft_model):
        draft_model = Gemma4Assistant(draft_model)
    if grammar is not None and generation_config.output_scores:
        raise NotImplementedError("grammar: scores come from logits_processor alone; expected output_scores=False")
    own_processors, grammar = take_grammars(logits_processor, grammar, len(input_ids))
    keeps_logits = generation_config.output_scores or generation_config.output_logits
    keeps_logits = keeps_logits and generation_config.return_dict_in_generate
    predictions = Predictions(logits_processor, input_ids, generation_config) if keeps_logits else None
    stops = read_criteria(stopping_criteria, tokenizer, predictions)
    mask = _prompt_mask(model, input_ids, has_mask, model_kwargs)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    sampling = read_processors(own_processors, input_ids, mask, generation_config, vocab_size, draft_model)
    if generation_config.max_time is not None and ranks_of(model) is not None:
        raise ValueError("max_time: expected None, because the clocks of a sharded target's ranks differ")
    inputs, encoded = image_inputs or None, None
    # transformers repeats each prompt `num_return_sequences` times, but not its images. Pass each prompt once, because
    # the loop repeats prompts and images itself.
    copies = max(generation_config.num_return_sequences or 1, 1) if image_inputs else 1
    if model.config.is_encoder_decoder:
        encoded, inputs = _encoder_inputs(model, input_ids, inputs_tensor, model_kwargs)
    arguments = GenerateArguments(
        attention_mask=None if mask is None else mask[::copies],
        # Like transformers, emit one token even if the prompt already has max_length tokens.
        max_new_tokens=max(min(stops.lengths) - input_ids.shape[1], 1),
        sampling=sampling,
        seed=seed,
        # Like transformers, ignore eos tokens outside the vocabulary.
        eos_token_id=[token for token in stops.eos_token_ids if token < vocab_size],
        pad_token_id=sampling.pad_token_id,
        inputs=inputs,
        num_return_sequences=copies,
        stop_strings=stops.stop_strings,
        tokenizer=tokenizer,
        grammar=grammar,
    )
    batch_rules = BatchRules(stops.batch_rules, input_ids, sampling.pad_token_id) if stops.batch_rules else None
    eager = sampling.not_compiled or (None if predictions is None else "scores and logits are kept")
    options: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "schedule": schedule, "verify": verify}
    options |= {"compile": compile, "invariant": invariant}
    with decoder_of(model, draft_model, not_compiled=eager, **options) as decoder:
        target, rules = decoder.target, (stops.row_rules, batch_rules)
        if isinstance(target, EncoderDecoderModel):
            target.encoder_outputs = encoded
        output = decoder.run(input_ids[::copies], arguments, token_streamer, *rules, predictions)
        # The next call of this decoder may have inputs of its own.
        if isinstance(target, EncoderDecoderModel):
            target.encoder_outputs = None
    new = [input_ids.new_tensor(output.new_tokens(row)) for row in range(len(input_ids))]
    sequences = torch.cat([input_ids, pad_sequence(new, True, sampling.pad_token_id)], 1)
    if not generation_config.return_dict_in_generate:
        return sequences
    kind = EncoderDecoderOutput if model.config.is_encoder_decoder else DecoderOnlyOutput
    fields = {} if predictions is None else predictions.fields(sequences, output.lengths - output.prompt_lengths)
    return kind(sequences=sequences, stats=output.stats, **fields)


hand_on_arguments(GenerationMixin, custom_generate)


# For each model and kind of draft (`MTP` or `DFlash`): the settings that the draft network was loaded for, and the
# network.
_heads: WeakKeyDictionary[PreTrainedModel, dict[type, tuple[tuple[Any, ...], Any]]] = WeakKeyDictionary()


def _head_draft(model: PreTrainedModel, drafter: PreTrainedModel | None) -> MTP | DFlash:
    """Create the draft from a DFlash drafter, or from the model's MTP layers if there is no drafter."""
    networks, kind = _heads.setdefault(model, {}), MTP if drafter is None else DFlash
    # Compare the versions of the weights, because loading other weights into the drafter increments the versions.
    versions = () if drafter is None else tuple(weight._version for weight in drafter.parameters())
    source, text = drafter or model.config.name_or_path, model.config.get_text_config()
    made_for = source, versions, model.device, model.dtype, text._attn_implementation, text.vocab_size
    if kind not in networks or networks[kind][0] != made_for:
        head: Any = read_mtp_head(model) if drafter is None else read_drafter(drafter, model.device, model.dtype)
        networks[kind] = made_for, head
    return kind(networks[kind][1])


def _read_draft(model: PreTrainedModel, config: GenerationConfig, draft_model: AnyDraft) -> AnyDraft:
    """Return the draft that a call requests. Raises for generation modes and drafts that this loop does not support."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION):
        advice = " (num_beams: use torch_specops.beam.beam_search)" if config.num_beams not in (None, 1) else ""
        raise NotImplementedError(f"generation_config: expected greedy decoding or sampling, got {mode.value}{advice}")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise NotImplementedError(f"{name}: expected False, because a step does not keep them")
    if (kind := getattr(config, "speculation_type", None)) not in (None, "dflash"):
        raise NotImplementedError(f"speculation_type: expected None or 'dflash', got {kind!r}")
    if kind is not None:
        draft_model = getattr(draft_model, "_orig_mod", draft_model)
        if not isinstance(draft_model, DFlash | PreTrainedModel):
            kinds = "a DFlash drafter of transformers or ours"
            raise TypeError(f"assistant_model: expected {kinds}, got {type(draft_model)}")
    drafts = ["draft_model"] if draft_model is not None else []
    others = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
    drafts += [name for name in others if getattr(config, name, None) not in (None, False)]
    if len(drafts) > 1:
        raise ValueError(f"{drafts[1]}: expected None beside {drafts[0]}, got {getattr(config, drafts[1])}")
    check_ensemble_weight(getattr(config, "assistant_ensemble_weight", None))
    if config.prompt_lookup_num_tokens is not None:
        return PromptLookup(config.max_matching_ngram_size or 2, 1, repeat=False)
    if config.assistant_early_exit is not None:
        return EarlyExit(config.assistant_early_exit)
    if getattr(config, "use_mtp", None):
        return _head_draft(model, None)
    if kind is not None and isinstance(draft_model, PreTrainedModel):
        return _head_draft(model, draft_model)
    return draft_model


def check_ensemble_weight(weight: float | None) -> None:
    # A weight of 1 verifies against the target alone, as this loop does.
    if weight not in (None, 1.0):
        raise NotImplementedError(
            f"assistant_ensemble_weight: verifying against a mixture is another law, got {weight}"
        )


# Arguments that transformers prepares for its own loop. `_prompt_mask` lets them pass: our loop has its own cache, and
# reads only `encoder_outputs`.
_PREPARED = {*CACHE_NAMES, "use_cache", "cache_position", "encoder_outputs", "logits_to_keep", "mm_encoder_outputs"}


def _prompt_mask(
    model: PreTrainedModel, input_ids: Tensor, has_mask: bool, model_kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Return the attention mask of the prompts; None = not given. Raises for model inputs that this loop would
    ignore."""
    for name in CACHE_NAMES:
        if getattr(model_kwargs.get(name), "_is_user_defined", False):
            raise ValueError(f"{name}: the loop has a cache of its own and would neither read nor fill this one")
    if getattr(model.prepare_inputs_for_generation, "__self__", model) is not model:
        raise ValueError(
            "model: a wrapper (PEFT's prompt tuning) changes its inputs, and this loop would not call that"
        )
    # transformers 5.18 and later encode images and videos before this call, and pass an empty dict if there are none.
    if model_kwargs.get("mm_encoder_outputs"):
        raise ValueError(
            "mm_encoder_outputs: this loop does not pass encoded images and videos to the model; "
            "expected pixel_values, and of a model whose images it reads (docs/models.md)"
        )
    # PEFT passes `adapter_names` to its layers through forward hooks, so the names are not among the arguments here.
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    if any("adapter_names" in getattr(hook, "keywords", ()) for hook in hooks):
        raise NotImplementedError(
            "adapter_names: this loop also reads rows alone, without the names of their adapters; expected None, and a "
            "call for each adapter"
        )
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
    if mask is None or bool((mask == 1).all()):
        # Use `has_mask`, because transformers 5.17 removes a mask of ones, and creates one if the caller passed none.
        return torch.ones_like(input_ids) if has_mask else None
    return mask


def _encoder_inputs(
    model: PreTrainedModel, input_ids: Tensor, inputs_tensor: Tensor | None, model_kwargs: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the target's encoder, and the encoder inputs for a draft that has a different encoder."""
    inputs = {}
    # If the caller passed the encoder's output, transformers fills the encoder's input with -100.
    if inputs_tensor is not None and not bool((inputs_tensor == -100).all()):
        copies = input_ids.shape[0] // inputs_tensor.shape[0]
        inputs[model.main_input_name] = inputs_tensor.repeat_interleave(copies, 0)
    if model_kwargs.get("attention_mask") is not None:
        inputs["attention_mask"] = model_kwargs["attention_mask"]
    return model_kwargs["encoder_outputs"][0], inputs
