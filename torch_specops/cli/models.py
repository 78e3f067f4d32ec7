"""The target and the draft that a command names, and prompts as tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ..drafts import (
    MTP,
    DFlash,
    DraftSource,
    Eagle3,
    EarlyExit,
    Gemma4Assistant,
    LookupElse,
    NGram,
    PEagle,
    PromptLookup,
    SuffixLookup,
    quantised_copy,
)
from .loading import (
    HEADS,
    SMOLLM2,
    Tokenizer,
    check_hub,
    check_name,
    import_transformers,
    is_folder,
    load_model,
    load_module,
    load_tokenizer,
    read_text,
    smollm2_directory,
    smollm2_is_converted,
)

if TYPE_CHECKING:
    from ..hf import TransformersModel

# Values of `--draft`.
PROMPT_LOOKUP, SUFFIX_LOOKUP = "prompt-lookup", "suffix-lookup"
# The number after this prefix is the length of the longest match. Prompt lookup then works as in transformers.
TRANSFORMERS_LOOKUP = "prompt-lookup:"
NGRAM, EARLY_EXIT = "ngram:", "early-exit:"
EAGLE3, PEAGLE, DFLASH = "eagle3:", "peagle:", "dflash:"
PUBLISHED: dict[str, type[Eagle3 | PEagle | DFlash]] = {EAGLE3: Eagle3, PEAGLE: PEagle, DFLASH: DFlash}
INT8, OWN_MTP = "int8", "mtp"
# Another value of `--draft` comes after this prefix.
LOOKUP_ELSE = "lookup-else:"

# Most of the answer can be copied from the question, so prompt lookup works well.
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


@dataclass(frozen=True)
class Models:
    """A target, a draft, and how transformers gets the same draft."""

    target: TransformersModel
    draft: DraftSource | nn.Module
    # Maps K to the arguments of transformers' `generate` for this draft; None = transformers has no such draft.
    assistance: Callable[[int], dict[str, Any] | None] = lambda count: None


def default_num_draft_tokens(source: object) -> int:
    """K if the user gives none: the draft's default, or 2, because each draft token of a draft model costs a
    forward."""
    return getattr(source, "default_draft_tokens", None) or 2


def num_assisted_tokens(source: object, num_draft_tokens: int | None) -> int:
    """K of transformers' assisted generation, given the user's K or None. It is K of this package, except for a
    `LookupElse`, of which transformers has the other source alone: the large K of a lookup would slow it down. So K is
    this source's default, or at most the number that the `LookupElse` asks of it."""
    if not isinstance(source, LookupElse):
        return num_draft_tokens or default_num_draft_tokens(source)
    if num_draft_tokens is None:
        return default_num_draft_tokens(source.other)
    return min(num_draft_tokens, source.num_other_tokens)


def load_models(
    console: Console, target: str, draft: str, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Models, Tokenizer]:
    """Load the target, the draft and the target's tokenizer. The console shows which slow part is running."""
    check_name("target", target)
    looks_up_first, draft = draft.startswith(LOOKUP_ELSE), draft.removeprefix(LOOKUP_ELSE)
    if not draft or draft.startswith(LOOKUP_ELSE):
        raise ValueError(f"draft: expected another draft after {LOOKUP_ELSE!r}, got {draft!r}")
    if not draft.startswith((TRANSFORMERS_LOOKUP, NGRAM, EARLY_EXIT, *PUBLISHED)):
        others = [PROMPT_LOOKUP, SUFFIX_LOOKUP, INT8, OWN_MTP, f"{NGRAM}FILE", f"{EARLY_EXIT}N"]
        others += [f"{prefix}FOLDER" for prefix in PUBLISHED]
        check_name("draft", draft, (*others, f"{LOOKUP_ELSE}NAME"))
    elif draft.startswith(tuple(PUBLISHED)) and (name := draft.partition(":")[2]) not in HEADS:
        if not name:
            raise ValueError(f"draft: expected a folder or a hub id after {draft!r}")
        check_hub("draft", name)
    with spinner(console, "loading transformers"):
        import_transformers()
    if SMOLLM2 in (target, draft) and not smollm2_is_converted():
        message = f"converting the weights of {SMOLLM2} (once, about 30 s)"
        console.print(message)
        with spinner(console, message):
            smollm2_directory()
    with _loading(console, target):
        model, tokenizer = load_model(target, device, "target"), load_tokenizer(target, "target")
        model.model.to(dtype)
    with _loading(console, draft):
        models = _with_draft(draft, model, tokenizer)
        # transformers has no such draft, so compare with the other draft alone.
        models = replace(models, draft=LookupElse(models.draft)) if looks_up_first else models
        return models, tokenizer


