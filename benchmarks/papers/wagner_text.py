"""Wagner et al. 2024 on text: tables 1, 5, 6 and 8, tables 2 and 7, and the law behind them.

    python benchmarks/papers/wagner_text.py [--only PREFIX]

    austen    the byte-level pair of the package continues Austen; ROUGE-1 is taken against what she wrote
    topics    SmolLM2-135M-Instruct, with its own first 28 of 30 layers as the draft, is given a topic of Python's help
              without its first sentence, and "Summary:"; the reference is that sentence, as in XSum

Everything is drawn at temperature 1 from the 50 likeliest tokens (transformers' default), the number of drafts follows
transformers' heuristic from 5 on in each text (tables 1, 5, 6, 2 and 7) or stays constant (table 8). The ops are
compiled; "eager" runs them as they are. A cell is measured once (`evidence.py`); needs torch_specops[hf,evidence].
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from pydoc_data.topics import topics
from typing import Any

import torch
from evidence import Cell, reproduce
from rouge_score.rouge_scorer import RougeScorer
from subjects import HELDOUT, PAIR, missing
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging
from wagner_laws import distances, filtered
from wagner_methods import GAMMAS, METHODS, METHODS_FOR_TEXT, SCALES, calls, measure, without_compile

from torch_specops.cli.loading import SMOLLM2, Tokenizer, load_model, load_tokenizer

EXIT_LAYER = 28
PROMPT_BYTES = 256
ARTICLE_CHARACTERS = 600
TOP_K = 50


@cache
def pair(subject: str, device: str) -> tuple[PreTrainedModel, PreTrainedModel, Tokenizer]:
    if subject == "austen":
        target, draft = (load_model(PAIR / name, device).model for name in ("target", "draft"))
        return target, draft, load_tokenizer(PAIR / "target")
    adapter = load_model(SMOLLM2, device)
    draft = adapter.first_layers(EXIT_LAYER).prepared
    # Prepared models have an attention of the loop's own, which is not read again.
    draft.set_attn_implementation(adapter.model.config._attn_implementation)
    # The copy shares it with the target.
    draft.generation_config = copy.deepcopy(draft.generation_config)
    return adapter.model, draft, load_tokenizer(SMOLLM2)


def texts(subject: str, number: int) -> list[tuple[str, str]]:
    """Prompts and their references."""
    if subject == "austen":
        return passages(number, PROMPT_BYTES, 100, PROMPT_BYTES + 344)
    found = []
    for name in sorted(topics):
        # Title, first paragraph, the rest.
        _, *paragraphs = topics[name].strip().split("\n\n")
        if len(paragraphs) < 3:
            continue
        first, stop, more = " ".join(paragraphs[0].split()).partition(". ")
        sentence, article = first + stop.strip(), "\n\n".join([more, *paragraphs[1:]]).strip()
        if sentence.endswith(".") and 60 <= len(sentence) <= 200 and len(article) >= ARTICLE_CHARACTERS:
            found.append((f"{article[:ARTICLE_CHARACTERS].rsplit(' ', 1)[0]}\n\nSummary:", sentence))
    if len(found) < number:
        raise ValueError(f"topics: expected {number} texts, got {len(found)}")
    return found[:: len(found) // number][:number]


def passages(number: int, prompt_bytes: int, reference_bytes: int, last: int) -> list[tuple[str, str]]:
    """Prompts from the held-out text and what follows them, evenly spread up to `last` bytes before its end."""
    whole = HELDOUT.read_text(encoding="utf-8")
    starts = [whole.index(" ", index * (len(whole) - last) // number) for index in range(number)]
    ends = [start + prompt_bytes for start in starts]
    return [(whole[end - prompt_bytes : end], whole[end : end + reference_bytes]) for end in ends]


def encode(tokenizer: Tokenizer, text: str, device: str) -> Tensor:
    return tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False)["input_ids"].to(device)


def rouge(tokenizer: Tokenizer, outputs: Sequence[Sequence[int]], references: Sequence[str]) -> dict[str, float]:
    """Mean ROUGE-1 (F1, stemmed) of outputs in the order of their references, text by text, and its standard error."""
    scorer = RougeScorer(["rouge1"], use_stemmer=True)
    each = len(outputs) // len(references)
    said = [tokenizer.decode(output, skip_special_tokens=True) for output in outputs]
    pairs = [(references[index // each], text) for index, text in enumerate(said)]
    values = [scorer.score(*pair)["rouge1"].fmeasure for pair in pairs]
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"quality": statistics.fmean(values), "quality_error": error}


@torch.inference_mode()
def token_nats(model: PreTrainedModel, prompt: Tensor, output: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[n] -log p of the tokens of an output after a prompt [1, P]."""
    ids = torch.cat([prompt, torch.tensor([output], device=model.device)], 1)
    logits = model(ids, use_cache=False).logits[0, -len(output) - 1 : -1].float() / temperature
    return torch.nn.functional.cross_entropy(logits, ids[0, -len(output) :], reduction="none")


