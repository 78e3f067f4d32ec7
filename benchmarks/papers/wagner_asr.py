"""Wagner et al. 2024 on speech: tables 1, 5, 6 and 8, tables 2 and 7, and the law behind them.

    python benchmarks/papers/wagner_asr.py [--only PREFIX]

Whisper base transcribes and Whisper tiny.en drafts: `hf download openai/whisper-base`, `hf download
openai/whisper-tiny.en`, or the directories whisper-base and whisper-tiny.en in the cache directory of torch_specops.

    librivox    recordings of people who read. The directory librivox in the cache directory has the clips (16 kHz,
                mono, 16 bits) and the file `transcription`, with a line `<s> words </s> (clip)` for each. The Debian
                package pocketsphinx-testdata has five clips: `apt-get download pocketsphinx-testdata`, unpack it with
                `dpkg -x`, and copy usr/share/pocketsphinx/test/data/librivox
    espeak      sentences of Austen, spoken by the program espeak-ng

What is not installed is left out. Transformers' assisted generation needs one vocabulary for both models, so the rows
of tiny.en are put in the order of the target's tokens. 43 percent of these have no counterpart in tiny.en and are never
drafted. Both encoders run once per clip, before anything is timed.

Everything is drawn at temperature 1 from the 50 likeliest tokens (transformers' default), the number of drafts follows
transformers' heuristic from 5 on in each clip (tables 1, 5, 6, 2 and 7) or stays constant (table 8). Word error rates
are jiwer's, after Whisper's normalisation of English. A cell is measured once (`evidence.py`); needs
torch_specops[hf,evidence].
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import torch
from evidence import Cell, reproduce
from huggingface_hub import try_to_load_from_cache
from subjects import HELDOUT
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    PreTrainedTokenizerFast,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer
from transformers.utils import logging
from wagner_laws import distances, filtered
from wagner_methods import GAMMAS, METHODS, drafting, draw_steps, measure, scales, without_compile, without_outputs

from torch_specops.cli.loading import cache_directory
from torch_specops.drafts.token_map import twin_tokens

SCALES = (1e1, 1e3, 1e4, 1e5)
TOP_K = 50
# With the prompt, the paper's 256 tokens.
MAX_NEW_TOKENS = 252
SAMPLE_RATE = 16_000
MODELS = TARGET, DRAFT = "whisper-base", "whisper-tiny.en"
START, NO_TIMESTAMPS = "<|startoftranscript|>", "<|notimestamps|>"
TARGET_PROMPT = (START, "<|en|>", "<|transcribe|>", NO_TIMESTAMPS)
# The draft reads one token for each of the target's. tiny.en was trained on START, NO_TIMESTAMPS alone: with these four
# alpha is 0.885, with its own two it is 0.888, and with the target's four 0.840 (94 tokens of five clips).
DRAFT_PROMPT = ("<|startofprev|>", START, START, NO_TIMESTAMPS)


@dataclass(frozen=True)
class Whisper:
    model: WhisperForConditionalGeneration
    tokenizer: PreTrainedTokenizerFast
    tokens: dict[str, int]


def place(name: str) -> Path | str:
    """A local directory of the model, or its id on the hub."""
    directory = cache_directory() / name
    return directory if directory.is_dir() else f"openai/{name}"


def load(name: str) -> Whisper:
    """One of the models in float32, without the tokens that its own `generate` suppresses or forces."""
    model = WhisperForConditionalGeneration.from_pretrained(place(name), dtype=torch.float32).eval()
    names = ("eos_token_id", "pad_token_id", "decoder_start_token_id")
    kept = {name: getattr(model.generation_config, name) for name in names}
    model.generation_config = GenerationConfig(**kept)
    tokenizer = AutoTokenizer.from_pretrained(place(name))
    return Whisper(model, tokenizer, tokenizer.get_vocab())


def twins_of(target: Whisper, draft: Whisper) -> Tensor:
    """[V_target] int64: the draft's token with the same text, -1 if it has none; `DRAFT_PROMPT` for the prompt.

    Two tokens of the prompt may map to one, because the draft only reads them.
    """
    twins = twin_tokens(target.tokens, draft.tokens, target.model.config.vocab_size)
    for name, read_as in zip(TARGET_PROMPT, DRAFT_PROMPT, strict=True):
        twins[target.tokens[name]] = draft.tokens[read_as]
    return twins


@cache
def pair(device: str) -> tuple[Whisper, Whisper, Tensor]:
    """The target, the draft in its vocabulary, and the target's prompt."""
    target, draft = load(TARGET), load(DRAFT)
    in_vocabulary_of(target, draft)
    for each in (target, draft):
        each.model.to(device)
        encoder = each.model.get_encoder()
        encoder.forward = remembering(encoder.forward)
        # Whisper's own `generate` forces and suppresses tokens, and assisted generation would call it for the drafts.
        each.model.generate = partial(GenerationMixin.generate, each.model)
    return target, draft, torch.tensor([[target.tokens[name] for name in TARGET_PROMPT]], device=device)


