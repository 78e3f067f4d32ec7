"""Log-probabilities of emitted tokens come from the step that emitted them, and are those of a plain forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import PROMPTS, padded, tiny
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import torch_specops
from torch_specops import SamplingParams, SpeculativeDecoder
from torch_specops.drafts import PromptLookup

SAMPLING: dict[str, Any] = {
    "repetition_penalty": [1.5, 1.2, 1.0],
    "no_repeat_ngram_size": [2, 0, 0],
    "temperature": [0.7, 0.0, 1.3],
    "top_k": [20, 3, 8],
    "top_p": [1.0, 1.0, 0.8],
}
PROCESSORS = (
    RepetitionPenaltyLogitsProcessor,
    lambda size: NoRepeatNGramLogitsProcessor(size or LENGTH),
    lambda temperature: TemperatureLogitsWarper(temperature or 1.0),
    TopKLogitsWarper,
    TopPLogitsWarper,
)
# Longer than any text here.
LENGTH = 99


def plain_log_probabilities(model: Any, tokens: list[int], row: int, logprobs: str) -> Tensor:
    """The log-probability of each token but the first, by a forward without a cache."""
    logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    if logprobs == "processed":
        if SAMPLING["temperature"][row] == 0:
            return torch.zeros(len(tokens) - 1)
        made = [make(values[row]) for make, values in zip(PROCESSORS, SAMPLING.values(), strict=True)]
        processors = LogitsProcessorList(made)
        texts = [torch.tensor([tokens[:length]]) for length in range(1, len(tokens))]
        logits = torch.cat([processors(text, each.unsqueeze(0)) for text, each in zip(texts, logits, strict=True)])
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("logprobs", ["raw", "processed"])
@pytest.mark.parametrize(
    ("draft", "compile"),
    [(None, False), ("model", False), ("lookup", False), pytest.param("model", True, marks=pytest.mark.slow)],
)
@torch.inference_mode()
def test_log_probabilities_are_those_of_a_plain_forward(draft: str | None, compile: bool, logprobs: str) -> None:
    """Rows are ragged, greedy and sampled, with processors, with filters and without, and end at different steps."""
    model = tiny("llama")
    sources = {None: None, "model": tiny("llama", num_hidden_layers=1), "lookup": PromptLookup(min_ngram=1)}
    decoder = SpeculativeDecoder(
        model, sources[draft], num_draft_tokens=3, sampling=SamplingParams(**SAMPLING), compile=compile
    )
    tokens, mask = padded(PROMPTS[:3], "left")
    given = {"attention_mask": mask, "max_new_tokens": [9, 5, 12], "seed": 0}
    output = decoder.generate(tokens, **given, logprobs=logprobs)
    assert output.logprobs is not None and output.logprobs.shape == output.sequences.shape
    for row, (start, end) in enumerate(zip(output.prompt_lengths.tolist(), output.lengths.tolist(), strict=True)):
        expected = torch.full((output.sequences.shape[1],), torch.nan)
        text = output.sequences[row, :end].tolist()
        expected[1:end] = plain_log_probabilities(model, text, row, logprobs)
        expected[:start] = torch.nan
        torch.testing.assert_close(output.logprobs[row], expected, rtol=0, atol=1e-5, equal_nan=True)
    # The same decoder without them, and with the others, whose tensors have the same shapes.
    again = decoder.generate(tokens, **given)
    assert again.logprobs is None and torch.equal(again.sequences, output.sequences)
    other = decoder.generate(tokens, **given, logprobs="processed" if logprobs == "raw" else "raw").logprobs
    assert other is not None and not torch.equal(other.nan_to_num(), output.logprobs.nan_to_num())


def test_a_wrong_kind_is_named() -> None:
    with pytest.raises(ValueError, match="logprobs: expected None, 'raw' or 'processed', got 'top'"):
        torch_specops.generate(tiny("llama"), torch.tensor([[1, 2]]), logprobs="top")
