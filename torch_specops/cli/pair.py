"""What the commands share: a target and a draft by name, prompts as tokens, a device, and errors in one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from ..benchmark import Pair
from ..drafts import EarlyExit, ModelDraft, NGram, PromptLookup, quantised_copy

if TYPE_CHECKING:
    from ..hf import Tokenizer, TransformersModel

__all__ = [
    "AUSTEN",
    "AUSTEN_DRAFT",
    "DRAFT_HELP",
    "MIN_P_HELP",
    "PROMPT",
    "PROMPT_LOOKUP",
    "SMOLLM2",
    "TARGET_HELP",
    "TOP_K_HELP",
    "TOP_P_HELP",
    "VERIFY_HELP",
    "VerifyName",
    "default_num_draft_tokens",
    "encode",
    "errors_in_one_line",
    "load_pair",
    "set_threads",
    "to_device",
]

SMOLLM2 = "smollm2-135m-instruct"
AUSTEN, AUSTEN_DRAFT = "austen-bytes", "austen-bytes-draft"
PROMPT_LOOKUP = "prompt-lookup"
NGRAM, EARLY_EXIT, INT8 = "ngram:", "early-exit:", "int8"

DATA = Path(__file__).parents[1] / "data"
SHIPPED = {AUSTEN: DATA / "austen_bytes" / "target", AUSTEN_DRAFT: DATA / "austen_bytes" / "draft"}

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

TARGET_HELP = (
    f"Directory or hub id of a causal model. '{SMOLLM2}' comes from a package, converted once; "
    f"'{AUSTEN}' is a small byte-level model that is always there."
)
DRAFT_HELP = (
    f"'{PROMPT_LOOKUP}' copies from the text so far; '{NGRAM}FILE' counts what follows what in a text; "
    f"'{EARLY_EXIT}N' is the target's first N layers; '{INT8}' is a quantised copy of it (torchao); else a smaller "
    f"model with the same tokens, as '{AUSTEN_DRAFT}' is for '{AUSTEN}'."
)

TOP_K_HELP = "Sample among the k likeliest tokens; 0 = all."
TOP_P_HELP = "Sample among the likeliest tokens of this mass; 1 = all."
MIN_P_HELP = "Sample among tokens of at least this share of the largest."
VERIFY_HELP = "exact: draft by draft; block: all drafts jointly. The law is the same."


class VerifyName(str, Enum):
    exact = "exact"
    block = "block"


# On a CPU a forward over 4 tokens or more costs about two of one token, and grows slowly from there. Looked-up drafts
# are free, so long ones pay; those of a model cost forwards of their own, so the target's is kept narrow.
NUM_DRAFT_TOKENS_LOOKUP = 10
NUM_DRAFT_TOKENS_OTHER = 2
DEFAULT_NUM_DRAFT_TOKENS = f"{NUM_DRAFT_TOKENS_LOOKUP} for {PROMPT_LOOKUP}, {NUM_DRAFT_TOKENS_OTHER} otherwise"


def default_num_draft_tokens(draft: str) -> int:
    return NUM_DRAFT_TOKENS_LOOKUP if draft == PROMPT_LOOKUP else NUM_DRAFT_TOKENS_OTHER


def load_pair(
    console: Console, target: str, draft: str, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Pair, Tokenizer]:
    """The pair and the target's tokenizer, with a spinner while it takes time."""
    with console.status("loading transformers"):
        try:
            from .. import hf
        except ModuleNotFoundError as error:
            raise ValueError(f"{error.name} is missing; run: pip install 'torch_specops[hf]'") from error
    if hf.SMOLLM2 in (target, draft):
        with _announce(console, f"converting {hf.SMOLLM2} once, about 30 s", unless=hf.smollm2_is_converted()):
            hf.smollm2_directory()
    with console.status(f"loading {target}"):
        path = SHIPPED.get(target, target)
        model, tokenizer = hf.load_model(path, device), hf.load_tokenizer(path)
        model.model.to(dtype)

    if draft == PROMPT_LOOKUP:
        return Pair(model, PromptLookup, None, lambda count: {"prompt_lookup_num_tokens": count}), tokenizer
    if draft.startswith(NGRAM):
        with console.status(f"counting {draft}"):
            text = _read_text(draft.removeprefix(NGRAM))
            tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"][0]
            table = NGram.from_tokens(tokens, vocab_size=model.vocab_size, device=device)
        return Pair(model, lambda: table), tokenizer
    if draft.startswith(EARLY_EXIT):
        number = draft.removeprefix(EARLY_EXIT)
        if not number.isdecimal():
            raise ValueError(f"draft: expected a number of layers after '{EARLY_EXIT}', got {number!r}")
        exit_layer = int(number)
        return Pair(
            model, lambda: EarlyExit(exit_layer), None, lambda count: {"assistant_early_exit": exit_layer}
        ), tokenizer

    with console.status(f"loading {draft}"):
        assistant = _quantised(model) if draft == INT8 else _load_draft(draft, model, tokenizer, device, dtype)
    return Pair(model, lambda: ModelDraft(hf.TransformersModel(assistant)), assistant, lambda count: {}), tokenizer


def _load_draft(
    draft: str, target: TransformersModel, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    from .. import hf

    path = SHIPPED.get(draft, draft)
    model, draft_tokenizer = hf.load_model(path, device), hf.load_tokenizer(path)
    if model.vocab_size != target.vocab_size or draft_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"draft: expected the tokens of the target ({target.vocab_size} logits, {len(tokenizer)} tokens), "
            f"got others ({model.vocab_size} logits, {len(draft_tokenizer)} tokens)"
        )
    return model.model.to(dtype)


def _quantised(target: TransformersModel) -> nn.Module:
    try:
        return quantised_copy(target.model, "int8")
    except ModuleNotFoundError as error:
        raise ValueError(f"draft: {error}") from error


def encode(tokenizer: Tokenizer, prompt: str) -> Tensor:
    """The prompt as [1, P] tokens, as a user's message where the tokenizer has a chat template."""
    if not prompt:
        raise ValueError("prompt: expected a text, got an empty one")
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # The template writes its own special tokens.
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
    return encoded["input_ids"]


def to_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device: expected cpu, cuda or cuda:1 and the like, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: {name!r} is not there, {torch.cuda.device_count()} CUDA devices are")
    return device


def set_threads(threads: int | None) -> None:
    if threads is None:
        return
    if threads < 1:
        raise ValueError(f"threads: expected a number >= 1, got {threads}")
    torch.set_num_threads(threads)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        # A heading alone says nothing: "backend='inductor' raised:".
        reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        print(f"torch-specops: error: {reason}", file=sys.stderr)
        raise typer.Exit(2) from None


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


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"draft: cannot read {path!r} as UTF-8 text: {error}") from error