@torch.no_grad()
def in_vocabulary_of(target: Whisper, draft: Whisper) -> None:
    """Change the draft to read and write the target's tokens."""
    twins = twins_of(target, draft)
    read = twins.clamp(min=0)
    # A token of the prompt is only read.
    written = twins >= 0
    written[[target.tokens[name] for name in TARGET_PROMPT]] = False
    decoder = draft.model.get_decoder()
    rows = decoder.embed_tokens.weight[read].clone()
    decoder.embed_tokens = nn.Embedding.from_pretrained(rows)
    head = nn.Linear(rows.shape[1], rows.shape[0])
    head.weight, head.bias = nn.Parameter(rows), nn.Parameter(torch.where(written, 0.0, -torch.inf))
    draft.model.proj_out = head
    draft.model.config.vocab_size = rows.shape[0]
    for name in ("eos_token_id", "pad_token_id"):
        setattr(draft.model.generation_config, name, getattr(target.model.generation_config, name))


def remembering(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The encoder's forward, which runs once for each clip."""
    known: dict[int, Any] = {}

    def remembered(input_features: Tensor, *arguments: Any, **named: Any) -> Any:
        key = input_features.data_ptr()
        if key not in known:
            known[key] = forward(input_features, *arguments, **named)
        return known[key]

    return remembered


def sentences(number: int) -> list[str]:
    """Sentences of 8 to 20 words from the text that the byte-level pair was not trained on."""
    text = " ".join(HELDOUT.read_text(encoding="utf-8").split())
    found = [each.strip() for each in text.replace("?", ".").replace("!", ".").split(".")]
    plain = [each for each in found if 8 <= len(each.split()) <= 20 and all(c.isalpha() or c in " ,;'" for c in each)]
    return plain[:: len(plain) // number][:number]


def spoken(text: str) -> np.ndarray:
    """What espeak-ng says, at 16 kHz."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "speech.wav"
        subprocess.run(["espeak-ng", "-v", "en-us", "-s", "150", "-w", str(path), text], check=True)
        with wave.open(str(path), "rb") as file:
            rate, samples = file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), "<i2")
    # Without what is above 8 kHz.
    length = len(samples) * SAMPLE_RATE // rate
    spectrum = np.fft.rfft(samples / 2**15)[: length // 2 + 1]
    return (np.fft.irfft(spectrum, length) * length / len(samples)).astype(np.float32)


SPEECH = cache_directory() / "librivox"


def read_wav(path: Path) -> np.ndarray:
    """Samples in [-1, 1) of a WAV file of 16 kHz, mono, 16 bits."""
    with wave.open(str(path), "rb") as file:
        form = (file.getframerate(), file.getnchannels(), file.getsampwidth() * 8)
        if form != (SAMPLE_RATE, 1, 16):
            raise ValueError(f"{path}: expected {SAMPLE_RATE} Hz, 1 channel, 16 bits, got {form}")
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 2**15


@cache
def clips(source: str, number: int, device: str) -> tuple[list[Tensor], list[str]]:
    """Features of each clip, and what is said in it."""
    if source == "espeak":
        words = sentences(number)
        sounds = [spoken(text) for text in words]
    else:
        files = sorted(SPEECH.glob("*.wav"))[:number]
        lines = re.findall(r"<s>(.*?)</s>\s*\((\S+)\)", (SPEECH / "transcription").read_text())
        transcription = {name: said for said, name in lines}
        words, sounds = [transcription[path.stem] for path in files], [read_wav(path) for path in files]
    extract = WhisperFeatureExtractor.from_pretrained(place(TARGET))
    features = [extract(sound, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features for sound in sounds]
    return [each.to(device) for each in features], words


def sampled(model: Any, features: Tensor, prompt: Tensor, seed: int, **named: Any) -> list[int]:
    """The new tokens.

    Without a mask of the decoder's prompt, transformers 5.17 hands an encoder-decoder draft the whole text again in
    every step, behind what its cache holds already: lossless, but few drafts are accepted.
    """
    torch.manual_seed(seed)
    output = model.generate(
        input_features=features, decoder_input_ids=prompt, decoder_attention_mask=torch.ones_like(prompt),
        do_sample=True, temperature=1.0, top_k=TOP_K, max_new_tokens=MAX_NEW_TOKENS, **named,
    )  # fmt: skip
    return output[0, prompt.shape[1] :].tolist()


def quality(target: Any, outputs: Sequence[Sequence[int]], words: Sequence[str]) -> dict[str, float]:
    """The word error rate over all outputs, clip by clip, seed by seed, after Whisper's normalisation of English."""
    normal, each = EnglishTextNormalizer({}), len(outputs) // len(words)
    said = [normal(target.tokenizer.decode(output, skip_special_tokens=True)) for output in outputs]
    return {"quality": float(jiwer.wer([normal(words[index // each]) for index in range(len(outputs))], said))}


def transcribed(
    source: str,
    device: str,
    num_clips: int,
    num_seeds: int,
    methods: Mapping[str, Mapping[str, Any]],
    num_draft_tokens: int = 5,
    schedule: str = "heuristic_transient",
) -> dict[str, dict[str, Any]]:
    """The results of `measure` for every method, with the word error rate."""
    target, draft, prompt = pair(device)
    features, words = clips(source, num_clips, device)
    draft.model.generation_config.update(**drafting(num_draft_tokens, schedule))

    def decode(clip: int, seed: int) -> list[int]:
        return sampled(target.model, features[clip], prompt, 1000 * seed + clip, assistant_model=draft.model)

    # Both encoders, before anything is timed.
    for clip in range(len(words)):
        decode(clip, 0)
    found = measure(methods, decode, len(words), range(num_seeds), target.model.config.vocab_size, device)
    for own in found.values():
        own |= quality(target, own["outputs"], words)
    return without_outputs(found)


def alone(source: str, device: str, num_clips: int, num_seeds: int, model: str) -> dict[str, float]:
    """The word error rate of one model without the other."""
    target, draft, prompt = pair(device)
    own = (target if model == "target" else draft).model
    features, words = clips(source, num_clips, device)
    runs = product(range(len(features)), range(num_seeds))
    outputs = [sampled(own, features[clip], prompt, 1000 * seed + clip) for clip, seed in runs]
    return quality(target, outputs, words)


@torch.inference_mode()
def laws(source: str, device: str, num_clips: int, top_k: int) -> dict[str, dict[str, float]]:
    """The laws on the logits of the pair at every token of the target's greedy transcription."""
    target, draft, prompt = pair(device)
    both: tuple[list[Tensor], list[Tensor]] = ([], [])
    for clip in clips(source, num_clips, device)[0]:
        greedy = {"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS}
        ids = target.model.generate(input_features=clip, decoder_input_ids=prompt, **greedy)
        for whose, rows in zip((target, draft), both, strict=True):
            logits = whose.model(input_features=clip, decoder_input_ids=ids).logits
            rows.append(logits[0, prompt.shape[1] - 1 : -1])
    return distances(*(filtered(torch.cat(rows), top_k) for rows in both))


def missing(source: str) -> str:
    """What a kind of speech needs and is not installed; "" if nothing is missing."""
    for where in map(place, MODELS):
        if isinstance(where, str) and not isinstance(try_to_load_from_cache(where, "config.json"), str):
            return f"no {where}; run: hf download {where}"
    if source == "librivox" and not (SPEECH / "transcription").exists():
        return f"{SPEECH} has no file transcription"
    if source == "espeak" and shutil.which("espeak-ng") is None:
        return "the program espeak-ng is not there"
    return ""


def cells_of(chosen: Any) -> list[Cell]:
    # num_clips, num_seeds
    sizes = {"librivox": (5, 3), "espeak": (6, 1)}

    def add(key: str, measure: Callable[..., Any], settings: dict[str, Any]) -> None:
        cells.append(Cell(key, measure, settings, missing(settings["source"])))

    cells: list[Cell] = []
    for source in sizes:
        some = {"source": source, "device": chosen.device, "num_clips": sizes[source][0]}
        size = some | {"num_seeds": sizes[source][1]}
        for top_k in (0, TOP_K):
            add(f"laws/{source}/top_k={top_k}", laws, some | {"top_k": top_k})
        add(f"main/{source}", transcribed, size | {"methods": METHODS})
        add(f"scales/{source}", transcribed, size | {"methods": scales(SCALES)})
        for model in ("target", "draft"):
            add(f"alone/{source}/{model}", alone, size | {"model": model})
        if source == "librivox":
            add(f"eager/{source}", transcribed, size | {"methods": without_compile(METHODS)})
            for gamma in GAMMAS:
                constant = {"methods": METHODS, "num_draft_tokens": gamma, "schedule": "constant", "num_seeds": 1}
                add(f"gamma/{source}/{gamma}", transcribed, size | constant)
    return cells


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    draw = partial(draw_steps, "wagner_step_time_asr", ("librivox",))
    return reproduce("wagner_asr", __doc__, cells_of, arguments, draw=draw, packages=["jiwer"])


if __name__ == "__main__":
    main()
