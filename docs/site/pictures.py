"""Draw the README's pictures, for light and for dark pages, and print its table of speeds.

    python -m docs.site.pictures
    python -m docs.site.pictures --record

The speeds are those of result files of `torch-specops bench`. The text is SmolLM2's answer to the default prompt of
`torch-specops demo`, with prompt lookup, and the step is one of the byte-level models that come with the package.
--record decodes them again.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from benchmarks.markdown_table import table

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"
DATE = "2026-11-26"
# Inches and points. A phone of 390 pixels shows a picture 358 pixels wide, and its small letters 11 pixels high.
WIDTH, LARGE, SMALL = 4.4, 12, 10
# Letters in a line of the text, which fill the width in a monospaced font of size SMALL.
COLUMNS = 52
SMOLLM2, BYTES = "SmolLM2-135M, prompt lookup", "byte-level models, K = 4"
# (target and draft, B, result file); all of a line was measured in turns, and nothing of it was compiled.
SETTINGS = (
    (BYTES, 8, "austen-bytes"),
    (BYTES, 1, "austen-bytes"),
    (f"{SMOLLM2}: eight prompts", 8, "smollm2"),
    (f"{SMOLLM2}: code to copy", 1, "smollm2"),
    (f"{SMOLLM2}: a story", 1, "smollm2-story"),
)
# Name of a way to decode, a pattern of the provider's name in the files, colour.
WAYS = (
    ("transformers generate", "transformers generate", "#9aa4af"),
    ("transformers assisted", r"transformers assisted, K = \d+", "#6b7682"),
    ("torch_specops, no draft", "specops, no draft", "#f5a97f"),
    ("torch_specops", "specops", "#e8590c"),
)


@dataclass(frozen=True)
class Scheme:
    suffix: str
    ink: str
    faint: str
    accepted: str
    own: str
    rejected: str


LIGHT = Scheme("", "#1f2328", "#d0d7de", "#1a7f37", "#9a6700", "#cf222e")
DARK = Scheme("_dark", "#e6edf3", "#3d444d", "#3fb950", "#d29922", "#f85149")


def results_of(file: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{DATE}-cpu-readme-{file}.json").read_text())["results"]
    return found


def speeds() -> list[dict[str, Any]]:
    """Tokens per second of each way in each setting."""
    found = []
    for setting, batch, file in SETTINGS:
        results = results_of(file)
        speed = {each["provider"]: each["tokens_per_second"] for each in results if each["batch_size"] == batch}
        record: dict[str, Any] = {"setting": setting, "batch": batch}
        for name, value in speed.items():
            record |= {way: value for way, pattern, _ in WAYS if re.fullmatch(pattern, name)}
        found.append(record)
    return found


def speed_table(records: list[dict[str, Any]]) -> str:
    """Batches have no assisted generation."""
    ways = [way for way, *_ in WAYS]
    header = " | ".join(["target, draft", "B", *ways])
    return table(header, " | ".join(["{setting}", "{batch}", *(f"{{{way}:.0f}}" for way in ways)]), records, "refused")


def compiled_text() -> str:
    """The README's words on compiled steps. Transformers was not compiled, so they are not in its table."""
    results = results_of("austen-bytes-compiled") + results_of("smollm2-compiled")
    compiled = [each for each in results if each["compiled"]]
    speed = [f"{each['tokens_per_second']:.0f}" for each in compiled]
    seconds = [each["compile_seconds"] for each in compiled]
    return (
        f"With `compile=True` the byte-level models make {speed[0]} tokens per second without a draft and {speed[1]} "
        f"with it, at B = 8 {speed[2]} and {speed[3]}, SmolLM2 {speed[4]} and {speed[5]} (code to copy). Compiling "
        f"took {min(seconds):.0f} to {max(seconds):.0f} s, which is not counted. transformers was not compiled."
    )


