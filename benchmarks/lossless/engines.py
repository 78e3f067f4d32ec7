"""What a row of the table runs, and the tiny models that all rows use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from torch_specops import SamplingParams

VOCAB = 5
NUM_DRAFT_TOKENS = 2
# Prompts of two lengths, in which the last tokens occur before, so that lookups find drafts.
PROMPTS = [[1, 0, 2, 1, 0], [3, 1, 4, 3, 1, 2, 3, 1]]
# With these bounds, rounding does not decide which tokens a filter keeps: none is within 1e-4 of top-p.
SETTINGS = {
    "T = 1": SamplingParams(temperature=1.0),
    "T = 0.7, top-k 4, top-p 0.88": SamplingParams(temperature=0.7, top_k=4, top_p=0.88),
}
# For peers without top-k.
SETTINGS_TOP_P = {
    "T = 1": SETTINGS["T = 1"],
    "T = 0.7, top-p 0.8": SamplingParams(temperature=0.7, top_p=0.8),
}


# Texts [N, t] -> logits [N, V] of the next token.
Law = Callable[[Tensor], Tensor]


class Engine(Protocol):
    """Continues prompts.

    Attributes:
        law: that of the target, before temperature and filters.
        steps, tokens: how often the target has read, summed over texts, and how many tokens came of it; 0 = not known.
    """

    law: Law
    steps: int
    tokens: int

    def __call__(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], seeds: Sequence[int], length: int
    ) -> list[list[int]]: ...


@dataclass(frozen=True)
class Row:
    """A way to decode.

    Args:
        package: its distribution on PyPI; "" for code that is in this folder.
        way: what it is, for the table.
        make: the engine. An ImportError says that a package is missing.
        trials: texts for each setting.
        settings: those in which texts are sampled.
        greedy: whether it has greedy texts.
    """

    package: str
    way: str
    make: Callable[[], Engine]
    trials: int
    settings: Mapping[str, SamplingParams] = field(default_factory=lambda: SETTINGS)
    greedy: bool = True


@torch.no_grad()
def randomised(model: PreTrainedModel, seed: int, scale: float = 0.2) -> PreTrainedModel:
    """The model with sharp random weights, in float32 and without an eos. Norms stay."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    if model.can_generate():
        model.generation_config.eos_token_id = None
    return model.float().eval()


@torch.no_grad()
def perturbed(model: PreTrainedModel, scale: float = 0.1) -> PreTrainedModel:
    """A copy that does not always agree: a draft of which some are accepted and some are rejected."""
    draft, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for parameter in draft.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return draft


@torch.no_grad()
def tiny_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A Qwen3 and its draft, with sum min(p, q) about 0.6. float16 can hold their weights, as files of OpenVINO do."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    target = randomised(Qwen3ForCausalLM(config), 4)
    draft = perturbed(target)
    for parameter in (*target.parameters(), *draft.parameters()):
        parameter.copy_(parameter.half())
    return target, draft


def law_of(target: nn.Module) -> Law:
    return lambda text: target(text, use_cache=False).logits[:, -1]
