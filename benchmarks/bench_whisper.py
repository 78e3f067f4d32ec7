"""Whisper base transcribes and Whisper tiny.en drafts, beside transformers' greedy decoding.

    python benchmarks/models/whisper.py fetch
    python benchmarks/bench_whisper.py --audio DIR_OR_WAV... [--num-draft-tokens 3 5] [--threads 1]
                                       [--transcription FILE] [--out FILE.json]

Transcribes WAV files (16 kHz, mono, 16 bits, at most 30 s) greedily: with transformers, with this package's loop
without a draft, and with the draft through a token map, because the vocabularies differ. "Greedily" means the largest
of all logits; the tokens that Whisper's own `generate` suppresses are allowed. The tokens of all are compared.

The providers take turns. A time is the median of `--rounds` whole calls of a clip, encoders included, added up over the
clips. Word error rates need jiwer and a transcription with a line for each clip, `<s> words </s> (name)`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from markdown_table import table
from rich.progress import Progress
from timing import Report, environment
from torch import Tensor
from transformers import GenerationMixin, WhisperFeatureExtractor
from transformers.utils import logging

import torch_specops
from torch_specops.drafts.token_map import TokenMap
from torch_specops.hf import language_model

sys.path.append(str(Path(__file__).resolve().parent / "models"))
import whisper

# Tokens, seconds, statistics of the loop.
Answer = tuple[list[int], float, Any]


def providers(
    target: whisper.Whisper, draft: whisper.Whisper, twins: Tensor, numbers: Sequence[int], limit: int
) -> dict[str, Callable[[Tensor], Answer]]:
    prompt = torch.tensor([[target.tokens[name] for name in whisper.TARGET_PROMPT]])

    def with_transformers(features: Tensor) -> Answer:
        started = time.perf_counter()
        # Whisper's own `generate` forces and suppresses tokens. The general one takes the largest logit.
        output = GenerationMixin.generate(
            target.model, input_features=features, decoder_input_ids=prompt, do_sample=False, max_new_tokens=limit
        )
        return output[0, prompt.shape[1] :].tolist(), time.perf_counter() - started, None

    def with_loop(num_draft_tokens: int) -> Callable[[Tensor], Answer]:
        decoder = torch_specops.SpeculativeDecoder(
            target.model,
            TokenMap(language_model(draft.model), twins) if num_draft_tokens else None,
            num_draft_tokens=max(num_draft_tokens, 1),
            sampling=torch_specops.SamplingParams(temperature=0.0),
            compile=False,
        )

        def decode(features: Tensor) -> Answer:
            started = time.perf_counter()
            output = decoder.generate(prompt, inputs={"input_features": features}, max_new_tokens=limit)
            return output.new_tokens(0), time.perf_counter() - started, output.stats

        return decode

    return {"transformers": with_transformers} | {f"specops, K = {k}": with_loop(k) for k in (0, *numbers)}


def record(provider: str, clips: list[list[Answer]], expected: list[list[int]]) -> dict[str, Any]:
    """One provider. `clips`: the rounds of each clip, the first of which was the warm-up."""
    first = [answers[0] for answers in clips]
    found: dict[str, Any] = {
        "provider": provider,
        "clips": len(clips),
        "identical": sum(all(a[0] == own for a in answers) for answers, own in zip(clips, expected, strict=True)),
        "num_tokens": sum(len(tokens) for tokens, _, _ in first),
        "seconds": sum(statistics.median(seconds for _, seconds, _ in answers[1:]) for answers in clips),
    }
    if first[0][2] is not None:
        for name in ("num_steps", "num_proposed", "num_accepted"):
            found[name] = sum(getattr(stats, name) for _, _, stats in first)
        found["step_seconds"] = sum(statistics.median(stats.seconds for _, _, stats in own[1:]) for own in clips)
        found["mean_acceptance_length"] = found["num_tokens"] / found["num_steps"]
        if found["num_proposed"]:
            found["acceptance_rate"] = found["num_accepted"] / found["num_proposed"]
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    files = whisper.audio_files(options.audio)
    sounds = [whisper.read_wav(path) for path in files]
    expected = None if options.transcription is None else whisper.read_transcription(options.transcription)
    missing = [] if expected is None else [path.stem for path in files if path.stem not in expected]
    if missing:
        raise ValueError(f"transcription: expected a line for every clip, got none for {', '.join(missing)}")
    target, draft = whisper.load(whisper.TARGET), whisper.load(whisper.DRAFT)
    extract = WhisperFeatureExtractor.from_pretrained(whisper.cache_directory() / whisper.TARGET)
    rate = whisper.SAMPLE_RATE
    clips = [extract(sound, sampling_rate=rate, return_tensors="pt").input_features for sound in sounds]
    twins = whisper.token_map(target, draft)
    found = providers(target, draft, twins, options.num_draft_tokens, options.max_new_tokens)
    answers: dict[str, list[list[Answer]]] = {name: [[] for _ in clips] for name in found}
    with Progress(transient=True) as progress:
        for _ in progress.track(range(options.rounds + 1), description="transcribing"):
            for index, features in enumerate(clips):
                for name, decode in found.items():
                    answers[name][index].append(decode(features))
    outputs = [own[0][0] for own in answers["transformers"]]
    texts = [target.tokenizer.decode(output, skip_special_tokens=True).strip() for output in outputs]
    report = Report(
        options.out,
        environment(torch.device("cpu"), rounds=options.rounds),
        audio_seconds=sum(map(len, sounds)) / rate,
        tokens_with_twin=int((twins >= 0).sum()),
        target_vocabulary=len(twins),
        word_error_rate=expected and whisper.word_error_rate([expected[path.stem] for path in files], texts),
        texts={path.name: text for path, text in zip(files, texts, strict=True)},
    )
    report.add(record(name, own, outputs) for name, own in answers.items())
    return report.written


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--audio", type=Path, nargs="+", required=True, help="WAV files, or directories of them")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[3, 5], help="K, at least 1")
    parser.add_argument("--max-new-tokens", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each provider and clip")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    parser.add_argument("--transcription", type=Path, help="what is said in the clips, for the word error rate")
    parser.add_argument("--out", type=Path, help="write environment and results to this JSON file")
    options = parser.parse_args(arguments)
    if min(options.num_draft_tokens) < 1 or options.max_new_tokens < 1 or options.rounds < 1:
        parser.error("expected num-draft-tokens, max-new-tokens and rounds >= 1")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    try:
        result = run(options)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    for name, text in result["texts"].items():
        print(f"{name}: {text}")
    print(f"word error rate: {result['word_error_rate']}")
    columns = "{acceptance_rate:.3f} | {mean_acceptance_length:.2f} | {seconds:.2f} | {step_seconds:.2f}"
    print(
        table(
            "provider | same | steps | accepted | per step | s | s in steps",
            "{provider} | {identical} of {clips} | {num_steps} | " + columns,
            result["records"],
            padded=True,
        )
    )
    return result


if __name__ == "__main__":
    main()