def nats(model: PreTrainedModel, prompts: Sequence[Tensor], outputs: Sequence[Sequence[int]]) -> float:
    """Mean of -log p of all new tokens under the target's law without a filter: how unlikely the text is for it.
    `outputs` are in the order of `rouge`."""
    each = len(outputs) // len(prompts)
    rows = [token_nats(model, prompts[index // each], output) for index, output in enumerate(outputs)]
    return torch.cat(rows).mean().item()


def decoded(
    subject: str,
    device: str,
    num_texts: int,
    num_seeds: int,
    max_new_tokens: int,
    methods: Mapping[str, Mapping[str, Any]],
    num_draft_tokens: int = 5,
    schedule: str = "heuristic_transient",
) -> dict[str, dict[str, Any]]:
    """The results of `measure` for every method, with ROUGE-1."""
    target, draft, tokenizer = pair(subject, device)
    numbers = {"num_assistant_tokens": num_draft_tokens, "num_assistant_tokens_schedule": schedule}
    draft.generation_config.update(**numbers, assistant_confidence_threshold=0.0)
    prompts, references = zip(*texts(subject, num_texts), strict=True)
    ids = [encode(tokenizer, prompt, device) for prompt in prompts]

    def decode(text: int, seed: int) -> list[int]:
        return sampled(target, ids[text], 1000 * seed + text, max_new_tokens, assistant_model=draft)

    found = measure(methods, decode, num_texts, range(num_seeds), target.config.vocab_size, device)
    for own in found.values():
        outputs = own.pop("outputs")
        own |= rouge(tokenizer, outputs, references) | {"nats": nats(target, ids, outputs)}
        own |= {key: round(value, 6) for key, value in own.items() if isinstance(value, float)}
    return found


def sampled(model: PreTrainedModel, ids: Tensor, seed: int, max_new_tokens: int, **named: Any) -> list[int]:
    torch.manual_seed(seed)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=TOP_K,
        max_new_tokens=max_new_tokens, pad_token_id=0, **named,
    )  # fmt: skip
    return output[0, ids.shape[1] :].tolist()


def draft_alone(subject: str, device: str, num_texts: int, num_seeds: int, max_new_tokens: int) -> dict[str, float]:
    """The quality of the draft's text without a target, which "sigmoid" comes close to."""
    target, draft, tokenizer = pair(subject, device)
    prompts, references = zip(*texts(subject, num_texts), strict=True)
    ids = [encode(tokenizer, prompt, device) for prompt in prompts]
    runs = product(range(num_texts), range(num_seeds))
    outputs = [sampled(draft, ids[text], 1000 * seed + text, max_new_tokens) for text, seed in runs]
    return rouge(tokenizer, outputs, references) | {"nats": nats(target, ids, outputs)}


@cache
@torch.inference_mode()
def logits(subject: str, device: str, windows: int, window: int) -> tuple[Tensor, Tensor]:
    """[N, V] of target and draft on windows of human text, at the positions from the 64th on."""
    target, draft, tokenizer = pair(subject, device)
    text = HELDOUT.read_text(encoding="utf-8")
    if subject != "austen":
        text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = encode(tokenizer, text[: 8 * windows * window], device)[:, : windows * window].view(windows, window)
    rows = [[model(row.unsqueeze(0), use_cache=False).logits[0, 64:] for row in ids] for model in (target, draft)]
    p, q = map(torch.cat, rows)
    return p, q


def laws(subject: str, device: str, windows: int, window: int, top_k: int) -> dict[str, Any]:
    return distances(*(filtered(rows, top_k) for rows in logits(subject, device, windows, window)))


def cells_of(chosen: Any) -> list[Cell]:
    # num_texts, num_seeds, max_new_tokens
    sizes = {"austen": (16, 1, 100), "topics": (4, 1, 24)}
    gamma_sizes = {"austen": (4, 1, 60), "topics": (1, 1, 12)}
    # windows, window
    law_sizes = {"austen": (8, 512), "topics": (1, 192)}

    def settings(subject: str, size: tuple[int, int, int], **more: Any) -> dict[str, Any]:
        names = ("num_texts", "num_seeds", "max_new_tokens")
        return {"subject": subject, "device": chosen.device} | dict(zip(names, size, strict=True)) | more

    def add(key: str, measure: Callable[..., Any], settings: dict[str, Any]) -> None:
        cells.append(Cell(key, measure, settings, missing(settings["subject"])))

    cells: list[Cell] = []
    for vocab_size in (256, 49152):
        call = {"methods": METHODS, "vocab_size": vocab_size, "numbers": list(GAMMAS), "rounds": 40}
        cells.append(Cell(f"calls/V={vocab_size}", calls, call | {"device": chosen.device}))
    for subject, size in sizes.items():
        law = {"subject": subject, "device": chosen.device}
        law |= dict(zip(("windows", "window"), law_sizes[subject], strict=True))
        for top_k in (0, TOP_K):
            add(f"laws/{subject}/top_k={top_k}", laws, law | {"top_k": top_k})
        add(f"main/{subject}", decoded, settings(subject, size, methods=METHODS_FOR_TEXT))
        if subject == "austen":
            add(f"eager/{subject}", decoded, settings(subject, size, methods=without_compile(METHODS_FOR_TEXT)))
        add(f"scales/{subject}", decoded, settings(subject, size, methods=SCALES))
        add(f"draft alone/{subject}", draft_alone, settings(subject, size))
        for gamma in GAMMAS:
            constant = {"methods": METHODS_FOR_TEXT, "num_draft_tokens": gamma, "schedule": "constant"}
            add(f"gamma/{subject}/{gamma}", decoded, settings(subject, gamma_sizes[subject], **constant))
    return cells


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return reproduce("wagner_text", __doc__, cells_of, arguments, packages=["rouge-score"])


if __name__ == "__main__":
    main()
