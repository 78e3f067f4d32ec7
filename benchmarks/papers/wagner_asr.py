"""Wagner et al. 2024 on speech: tables 1, 5, 6 and 8, tables 2 and 7, and the law behind them.

    python benchmarks/papers/wagner_asr.py [--speech DIR] [--large] [--only PREFIX]

Whisper base transcribes with Whisper tiny.en as its draft; `python benchmarks/pairs/whisper.py fetch` brings both.

    librivox    people read; DIR has the clips (16 kHz, mono, 16 bits) and the file `transcription`, a line
                `<s> words </s> (clip)` for each. Default: the directory librivox in the cache directory. The Debian
                package pocketsphinx-testdata has five: `apt-get download pocketsphinx-testdata`, `dpkg -x` it, and copy
                usr/share/pocketsphinx/test/data/librivox
    espeak      the program espeak-ng speaks sentences of Austen

What is not there is left out. Transformers' assisted generation wants one vocabulary, so the draft is tiny.en with its
rows in the order of the target's tokens; the 43 percent of the target's tokens that it has no twin for it never drafts.
Both encoders run once per clip, outside of everything that is timed.

Everything is drawn at temperature 1 from the 50 likeliest tokens (transformers' default), the number of drafts follows
transformers' heuristic from 5 on in each clip (tables 1, 5, 6, 2 and 7) or stays constant (table 8). Word error rates
are jiwer's, after Whisper's normalisation of English. A cell is measured once (`evidence.py`); needs
torch_specops[hf,evidence].
"""

from __future__ import annotations

import functools
import importlib
import shutil
import subprocess
import sys
import tempfile
import wave
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evidence import FIGURES, Cell, Cells, options, results_path, save_svg, wide_console
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import GenerationMixin, WhisperFeatureExtractor
from transformers.utils import logging
from wagner_laws import distances, filtered
from wagner_methods import BASELINE, EAGER, METHODS, measure, reduction, scales, steps_table, without_outputs

from torch_specops.cli.loading import cache_directory

HELDOUT = Path(__file__).resolve().parents[2] / "tests" / "data" / "austen_heldout.txt"
SCALES = (1e1, 1e3, 1e4, 1e5)
GAMMAS = (1, 3, 5, 10, 15, 20)
TOP_K = 50
# With the prompt, the paper's 256 tokens.
MAX_NEW_TOKENS = 252
SAMPLE_RATE = 16_000


@cache
def whisper() -> Any:
    """The module of `benchmarks/pairs` that loads both models."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "pairs"))
    return importlib.import_module("whisper")


@cache
def pair(device: str) -> tuple[Any, Any, Tensor]:
    """The target, the draft in its vocabulary, and the target's prompt."""
    own = whisper()
    target, draft = own.load(own.TARGET), own.load(own.DRAFT)
    in_vocabulary_of(target, draft)
    for each in (target, draft):
        each.model.to(device)
        encoder = each.model.get_encoder()
        encoder.forward = remembering(encoder.forward)
        # Whisper's own `generate` forces and suppresses tokens, and assisted generation would call it for the drafts.
        each.model.generate = functools.partial(GenerationMixin.generate, each.model)
    return target, draft, torch.tensor([[target.tokens[name] for name in own.TARGET_PROMPT]], device=device)


@torch.no_grad()
def in_vocabulary_of(target: Any, draft: Any) -> None:
    """Change the draft to read and write the target's tokens."""
    own = whisper()
    twins = own.token_map(target, draft, own.DRAFT_PROMPTS["previous"])
    read = twins.clamp(min=0)
    # A token of the prompt is only read.
    written = twins >= 0
    written[[target.tokens[name] for name in own.TARGET_PROMPT]] = False
    decoder = draft.model.get_decoder()
    rows = decoder.embed_tokens.weight[read].clone()
    decoder.embed_tokens = nn.Embedding.from_pretrained(rows)
    head = nn.Linear(rows.shape[1], rows.shape[0])
    head.weight, head.bias = nn.Parameter(rows), nn.Parameter(torch.where(written, 0.0, -torch.inf))
    draft.model.proj_out = head
    draft.model.config.vocab_size = rows.shape[0]
    draft.model.generation_config.eos_token_id = target.model.generation_config.eos_token_id
    draft.model.generation_config.pad_token_id = target.model.generation_config.pad_token_id


