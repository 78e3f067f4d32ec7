"""`torch-specops demo`: decodes one prompt, with accepted drafts in colour, and compares with plain decoding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from shlex import quote
from shutil import which
from textwrap import shorten
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..decode import GenerationOutput, SpeculativeDecoder, Step, TextPieces
from ..decode.view import printable, spans
from ..sampling import SamplingParams
from . import options
from .greedy import GreedyDifference, verdict, worst_of
from .loading import AUSTEN, AUSTEN_DRAFT, SMOLLM2
from .models import PROMPT, PROMPT_LOOKUP, default_num_draft_tokens, encode, load_models, spinner
from .speed import Speeds, compare_speeds, use_fast_threads

STYLES = {"accepted": "bold green", "rejected": "red strike", "own": "yellow"}
AUSTEN_PROMPT = "It is a truth universally acknowledged, that "


def demo(
    target: options.Target = SMOLLM2,
    draft: options.Draft = PROMPT_LOOKUP,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What to answer or to continue; it goes through the model's chat template, if there is one.",
            show_default="a small programming task",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="Stop after N tokens at the latest.")] = 128,
    num_draft_tokens: options.NumDraftTokens = None,
    schedule: options.Schedule = None,
    verify: options.Verify = None,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="T", help="0: always the most likely token. Above 0: sample; 1 is the model's distribution."
        ),
    ] = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed samples the same text again.")] = 0,
    device: options.Device = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", help="CPU threads.", show_default="torch's choice or 1, after a short trial"),
    ] = None,
    compile: options.Compile = None,
    check: Annotated[
        bool, typer.Option(help="At temperature 0, decode again without the draft and compare the tokens.")
    ] = True,
) -> None:
    """Write text by speculative decoding, and show what the draft contributed.

    A cheap draft guesses the next few tokens. The target model then reads all guesses in one pass, keeps those that it
    accepts, and adds one token.

    Accepted guesses are green, and the target's own tokens are yellow. The numbers below the text say how many tokens
    came per step, how many guesses were accepted, and how fast it was. At temperature 0 the prompt is then decoded
    without the draft, and both texts are compared. Runs with the draft and without it take turns, and one of them is
    called faster only if it was faster in every turn. If decoding seems slower with the draft, it is timed once more.

    Ctrl-C stops the text or the comparison; the numbers so far are still shown.
    """
    console = options.new_console()
    with options.errors_in_one_line(), options.threads_restored():
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        torch_device = options.compute_on(device, threads)
        if prompt is None:
            prompt = AUSTEN_PROMPT if target == AUSTEN else PROMPT
        models, tokenizer = load_models(console, target, draft, torch_device)
        if num_draft_tokens is None:
            num_draft_tokens = default_num_draft_tokens(models.draft)
        decode_text = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        input_ids = encode(tokenizer, prompt).to(torch_device)
        readable = models.target.max_length
        if readable is not None and input_ids.shape[1] + max_new_tokens > readable:
            raise ValueError(
                f"max_new_tokens: expected prompt and new tokens within the {readable} that the target was made for, "
                f"got {input_ids.shape[1]} + {max_new_tokens}"
            )
        decoder = SpeculativeDecoder(
            models.target,
            models.draft,
            num_draft_tokens=num_draft_tokens,
            schedule=schedule,
            sampling=sampling,
            verify=verify,
            compile="auto" if compile is None else compile,
        )
        present_threads = torch.get_num_threads()
        choose_threads = None
        if threads is None and torch_device.type == "cpu" and present_threads > 1:
            choose_threads = partial(use_fast_threads, models.target, num_draft_tokens)
            with spinner(console, "trying 1 thread"):
                choose_threads()
        steps = decoder.stream(input_ids, max_new_tokens=max_new_tokens, seed=seed)
        console.print(f"target: {target}")
        console.print(f"draft:  {draft}, {num_draft_tokens} tokens per step")
        console.print(f"text:   {_describe(temperature, top_k, top_p, min_p)}")
        console.print(f"prompt: {printable(shorten(prompt, 300, placeholder=' ...'))}")
        if console.color_system is not None:
            names = {"accepted": "accepted drafts", "rejected": "rejected drafts", "own": "the target's own tokens"}
            console.print(Text(", ").join(Text(name, STYLES[kind]) for kind, name in names.items()))
        console.print()
        pieces = TextPieces(tokenizer, input_ids[0], clean_up_tokenization_spaces=False)
        interrupted = _print_steps(console, steps, pieces)
        output = decoder.output()
        speeds = differences = None
        if check and temperature == 0 and not interrupted:
            compare = partial(compare_speeds, models.target, decoder, input_ids, output.new_tokens(0))
            try:
                with spinner(console, "decoding again, with the draft and without it in turns"):
                    speeds, differences = compare()
                    if speeds is not None and speeds.is_slower:
                        # Compare again: the draft may seem slower by chance, or because another program has taken a
                        # core since the trial.
                        if choose_threads is not None:
                            choose_threads()
                        speeds, differences = compare()
            except KeyboardInterrupt:
                interrupted = True
        num_threads = torch.get_num_threads()
        trial = f" ({present_threads} were not clearly faster)" if num_threads == 1 else " (1 was slower)"
        console.print(_summary(output, speeds, f"{num_threads}{trial if choose_threads else ''}"))
    if interrupted:
        console.print("interrupted: the numbers are for the text so far, which was not checked")
        raise typer.Exit(options.INTERRUPTED)
    if output.errors:
        console.print(f"error: {output.errors[0]}")
        raise typer.Exit(1)
    if speeds is not None:
        may_wait = speeds.is_slower and (threads or 1) > 1
        hint = "; other programs may hold up its threads: try --threads 1" if may_wait else ""
        console.print(f"speed: {speeds.verdict()}{hint}")
    if differences is not None:
        console.print(f"check: {_comparison(differences, output.stats.num_tokens, decode_text)}")
        if verdict(differences) == "different":
            raise typer.Exit(1)
    console.print(f"next:  {_next(target, draft, device, temperature)}")


def _next(target: str, draft: str, device: str, temperature: float) -> str:
    """The next thing to try: a draft model, then sampling, then the speed."""
    if target == AUSTEN and draft == PROMPT_LOOKUP:
        what, command, draft = "a small model as the draft", "demo", AUSTEN_DRAFT
    elif temperature == 0:
        what, command = "sampled text", "demo --temperature 0.7"
    else:
        what, command = "the speed beside transformers", "bench"
    defaults = ("target", target, SMOLLM2), ("draft", draft, PROMPT_LOOKUP), ("device", device, "cpu")
    for name, value, default in defaults:
        command += f" --{name} {quote(value)}" if value != default else ""
    # Print the path of the command if its virtual environment is not active, as after `make demo`.
    in_a_folder = sys.argv[0].endswith("/torch-specops") and which("torch-specops") is None
    return f"{what}: {sys.argv[0] if in_a_folder else 'torch-specops'} {command}"


def _describe(temperature: float, top_k: int, top_p: float, min_p: float) -> str:
    if temperature == 0:
        return "the target's most likely token at every place (temperature 0)"
    filters = [f"top-k {top_k}"] * (top_k > 0) + [f"top-p {top_p:g}"] * (top_p < 1) + [f"min-p {min_p:g}"] * (min_p > 0)
    return f"sampled from the target's distribution, {', '.join([f'temperature {temperature:g}', *filters])}"


def _print_steps(console: Console, steps: Iterator[Step], pieces: TextPieces) -> bool:
    """Print the text as it comes. Returns whether Ctrl-C ended it."""
    interrupted = False
    try:
        # Without colours, a reader cannot tell rejected drafts from the text.
        is_coloured = console.color_system is not None
        rows = ((step.tokens[0], step.num_accepted[0], step.rejected[0] if is_coloured else -1) for step in steps)
        for text, kind in spans(pieces, rows):
            console.print(Text(text, style=STYLES[kind]), end="")
    except KeyboardInterrupt:
        interrupted = True
        console.print(Text(printable(pieces.end()), style=STYLES["own"]), end="")
    console.print("\n")
    return interrupted


def _summary(output: GenerationOutput, speeds: Speeds | None, threads: str) -> Table:
    stats = output.stats
    rate, drafts = stats.acceptance_rate, f"{stats.num_accepted} of {stats.num_proposed} draft tokens"
    table = Table(show_header=False, box=None)
    table.add_row("tokens", str(stats.num_tokens))
    table.add_row("steps", str(stats.num_steps))
    length = f"{stats.mean_acceptance_length:.2f} tokens per step, the target's own included"
    table.add_row("mean acceptance length", length)
    table.add_row("acceptance rate", "no drafts" if rate is None else f"{rate:.1%} ({drafts})")
    if speeds is None:
        tokens_per_second = stats.num_tokens / max(stats.prefill_seconds + stats.seconds, 1e-9)
        table.add_row("tokens/s", f"{tokens_per_second:.1f}, reading the prompt included")
    else:
        of_runs = f"the fastest of {len(speeds.with_draft)} runs after the prompt"
        table.add_row("tokens/s", f"{1 / min(speeds.with_draft):.1f}, {of_runs}")
        table.add_row("tokens/s without the draft", f"{1 / min(speeds.without_draft):.1f}")
    table.add_row("CPU threads", threads)
    if stats.compile_seconds > 0:
        table.add_row("seconds compiling", f"{stats.compile_seconds:.1f}, not counted in tokens/s")
    return table


def _comparison(
    differences: Sequence[GreedyDifference], num_tokens: int, decode_text: Callable[[list[int]], str]
) -> str:
    if not differences:
        return f"identical to plain greedy decoding ({num_tokens} tokens)"
    extent = f"{len(differences)} of {num_tokens} tokens"
    worst = worst_of(differences).describe(decode_text)
    if verdict(differences) == "near ties":
        return f"identical to plain greedy decoding but for near ties at {extent}: {worst}"
    return f"DIFFERENT from plain greedy decoding at {extent}; the worst: {worst}"
