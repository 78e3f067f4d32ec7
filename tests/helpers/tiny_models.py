"""Small random models of every tested family: float64 and with sharp logits, so that no two tokens tie."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel

from torch_specops.drafts import FeatureModel, LanguageModel

VOCAB = 60
POSITIONS = 96

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_HEAD = {"head_dim": 8}
_SLIDING = {"sliding_window": 6}
_SLIDING_FIRST = _SLIDING | {"use_sliding_window": True, "max_window_layers": 1}
_SLIDING_AND_FULL = _SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}
# Gemma scales its embeddings up: tied to the head, every token would predict itself.
_UNTIED = {"tie_word_embeddings": False}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_decoder_layers": 2, "num_heads": 4}
_T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
_WHISPER = {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": POSITIONS}
_WHISPER |= {"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
_WHISPER |= {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
_START = {"decoder_start_token_id": 1}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# family -> (class prefix, model suffix, config fields)
FAMILIES: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama": ("Llama", "ForCausalLM", _GROUPED),
    "qwen2": ("Qwen2", "ForCausalLM", _GROUPED),
    "qwen2 sliding": ("Qwen2", "ForCausalLM", _GROUPED | _SLIDING_FIRST),
    "qwen3": ("Qwen3", "ForCausalLM", _GROUPED | _HEAD),
    "mistral": ("Mistral", "ForCausalLM", _GROUPED | _SLIDING),
    "gemma": ("Gemma", "ForCausalLM", _GROUPED | _HEAD | _UNTIED),
    "gemma2": ("Gemma2", "ForCausalLM", _GROUPED | _HEAD | _SLIDING | _UNTIED),
    "gemma3": ("Gemma3", "ForCausalLM", _GROUPED | _HEAD | _SLIDING_AND_FULL | _UNTIED),
    "phi": ("Phi", "ForCausalLM", _SIZES),
    "gpt2": ("GPT2", "LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}),
    "opt": ("OPT", "ForCausalLM", _SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", _SIZES),
    "whisper": ("Whisper", "ForConditionalGeneration", _WHISPER | _START),
    "t5": ("T5", "ForConditionalGeneration", _T5 | _START | {"feed_forward_proj": "gated-gelu"}),
}


def tiny(
    family: str, seed: int = 0, attention: str | None = None, vocab: int = VOCAB, **fields: object
) -> PreTrainedModel:
    """A model whose next token depends on all of its context; without an eos unless `generation_config` gets one. With
    no `attention` it has the one that transformers loads it with: "sdpa", or "eager" where a release has no other."""
    prefix, suffix, family_fields = FAMILIES[family]
    config_class = getattr(transformers, prefix + ("TextConfig" if prefix == "Gemma3" else "Config"))
    positions = {} if family in ("gpt2", "whisper", "t5") else {"max_position_embeddings": POSITIONS}
    config = config_class(**({"vocab_size": vocab} | positions | _ENDS | family_fields | fields))
    config._attn_implementation = attention
    torch.manual_seed(seed)
    model = getattr(transformers, prefix + suffix)(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms stay as they are: their weights are scales around one.
            if "relative_attention_bias" in name:
                # Otherwise T5 would repeat itself: it has no other notion of place.
                parameter.normal_(0.0, 1.2)
            elif parameter.dim() > 1:
                parameter.normal_(0.0, 0.35)
            elif "bias" in name:
                parameter.normal_(0.0, 0.1)
    model.generation_config.eos_token_id = None
    return model


def sharp_model(config: PreTrainedConfig, seed: int = 0, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """A model of any type, in float64 and without an eos, with weights that give sharp logits."""
    torch.manual_seed(seed)
    model = auto.from_config(config).double().eval()
    # The grouped product of experts knows no float64.
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    model.generation_config.eos_token_id = None
    return model


_UNTESTED = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def untested(prefix: str, **fields: object) -> PreTrainedModel:
    """A model of a family that TESTED_FAMILIES does not name, with 50 tokens and in float32."""
    config = getattr(transformers, f"{prefix}Config")(**(_UNTESTED | fields), bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    return getattr(transformers, f"{prefix}ForCausalLM")(config).eval()


def full_logits(model: PreTrainedModel, tokens: Tensor, inputs: dict[str, Tensor] | None = None) -> Tensor:
    """One forward over whole texts, without a cache and without padding."""
    if inputs is None:
        return model(tokens, use_cache=False).logits.float()
    return model(**inputs, decoder_input_ids=tokens, use_cache=False).logits.float()


def perturbed(model: PreTrainedModel, scale: float = 0.02, seed: int = 1) -> PreTrainedModel:
    """A copy that often, but not always, agrees with the model: a draft with partial acceptance."""
    clone = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in clone.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise * scale)
    return clone


# Three texts of 24 tokens, without pad tokens, which are 0.
TOKENS = torch.randint(1, VOCAB, (3, 24), generator=torch.Generator().manual_seed(0))
# Encoder-decoder texts begin with 1, the decoder's start token.
PROMPTS = ([1, 17, 5, 33, 17, 5, 48], [1], [1, 29, 40, 8])


def encoder_inputs(family: str, rows: slice = slice(None)) -> dict[str, Tensor] | None:
    """What the encoder reads for three rows, the second one of T5 padded; None for a decoder-only family."""
    generator = torch.Generator().manual_seed(5)
    if family == "whisper":
        return {"input_features": torch.randn(3, 8, 40, generator=generator, dtype=torch.float64)[rows]}
    if family == "t5":
        mask = torch.ones(3, 9, dtype=torch.int64)
        mask[1, 6:] = 0
        return {"input_ids": torch.randint(3, VOCAB, (3, 9), generator=generator)[rows], "attention_mask": mask[rows]}
    return None


def padded(rows: Sequence[Sequence[int]], side: str) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask [B, P] of rows of different lengths. The padding is a token like any other."""
    width = max(len(row) for row in rows)
    ids, mask = torch.full((len(rows), width), 7), torch.zeros(len(rows), width, dtype=torch.int64)
    for index, row in enumerate(rows):
        at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[index, at] = torch.tensor(row)
        mask[index, at] = 1
    return ids, mask