def remembering(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The encoder's forward, which hears each clip once."""
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


@cache
def clips(source: str, number: int, device: str) -> tuple[list[Tensor], list[str]]:
    """Features of each clip, and what is said in it."""
    if source == "espeak":
        words = sentences(number)
        sounds = [spoken(text) for text in words]
    else:
        files = whisper().audio_files([SPEECH])[:number]
        transcription = whisper().read_transcription(SPEECH / "transcription")
        words, sounds = [transcription[path.stem] for path in files], [whisper().read_wav(path) for path in files]
    extract = WhisperFeatureExtractor.from_pretrained(cache_directory() / whisper().TARGET)
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
    """The word error rate over all outputs, clip by clip, seed by seed."""
    each = len(outputs) // len(words)
    said = [target.tokenizer.decode(output, skip_special_tokens=True) for output in outputs]
    return {"quality": whisper().word_error_rate([words[index // each] for index in range(len(outputs))], said)}


def transcribed(
    source: str,
    device: str,
    num_clips: int,
    num_seeds: int,
    methods: Mapping[str, Mapping[str, Any]],
    num_draft_tokens: int = 5,
    schedule: str = "heuristic_transient",
) -> dict[str, dict[str, Any]]:
    """What `measure` says of every method, with the word error rate."""
    target, draft, prompt = pair(device)
    features, words = clips(source, num_clips, device)
    settings = draft.model.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = num_draft_tokens, schedule
    settings.assistant_confidence_threshold = 0.0

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
    outputs = [
        sampled(own, clip, prompt, 1000 * seed + index)
        for index, clip in enumerate(features)
        for seed in range(num_seeds)
    ]
    return quality(target, outputs, words)


@torch.inference_mode()
def laws(source: str, device: str, num_clips: int, top_k: int) -> dict[str, dict[str, float]]:
    """The laws on the logits of the pair at every token of the target's greedy transcription."""
    target, draft, prompt = pair(device)
    both: tuple[list[Tensor], list[Tensor]] = ([], [])
    for clip in clips(source, num_clips, device)[0]:
        ids = target.model.generate(
            input_features=clip, decoder_input_ids=prompt, do_sample=False, max_new_tokens=MAX_NEW_TOKENS
        )
        for whose, rows in zip((target, draft), both, strict=True):
            logits = whose.model(input_features=clip, decoder_input_ids=ids).logits
            rows.append(logits[0, prompt.shape[1] - 1 : -1])
    return distances(*(filtered(torch.cat(rows), top_k) for rows in both))


def missing(source: str) -> str:
    """What a kind of speech needs and is not there; "" if nothing is missing."""
    if not all((cache_directory() / name).is_dir() for name in (whisper().TARGET, whisper().DRAFT)):
        return "no Whisper models; `python benchmarks/pairs/whisper.py fetch` brings them"
    if source == "librivox" and not (SPEECH / "transcription").exists():
        return f"{SPEECH} has no file transcription"
    if source == "espeak" and shutil.which("espeak-ng") is None:
        return "the program espeak-ng is not there"
    return ""


def cells_of(chosen: Any) -> list[Cell]:
    """num_clips and num_seeds are what a source has at most."""
    large = chosen.large
    sizes = {"librivox": (5, 16 if large else 3), "espeak": (40 if large else 6, 4 if large else 1)}
    cells = []
    for source in sizes:

        def add(key: str, measure: Callable[..., Any], settings: dict[str, Any], source: str = source) -> None:
            cells.append(Cell(key, measure, settings, missing(source)))

        some = {"source": source, "device": chosen.device, "num_clips": sizes[source][0]}
        size = some | {"num_seeds": sizes[source][1]}
        for top_k in (0, TOP_K):
            add(f"laws/{source}/top_k={top_k}", laws, some | {"top_k": top_k})
        add(f"main/{source}", transcribed, size | {"methods": METHODS})
        add(f"scales/{source}", transcribed, size | {"methods": scales(SCALES)})
        for model in ("target", "draft"):
            add(f"alone/{source}/{model}", alone, size | {"model": model})
        if source == "librivox":
            add(f"eager/{source}", transcribed, size | {"methods": EAGER})
            for gamma in GAMMAS:
                constant = {"methods": METHODS, "num_draft_tokens": gamma, "schedule": "constant"}
                constant["num_seeds"] = size["num_seeds"] if large else 1
                add(f"gamma/{source}/{gamma}", transcribed, size | constant)
    return cells


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    global SPEECH
    chosen = options(
        __doc__, arguments, lambda parser: parser.add_argument("--speech", type=Path, default=SPEECH, metavar="DIR")
    )
    SPEECH = chosen.speech
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    console = wide_console()
    cells = cells_of(chosen)
    runner = Cells(results_path("wagner_asr", chosen), cells, chosen.device, packages=["jiwer"])
    found = runner.run(chosen.only, console)
    show(console, found)
    if chosen.out is None and not chosen.large and all(f"gamma/librivox/{gamma}" in found for gamma in GAMMAS):
        draw(found)
    return found


def show(console: Console, found: Mapping[str, Any]) -> None:
    rows = [(key, found[key]) for key in found if key.startswith(("main/", "eager/", "gamma/"))]
    console.print(steps_table("Tables 1, 5, 6 and 8", "WER", iter(rows)))
    table = Table("", "scale", "WER", "sampling", "accepted", "steps", title="Tables 2 and 7")
    for key in (key for key in found if key.startswith("scales/")):
        for name, own in found[key].items():
            cost = reduction(own["seconds"], found[key][BASELINE]["seconds"])
            rate = f"{own['accepted'] / own['drafted']:.3f}"
            table.add_row(key, name, f"{own['quality']:.3f}", cost, rate, str(own["steps"]))
    for key in (key for key in found if key.startswith("alone/")):
        table.add_row(key, "", f"{found[key]['quality']:.3f}", "", "", "")
    console.print(table)
    table = Table(
        "", "scores", "from target", "from draft", "accepted", "rare tokens", title="Law of the emitted token"
    )
    for key in (key for key in found if key.startswith("laws/")):
        for name, own in found[key].items():
            values = [f"{own[field]:.4f}" for field in ("distance", "from_draft", "accepted", "tail")]
            table.add_row(key.removeprefix("laws/"), name, *values)
    console.print(table)


def draw(found: Mapping[str, Any]) -> None:
    """Figure 3b on this machine."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5, 3.4), layout="constrained")
    for method in METHODS:
        times = [found[f"gamma/librivox/{gamma}"][method]["step_ms_median"] for gamma in GAMMAS]
        axis.plot(GAMMAS, times, marker="o", markersize=3, label=method)
    axis.set(xlabel="drafts per step", ylabel="ms in the sampling function, median step", ylim=(0, None), xticks=GAMMAS)
    axis.legend(frameon=False, fontsize=8)
    save_svg(figure, FIGURES / "wagner_step_time_asr.svg")
    pyplot.close(figure)


if __name__ == "__main__":
    main()
