"""`torch-specops demo`: one prompt, its drafts and acceptances in colour, and the check against plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..decode import GenerationOutput, GreedyCheck, SpeculativeDecoder, Step, check_greedy
from ..sampling import SamplingParams
from .pair import (
    DEFAULT_NUM_DRAFT_TOKENS,
    DRAFT_HELP,
    MIN_P_HELP,
    PROMPT,
    PROMPT_LOOKUP,
    SMOLLM2,
    TARGET_HELP,
    TOP_K_HELP,
    TOP_P_HELP,
    VERIFY_HELP,
    VerifyName,
    default_num_draft_tokens,
    encode,
    errors_in_one_line,
    load_pair,
    set_threads,
    to_device,
)
from .text import TextStream, printable

__all__ = ["demo"]

ACCEPTED, DRAWN = "bold green", "yellow"
# What a shell gives to a process that Ctrl-C ended.
INTERRUPTED = 130


class ScheduleName(str, Enum):
    constant = "constant"
    heuristic = "heuristic"


# typer evaluates the annotations, so they are written as Python 3.10 and typer both read them.
def demo(
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = SMOLLM2,
    draft: Annotated[str, typer.Option(help=DRAFT_HELP)] = PROMPT_LOOKUP,
    prompt: Annotated[str, typer.Option(help="What to answer; put into the chat template if there is one.")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens, if no eos came.")] = 128,
    num_draft_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Most drafts per step (K).", show_default=DEFAULT_NUM_DRAFT_TOKENS),
    ] = None,
    schedule: Annotated[
        ScheduleName,
        typer.Option(help="heuristic: 2 drafts more after a step that accepted all of them, otherwise 1 fewer."),
    ] = ScheduleName.constant,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily, 1 samples the model's law.")] = 0.0,
    top_k: Annotated[int, typer.Option(help=TOP_K_HELP)] = 0,
    top_p: Annotated[float, typer.Option(help=TOP_P_HELP)] = 1.0,
    min_p: Annotated[float, typer.Option(help=MIN_P_HELP)] = 0.0,
    verify: Annotated[VerifyName, typer.Option(help=VERIFY_HELP)] = VerifyName.exact,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1.")] = "cpu",
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="CPU threads; fewer may be faster on a busy machine.", show_default="torch's choice"),
    ] = None,
    compile: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(help="Compile the step; takes a while, once.", show_default="on CUDA, or for long texts"),
    ] = None,
    check: Annotated[
        bool, typer.Option(help="At temperature 0, decode again without a draft and compare token for token.")
    ] = True,
) -> None:
    """Decode a prompt, drafts and acceptances in colour, and check greedy output against plain decoding.

    The table gives the mean acceptance length (emitted tokens per step, the next token included) and the acceptance
    rate (accepted / verified drafts). Ctrl-C ends the text, and what there is by then is summed up.

    Exit code 1 means that the check failed, 2 that an argument or an installation is wrong, 130 Ctrl-C.
    """
    console = Console(highlight=False, markup=False)
    with errors_in_one_line():
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        torch_device = to_device(device)
        set_threads(threads)
        if num_draft_tokens is None:
            num_draft_tokens = default_num_draft_tokens(draft)
        pair, tokenizer = load_pair(console, target, draft, torch_device)
        decode_text = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        input_ids = encode(tokenizer, prompt).to(torch_device)
        decoder = SpeculativeDecoder(
            pair.target,
            pair.make_draft(),
            num_draft_tokens=num_draft_tokens,
            schedule=schedule.value,
            sampling=sampling,
            verify=verify.value,
            compile="auto" if compile is None else compile,
        )
        steps = decoder.stream(input_ids, max_new_tokens=max_new_tokens, seed=seed)
        law = "the target's greedy choice"
        if temperature > 0:
            filtered = top_k > 0 or top_p < 1 or min_p > 0
            law = f"softmax(target logits / temperature){' after the filters' * filtered}, exactly"
        console.print(f"target {target}, draft {draft}, K = {num_draft_tokens}, temperature {temperature:g}")
        console.print(f"law of every token: {law}")
        if console.color_system is not None:
            console.print(Text.assemble(("accepted draft tokens", ACCEPTED), ", ", ("drawn tokens", DRAWN)))
        console.print()
        output = decoder.output(_print_steps(console, steps, decode_text))
        plain = None
        if check and temperature == 0 and not output.interrupted:
            with console.status("decoding again without a draft"):
                plain = check_greedy(pair.target, input_ids, output.new_tokens(0))
        console.print(_summary(output, plain))
    if output.interrupted:
        console.print("interrupted: the numbers are those of the text so far, and it was not checked", soft_wrap=True)
        raise typer.Exit(INTERRUPTED)
    if output.errors:
        console.print(f"error: {output.errors[0]}", soft_wrap=True)
        raise typer.Exit(1)
    if plain is not None:
        console.print(_verdict(plain, lambda token: repr(decode_text([token]))), soft_wrap=True)
        if not plain.only_rounding:
            raise typer.Exit(1)


def _print_steps(console: Console, steps: Iterator[Step], decode_text: Callable[[list[int]], str]) -> bool:
    """Print the text as it comes; return whether Ctrl-C ended it."""
    stream = TextStream(decode_text)
    interrupted = False
    try:
        for step in steps:
            for index, token in enumerate(step.tokens[0]):
                piece, accepted = stream.push(token, index < step.num_accepted[0])
                text = Text(printable(piece), style=ACCEPTED if accepted else DRAWN)
                console.print(text, end="", soft_wrap=True)
            console.file.flush()
    except KeyboardInterrupt:
        interrupted = True
    console.print("\n")
    return interrupted


def _summary(output: GenerationOutput, plain: GreedyCheck | None) -> Table:
    stats = output.stats
    rate = stats.acceptance_rate
    drafts = f"{stats.num_accepted} of {stats.num_proposed} drafts"
    tokens_per_second = stats.num_tokens / max(stats.prefill_seconds + stats.seconds, 1e-9)
    rows = [
        ("tokens", str(stats.num_tokens)),
        ("steps", str(stats.num_steps)),
        ("mean acceptance length", f"{stats.mean_acceptance_length:.2f} tokens per step, the next token included"),
        ("acceptance rate", "no drafts" if rate is None else f"{rate:.1%} ({drafts})"),
        ("tokens/s", f"{tokens_per_second:.1f}, reading the prompt included"),
    ]
    if plain is not None:
        ratio = tokens_per_second / max(plain.tokens_per_second, 1e-9)
        rows.append(("tokens/s without a draft", f"{plain.tokens_per_second:.1f} (ratio {ratio:.2f})"))
    if stats.compile_seconds > 0:
        rows.append(("seconds compiling", f"{stats.compile_seconds:.1f}, not in the tokens/s"))
    table = Table(show_header=False, box=None)
    for row in rows:
        table.add_row(*row)
    return table


def _verdict(plain: GreedyCheck, show: Callable[[int], str]) -> str:
    if plain.identical:
        return f"check: identical to plain greedy decoding ({plain.num_tokens} tokens)"
    first = plain.differences[0]
    where = (
        f"token {first.index} is {show(first.token)}, plain greedy decoding gives {show(first.expected_token)}, "
        f"and their logits differ by {first.logit_gap:.1e}"
    )
    if plain.only_rounding:
        return (
            f"check: identical but for {len(plain.differences)} near ties of {plain.num_tokens} tokens: {where}; "
            f"a wider forward rounds differently, which explains up to {first.rounding_bound:.1e}"
        )
    worst = max(plain.differences, key=lambda difference: difference.logit_gap / difference.rounding_bound)
    return (
        f"check: DIFFERENT from plain greedy decoding from token {first.index} on: {where}; "
        f"the gap at token {worst.index}, {worst.logit_gap:.1e}, is beyond rounding ({worst.rounding_bound:.1e})"
    )