def greedy_alone(
    model: PreTrainedModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    eos: Sequence[int] | None = None,
    inputs: Mapping[str, Tensor] | None = None,
) -> list[int]:
    """The new tokens of transformers' greedy decoding of one prompt without padding; `inputs` of one row."""
    ids = torch.tensor([prompt])
    options: dict[str, object] = {
        "do_sample": False,
        "max_new_tokens": max_new_tokens,
        "eos_token_id": None if eos is None else list(eos),
        "pad_token_id": 0,
    }
    if inputs is None:
        options |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    else:
        # T5's own cache has as many layers as its encoder. Whisper's own `generate` forces tokens; the general one
        # decodes like that of every other model.
        options |= {**inputs, "decoder_input_ids": ids, "use_cache": False}
    output = GenerationMixin.generate(model, **options)
    return output[0, len(prompt) :].tolist()


@functools.cache
def shared_tiny(family: str, seed: int = 0, attention: str | None = None) -> PreTrainedModel:
    """`tiny`, made once; not to be changed."""
    return tiny(family, seed, attention)


@functools.cache
def greedy_rows(family: str, max_new_tokens: int) -> tuple[tuple[int, ...], ...]:
    """The new tokens of PROMPTS, each decoded alone."""
    rows = []
    for index, prompt in enumerate(PROMPTS):
        own = encoder_inputs(family, slice(index, index + 1))
        rows.append(tuple(greedy_alone(shared_tiny(family), prompt, max_new_tokens, inputs=own)))
    return tuple(rows)


class PairModel(LanguageModel):
    """A `LanguageModel` of order two, from a table [V + 1, V, V] of logits: by the token before the last one (V: there
    is none), the last token, the next one. It reads its own memory of the text, so a stale memory shows."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.vocab_size = table.shape[-1]
        self.device = table.device
        self.memory = torch.zeros(0, 0, dtype=torch.int64)
        # Of every forward: positions [B, n].
        self.readings: list[Tensor] = []

    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        self.memory = torch.zeros(batch, capacity, dtype=torch.int64)
        self.readings = []

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        assert int(tokens.min()) >= 0 and int(tokens.max()) < self.vocab_size, "no token of the vocabulary"
        self.readings.append(positions.clone())
        self.remember(tokens, positions)
        before = self.memory.gather(1, (positions - 1).clamp(min=0))
        logits = self.table[torch.where(positions > 0, before, self.vocab_size), tokens]
        return logits if num_logits is None else logits[:, -num_logits:]

    def remember(self, tokens: Tensor, positions: Tensor) -> None:
        self.memory.scatter_(1, positions, tokens)


class TracedPairs(PairModel):
    """Without what no compiler can trace."""

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        self.remember(tokens, positions)
        before = self.memory.gather(1, (positions - 1).clamp(min=0))
        logits = self.table[torch.where(positions > 0, before, self.vocab_size), tokens]
        return logits if num_logits is None else logits[:, -num_logits:]


class TracedFeatures(FeatureModel, TracedPairs):
    """The same with hidden states, which depend on the token that is read alone: traced sooner than a transformer."""

    num_layers, hidden_size, dtype = 2, 32, torch.float64

    def __init__(self, vocab: int = VOCAB) -> None:
        super().__init__(random_table(vocab, seed=5))
        size = (self.num_layers + 1, vocab, self.hidden_size)
        self.states = torch.randn(size, generator=torch.Generator().manual_seed(6), dtype=self.dtype)
        self.embeddings = self.states[0]

    def keep_features(self, layers: Sequence[int]) -> None:
        self.kept = torch.cat([self.states[layer] for layer in layers], -1)

    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        super().start(batch, capacity, inputs)
        self.features = torch.zeros(batch, capacity, self.kept.shape[1], dtype=self.dtype)

    def remember(self, tokens: Tensor, positions: Tensor) -> None:
        super().remember(tokens, positions)
        self.features.scatter_(1, positions.unsqueeze(2).expand(-1, -1, self.kept.shape[1]), self.kept[tokens])

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embeddings[tokens]

    def head(self, states: Tensor) -> Tensor:
        return states @ self.embeddings.T


def random_table(vocab: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(vocab + 1, vocab, vocab, generator=torch.Generator().manual_seed(seed))


def raised(call: Callable[[Any], object], cases: Sequence[tuple[Any, type[Exception], str]]) -> list[str]:
    """The cases (argument, error, start of its message as a pattern) in which `call` does not raise what it should."""
    wrong = []
    for argument, error, message in cases:
        try:
            found: object = call(argument)
        except Exception as raised_error:
            found = raised_error
            if isinstance(raised_error, error) and re.match(message, str(raised_error)):
                continue
        wrong.append(f"{argument}: expected {error.__name__} {message!r}, got {found!r}")
    return wrong
