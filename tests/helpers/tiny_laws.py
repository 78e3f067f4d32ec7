"""The joint law of the first three tokens that the loop samples, by chi-square.

TRIALS rows are decoded in one batch, row b with seed SEED + b. Half of them have one prompt and half a shorter one, so
that the batch is ragged. With V = 6 tokens there are 216 texts of three tokens; `chi_square` merges those expected
fewer than 5 times. The exact law is the product of the target's softmaxes. A law fails below ALPHA of chains.py, and a
wrong loop has to fall below the same ALPHA.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from tiny_models import PairModel, padded, random_table, tiny
from torch import Tensor, nn
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from torch_specops import Grammar, SamplingParams, SpeculativeDecoder
from torch_specops.drafts import Draft, DraftSource, LanguageModel, ModelDraft, NGram, PromptLookup
from torch_specops.drafts.hierarchical import HierarchicalDraft
from torch_specops.drafts.token_map import TokenMap
from torch_specops.schedules import Schedule
from torch_specops.testing import chi_square

V = 6
TRIALS = 8_000
# A transformer takes longer, and wrong loops show sooner.
FEWER_TRIALS = 4_000
SEED = 1000
# With repeated pairs, so that prompt lookup has something to say.
PROMPTS = ([1, 0, 2, 0, 3, 0], [4, 5, 4])
LENGTH = 3

TARGET = random_table(V, seed=1, scale=1.2)
TABLES = {"opposite": -TARGET, "close": TARGET + random_table(V, seed=2, scale=0.4)}
# To a draft with five tokens, in another order; one of the target's has no twin.
TWINS = torch.tensor([3, 0, -1, 4, 2, 1])


def ngram(**options: Any) -> NGram:
    # Skewed, so that counts differ, and temperatures with them.
    text = V * torch.rand(600, generator=torch.Generator().manual_seed(4)) ** 2
    return NGram.from_tokens(text.long(), vocab_size=V, **options)


def make_draft(kind: str) -> DraftSource | None:
    if kind in TABLES:
        return ModelDraft(PairModel(TABLES[kind]))
    drafts: dict[str, DraftSource | None] = {
        "nothing": None,
        "prompt lookup": PromptLookup(min_ngram=1),
        "n-gram": ngram(),
        "n-gram with counts": ngram(probabilities=True),
        "n-gram with two continuations": ngram(probabilities=True, max_candidates=2),
        "over prompt lookup": HierarchicalDraft(PairModel(TABLES["close"]), PromptLookup(min_ngram=1), num_forwards=2),
        "over n-gram": HierarchicalDraft(PairModel(TABLES["close"]), ngram(), num_inner_tokens=1, num_forwards=4),
        "over a model": HierarchicalDraft(
            PairModel(TABLES["close"]), PairModel(TABLES["opposite"]), num_inner_tokens=2
        ),
        "over counts": HierarchicalDraft(PairModel(TABLES["close"]), ngram(probabilities=True), num_inner_tokens=2),
        "other vocabulary": ModelDraft(TokenMap(PairModel(random_table(V - 1, seed=2)), TWINS, unknown=4)),
    }
    return drafts[kind]


def prompts(trials: int, side: str = "left") -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask; even rows are the first prompt, odd rows the second one."""
    input_ids, mask = padded(PROMPTS, side)
    return input_ids.repeat(trials // 2, 1), mask.repeat(trials // 2, 1)


def first_tokens(
    target: LanguageModel | nn.Module,
    draft: DraftSource | LanguageModel | nn.Module | None,
    num_draft_tokens: int,
    temperature: float | Tensor = 1.0,
    trials: int = TRIALS,
    verify: str = "exact",
    grammar: Callable[[int], Grammar | None] | None = None,
    schedule: str | Schedule = "constant",
    **filters: Any,
) -> Tensor:
    """[trials, 3] what the loop emits; row b with the grammar of b."""
    decoder = SpeculativeDecoder(
        target,
        draft,
        num_draft_tokens=num_draft_tokens,
        sampling=SamplingParams(temperature=temperature, **filters),
        verify=verify,
        schedule=schedule,
    )
    input_ids, mask = prompts(trials)
    options: dict[str, Any] = {"max_new_tokens": LENGTH, "seed": SEED, "eos_token_id": (), "pad_token_id": 0}
    if grammar is not None:
        options["grammar"] = [grammar(row) for row in range(trials)]
    output = decoder.generate(input_ids, attention_mask=mask, **options)
    return output.sequences.gather(1, output.prompt_lengths.unsqueeze(1) + torch.arange(LENGTH))


def drafts_of(source: DraftSource, num_draft_tokens: int, temperature: float = 1.0, trials: int = TRIALS) -> Draft:
    """What the source proposes after the prompts."""
    tokens, mask = prompts(trials, "right")
    # The padding is a token of a larger vocabulary.
    tokens, lengths = tokens * mask, mask.sum(1)
    source.start(tokens, lengths, tokens.shape[1] + num_draft_tokens + 1)
    sampling = SamplingParams(temperature=temperature).tensors(trials)
    return source.propose(tokens, lengths, num_draft_tokens, sampling, SEED + torch.arange(trials))


def p_values(tokens: Tensor, laws: list[Tensor]) -> dict[str, float]:
    """Of texts [trials, 3]."""
    text = tokens @ torch.tensor([V * V, V, 1])
    return {
        f"prompt {row}": chi_square(torch.bincount(text[row::2], minlength=V**3), law.flatten())
        for row, law in enumerate(laws)
    }


def filtered(logits: Tensor, **filters: Any) -> Tensor:
    """What transformers leaves of logits [.., V]."""
    warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    rows = logits.reshape(-1, V)
    for name in (name for name in warpers if name in filters):
        rows = warpers[name](filters[name])(None, rows)
    return rows.reshape(logits.shape)


def pair_laws(table: Tensor, temperature: float = 1.0, **filters: Any) -> list[Tensor]:
    """[V, V, V] for each prompt."""
    p = torch.softmax(filtered(table.double() / temperature, **filters), -1)
    return [joint_law(lambda text, prompt=prompt: p[tuple([*prompt, *text][-2:])]) for prompt in PROMPTS]


def joint_law(next_law: Callable[[list[int]], Tensor]) -> Tensor:
    """[V, V, V] of three tokens, given the law [V] of the next one after none, one or two of them."""
    second = torch.stack([next_law([i]) for i in range(V)])
    third = torch.stack([torch.stack([next_law([i, j]) for j in range(V)]) for i in range(V)])
    return next_law([])[:, None, None] * second[:, :, None] * third


@torch.inference_mode()
def model_laws(model: nn.Module, temperature: float) -> list[Tensor]:
    """[V, V, V] for each prompt, from full forwards over every text."""
    laws = []
    for prompt in PROMPTS:
        law = torch.ones((), dtype=torch.float64)
        for count in range(LENGTH):
            texts = torch.tensor([[*prompt, *new] for new in product(range(V), repeat=count)])
            # The decoder sees float32 logits.
            p = torch.softmax(model(texts).logits[:, -1].float().double() / temperature, -1)
            law = law.unsqueeze(-1) * p.view(*law.shape, V)
        laws.append(law)
    return laws


def tiny_transformer() -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return tiny("llama", vocab=V, num_attention_heads=1, num_key_value_heads=1, **sizes).float()
