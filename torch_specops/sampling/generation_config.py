"""Reads the fields of a transformers `GenerationConfig` that change the output's distribution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Fields that change the distribution and have no counterpart in `SamplingParams`. Each maps to the value that, like
# None, has no effect.
ALWAYS_READ: dict[str, Any] = {
    "assistant_ensemble_weight": 1.0,
    "begin_suppress_tokens": None,
    "constraints": None,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "token_healing": False,
    "watermarking_config": None,
}
# More fields of this kind, which transformers reads only if it samples.
READ_IF_SAMPLED: dict[str, Any] = {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None, "typical_p": 1.0}
# Fields with a counterpart in `SamplingParams`, and transformers' defaults. None in a config means the default.
TAKEN: dict[str, Any] = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0}
TAKEN_IF_SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}


def values_of(config: Any) -> dict[str, Any]:
    """The fields of `SamplingParams` by name; arguments and errors as in `SamplingParams.from_generation_config`."""
    if not hasattr(config, "do_sample"):
        raise TypeError(f"config: expected a GenerationConfig of transformers, got {type(config)}")
    read = ALWAYS_READ | (READ_IF_SAMPLED if config.do_sample else {})
    values = {name: getattr(config, name, None) for name in read}
    others = [f"{name} = {value!r}" for name, value in values.items() if value not in (None, [], read[name])]
    # `bad_words_ids`, `sequence_bias` and `suppress_tokens` become biases and bad words where possible.
    pairs = getattr(config, "sequence_bias", None) or ()
    sequences = {tuple(key): value for key, value in (pairs.items() if isinstance(pairs, Mapping) else pairs)}
    biases = {key[0]: value for key, value in sequences.items() if len(key) == 1}
    longer = {key: value for key, value in sequences.items() if len(key) > 1}
    others += [f"sequence_bias {key}: {value!r}" for key, value in longer.items() if value != -math.inf]
    if others:
        raise ValueError(f"config: SamplingParams has no {', no '.join(others)}")
    # Skip negative tokens, as transformers does: some configs contain -1.
    biases |= {token: -math.inf for token in getattr(config, "suppress_tokens", None) or () if token >= 0}
    defaults = TAKEN | (TAKEN_IF_SAMPLED if config.do_sample else {})
    configured = {name: getattr(config, name, None) for name in defaults}
    taken = {name: defaults[name] if value is None else value for name, value in configured.items()}
    if not config.do_sample:
        taken["temperature"] = 0.0
    words = (*(getattr(config, "bad_words_ids", None) or ()), *(list(key) for key in longer))
    return taken | {"logit_bias": biases or None, "bad_words": words}