def draw_speeds(records: list[dict[str, Any]], scheme: Scheme) -> None:
    figure = Figure(figsize=(WIDTH, 4.1), layout="constrained")
    panels = figure.subplots(3, 1)
    for panel, record in zip(panels, [record for record in records if record["batch"] == 1], strict=True):
        speeds = [record[way] for way, *_ in WAYS]
        for place, ((*_, colour), speed) in enumerate(zip(WAYS, speeds, strict=True)):
            panel.barh(-place, speed, color=colour, height=0.72)
            panel.text(speed, -place, f" {speed:,.0f}", va="center", color=scheme.ink, fontsize=SMALL)
        panel.set_title(record["setting"], loc="left", x=-0.6, color=scheme.ink, fontsize=SMALL, weight="bold")
        panel.set_xlim(0, 1.25 * max(speeds))
        names = [way for way, *_ in WAYS]
        panel.set_yticks([-place for place in range(len(WAYS))], names, color=scheme.ink, fontsize=SMALL)
        panel.tick_params(length=0)
        panel.set_xticks([])
        panel.spines[:].set_visible(False)
    save(figure, f"speed{scheme.suffix}.svg")


def record_text() -> list[list[str]]:
    """The pieces of a text: each "accepted", "rejected" (the first draft of a step that the target refused) or "own"
    (drawn by the target), and its characters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from torch_specops import SamplingParams, SpeculativeDecoder
    from torch_specops.cli.loading import smollm2_directory
    from torch_specops.cli.models import PROMPT, encode
    from torch_specops.decode import TextPieces
    from torch_specops.decode.view import spans
    from torch_specops.drafts import PromptLookup

    folder = smollm2_directory()
    tokenizer, target = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    decoder = SpeculativeDecoder(target, PromptLookup(), num_draft_tokens=10, schedule="constant", compile=False)
    prompt = encode(tokenizer, PROMPT)
    steps = decoder.stream(prompt, max_new_tokens=256, sampling=SamplingParams(temperature=0.0))
    rows = ((step.tokens[0], step.num_accepted[0], step.rejected[0]) for step in steps)
    pieces: list[list[str]] = []
    text = ""
    for piece, kind in spans(TextPieces(tokenizer, prompt[0]), rows):
        pieces.append([kind, piece])
        text += piece if kind != "rejected" else ""
        # The end of the code.
        if text.count("```") == 2:
            break
    return pieces


@torch.inference_mode()
def record_step() -> dict[str, Any]:
    """A step in which drafts are accepted and one is rejected, with the numbers that decided."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import torch_specops

    folder = files("torch_specops") / "data" / "austen_bytes"
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    target, draft = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("target", "draft"))
    prompt, num_draft_tokens, seeds = "He could not help ", 6, torch.tensor([107])
    text = tokenizer(prompt, return_tensors="pt")["input_ids"]
    start = torch.tensor([text.shape[1]])
    tokens, rows = text, []
    for index in range(num_draft_tokens):
        rows.append(draft(tokens).logits[:, -1])
        number = torch_specops.uniforms(seeds, start, num_draft_tokens, "propose")[:, index]
        tokens = torch.cat([tokens, torch_specops.sample(rows[-1], number)[0].unsqueeze(1)], 1)
    drafts = tokens[:, text.shape[1] :]
    target_logits = target(tokens).logits[:, text.shape[1] - 1 :]
    accept = torch_specops.uniforms(seeds, start, num_draft_tokens, "accept")
    last = torch_specops.uniforms(seeds, start, 1, "sample")[:, 0]
    output, num_accepted = torch_specops.verify_exact(target_logits, drafts, torch.stack(rows, 1), accept, last)
    p, q = target_logits.softmax(2), torch.stack(rows, 1).softmax(2)
    return {
        "prompt": prompt,
        "drafts": [tokenizer.decode(token) for token in drafts[0]],
        "p": p[:, :-1].gather(2, drafts.unsqueeze(2)).flatten().tolist(),
        "q": q.gather(2, drafts.unsqueeze(2)).flatten().tolist(),
        "u": accept[0].tolist(),
        "num_accepted": int(num_accepted),
        "next": tokenizer.decode(output[0, num_accepted]),
    }