def animates(console: Console) -> bool:
    """Whether spinners and bars can move. A cell of a notebook shows each of their pictures in a new line, although its
    commands run in a terminal; Jupyter sets JPY_PARENT_PID for them."""
    return console.is_terminal and "JPY_PARENT_PID" not in os.environ


def spinner(console: Console, text: str) -> AbstractContextManager[object]:
    return console.status(text) if animates(console) else nullcontext()


def _with_draft(draft: str, target: TransformersModel, tokenizer: Tokenizer) -> Models:
    if draft == PROMPT_LOOKUP:
        return Models(target, PromptLookup(), lambda count: {"prompt_lookup_num_tokens": count})
    if draft == SUFFIX_LOOKUP:
        # Turn the memory off, because later rounds would find the output of the first round in it. transformers has no
        # suffix lookup, so compare with its prompt lookup.
        return Models(target, SuffixLookup(memory=0), lambda count: {"prompt_lookup_num_tokens": count})
    if draft.startswith(TRANSFORMERS_LOOKUP):
        longest = _number_after(TRANSFORMERS_LOOKUP, "the longest match", draft)
        fields = {"max_matching_ngram_size": longest}
        lookup = PromptLookup(longest, 1, repeat=False)
        return Models(target, lookup, lambda count: fields | {"prompt_lookup_num_tokens": count})
    if draft.startswith(NGRAM):
        text = read_text("draft", Path(draft.removeprefix(NGRAM)))
        tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"][0]
        return Models(target, NGram.from_tokens(tokens, vocab_size=target.vocab_size, device=target.device))
    if draft.startswith(EARLY_EXIT):
        layers = _number_after(EARLY_EXIT, "a number of layers", draft)
        try:
            target.first_layers(layers)
        except ValueError as error:
            raise ValueError(f"draft: {draft!r}: {error}") from error
        return Models(target, EarlyExit(layers), lambda count: {"assistant_early_exit": layers})
    prefix, colon, name = draft.partition(":")
    if kind := PUBLISHED.get(prefix + colon):
        return Models(target, kind.from_pretrained(HEADS.get(name, name), target))
    if draft == OWN_MTP:
        # transformers drafts exactly one token with each MTP layer, so it can take part in the comparison only if K is
        # the number of layers.
        depth = getattr(target.model.config.get_text_config(), "num_mtp_layers", None)
        mtp = MTP.from_pretrained(target)
        return Models(target, mtp, lambda count: {"use_mtp": True} if count == depth else None)
    own = quantised_copy(target.model, "int8") if draft == INT8 else _smaller_model(draft, target, tokenizer)
    smaller = own.model.model if isinstance(own, Gemma4Assistant) else own
    return Models(target, own, lambda count: {"assistant_model": smaller})


def _number_after(prefix: str, what: str, draft: str) -> int:
    number = draft.removeprefix(prefix)
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(f"draft: expected {what} after '{prefix}', got {number!r}")
    return int(number)


def _smaller_model(name: str, target: TransformersModel, tokenizer: Tokenizer) -> Gemma4Assistant | nn.Module:
    """A model with the target's tokens, or a Gemma 4 assistant, which compares its sizes with the target's."""
    # transformers takes seconds to import.
    from ..hf import language_model
    from ..hf.gemma4_assistant import is_gemma4_assistant

    model = load_module(name, target.device, "draft").to(target.model.dtype)
    if is_gemma4_assistant(model):
        return Gemma4Assistant(model)
    vocab_size, own_tokenizer = language_model(model).vocab_size, load_tokenizer(name, "draft")
    if vocab_size != target.vocab_size or own_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"draft: expected a model with the target's tokens ({target.vocab_size} logits, {len(tokenizer)} tokens), "
            f"got other tokens ({vocab_size} logits, {len(own_tokenizer)} tokens)"
        )
    return model


def _loading(console: Console, name: str) -> AbstractContextManager[object]:
    """Show a spinner while files are read, but not for a download, because the spinner would hide its progress bars."""
    is_here = name in (INT8, OWN_MTP) or name.startswith(NGRAM)
    is_here = is_here or is_folder(name.partition(":")[2] if name.startswith(tuple(PUBLISHED)) else name)
    return spinner(console, f"loading {name}") if is_here else nullcontext()


def encode(tokenizer: Tokenizer, prompt: str) -> Tensor:
    """The prompt as [1, P] tokens, as a user's message if the tokenizer has a chat template."""
    if not prompt:
        raise ValueError("prompt: expected a text, got an empty one")
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    # Add no special tokens after a chat template, because it already contains them.
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
    return encoded["input_ids"]