def draw_step(step: dict[str, Any], scheme: Scheme) -> None:
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    panel = figure.subplots()
    count, last = step["num_accepted"], len(step["drafts"])
    panel.set_xlim(0, last)
    panel.set_ylim(-7.9, 0.5)
    panel.axis("off")
    prompt = step["prompt"].strip()
    rows = {
        0.2: ("draft", f"a small model continues '{prompt} '"),
        -1.7: ("verify", "the target reads all in one forward: p and q of each"),
        -3.7: ("accept", "while u q < p, for a uniform u"),
        -6.4: ("resample", "the next token, from max(p \N{MINUS SIGN} q, 0)"),
    }
    for height, (name, hint) in rows.items():
        shown = panel.text(0.12, height, name, color=scheme.ink, fontsize=LARGE, weight="bold", va="center")
        offset = {"xycoords": shown, "textcoords": "offset points"}
        panel.annotate(hint, (1, 0.5), (6, 0), **offset, color=scheme.ink, fontsize=SMALL, va="center")
    small = {"fontsize": SMALL, "ha": "center", "va": "center"}
    for index, token in enumerate(step["drafts"]):
        p, q, u = (step[name][index] for name in "pqu")
        colour = scheme.accepted if index < count else scheme.rejected if index == count else scheme.faint
        box(panel, index, -0.65, token, scheme.ink, scheme.faint)
        panel.text(index + 0.5, -2.65, f"p {p:.2f}\nq {q:.2f}", color=scheme.ink, **small)
        box(panel, index, -4.5, token, colour, colour)
        if index <= count:
            sign = "<" if index < count else "\N{GREATER-THAN OR EQUAL TO}"
            panel.text(index + 0.5, -5.4, f"{u * q:.2f}\n{sign} {p:.2f}", color=colour, **small)
        if index < count:
            box(panel, index, -7.3, token, scheme.accepted, scheme.accepted)
    box(panel, count, -7.3, step["next"], scheme.own, scheme.own)
    save(figure, f"step{scheme.suffix}.svg")


def draw_text(pieces: list[list[str]], scheme: Scheme) -> None:
    placed, x, y = [], 0, 0
    for kind, characters in pieces:
        for line, characters_of_line in enumerate(characters.split("\n")):
            if line > 0:
                x, y = 0, y + 1
            if characters_of_line:
                placed.append((kind, characters_of_line, x, y))
                x += len(characters_of_line)
    names = {"accepted": "accepted draft", "own": "next token", "rejected": "rejected draft"}
    colours = {"accepted": scheme.accepted, "own": scheme.own, "rejected": scheme.rejected}
    figure = Figure(figsize=(WIDTH, 0.19 * (y + 3.5)), facecolor="none")
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set_xlim(0, COLUMNS)
    panel.set_ylim(y + 2.6, -0.6)
    panel.axis("off")
    legend = [
        (kind, name, sum(map(len, list(names.values())[:place])) + 2 * place, y + 2)
        for place, (kind, name) in enumerate(names.items())
    ]
    for kind, characters, x, y in (*placed, *legend):
        panel.add_patch(Rectangle((x, y - 0.5), len(characters), 1, color=colours[kind], alpha=0.22, linewidth=0))
        panel.text(x, y, characters, color=scheme.ink, fontsize=SMALL, family="monospace", va="center")
        if kind == "rejected":
            panel.plot((x, x + len(characters)), (y, y), color=scheme.rejected, linewidth=1)
    save(figure, f"text{scheme.suffix}.svg")


def box(panel: Axes, x: float, y: float, text: str, ink: str, edge: str) -> None:
    shape = FancyBboxPatch((x + 0.12, y - 0.38), 0.76, 0.76, boxstyle="round,pad=0,rounding_size=0.1", fill=False)
    shape.set(edgecolor=edge, linewidth=1.6)
    panel.add_patch(shape)
    label = text.replace(" ", "\N{OPEN BOX}")
    panel.text(x + 0.5, y, label, color=ink, fontsize=LARGE, family="monospace", ha="center", va="center")


def save(figure: Figure, name: str) -> None:
    # Without a date and with fixed ids, the same data give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "torch_specops"}):
        figure.savefig(FIGURES / name, transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="decode the text and the step again")
    step, text = FIGURES / "step.json", FIGURES / "text.json"
    if parser.parse_args().record:
        step.write_text(json.dumps(record_step(), indent=2) + "\n")
        text.write_text(json.dumps(record_text(), indent=2) + "\n")
    records = speeds()
    for scheme in (LIGHT, DARK):
        draw_speeds(records, scheme)
        draw_step(json.loads(step.read_text()), scheme)
        draw_text(json.loads(text.read_text()), scheme)
    print(speed_table(records))
    print(compiled_text())


if __name__ == "__main__":
    main()
