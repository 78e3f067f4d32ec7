"""Scores and logits that `custom_generate` returns are those of transformers, one row of numbers for each token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generate_calls import arguments, ours, plain
from tiny_loops import DRAFTS, Late
from tiny_models import PROMPTS, perturbed, shared_tiny
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation import GenerateEncoderDecoderOutput

from torch_specops.decode import batch as batch_module
from torch_specops.drafts import PromptLookup

TARGET = shared_tiny("llama")
ASKED: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
CALL: dict[str, Any] = {**arguments("llama"), **ASKED, "max_new_tokens": 12, "pad_token_id": 11}
WIDTH = CALL["input_ids"].shape[1]


def check(found: Any, expected: Any, lengths: list[int]) -> None:
    """Up to the end of each row; then there is no number."""
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(found[name]) == len(expected[name]) == max(lengths)
        for place, (own, other) in enumerate(zip(found[name], expected[name], strict=True)):
            ended = torch.tensor(lengths).unsqueeze(1) <= place
            assert own.dtype == other.dtype == torch.float32 and not own.is_inference()
            torch.testing.assert_close(own, other.masked_fill(ended, torch.nan), equal_nan=True)


class Doubtful(StoppingCriteria):
    """Stops a row whose scores are close, and keeps them."""

    def __init__(self, gap: float) -> None:
        self.gap = gap
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        assert len(scores) == input_ids.shape[1] - WIDTH
        best = scores[-1].topk(2).values
        self.seen.append(best.clone())
        return best[:, 0] - best[:, 1] < self.gap


class Strict(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert not bool(scores.isnan().any())
        return scores


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("draft", ["nothing", "prompt lookup", "perturbed"])
def test_greedy_rows_have_the_scores_of_transformers(draft: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end at different places, by an eos and by a criterion that looks at the scores; a processor looks at the
    text, and one takes no NaN."""
    if late:
        monkeypatch.setattr(batch_module, "RecordReader", Late)
    free = plain(TARGET, **CALL).sequences[:, WIDTH:]
    options = {**CALL, "repetition_penalty": 1.5, "eos_token_id": int(free[0, 4])}
    options["logits_processor"] = LogitsProcessorList([Strict()])
    gaps = set()
    for gap in (0.0, 0.05, 0.5):
        both = [Doubtful(gap), Doubtful(gap)]
        expected = plain(TARGET, **options, stopping_criteria=StoppingCriteriaList(both[:1]))
        drafts = {"draft_model": DRAFTS[draft]("llama"), "num_draft_tokens": 4}
        found = ours(TARGET, **options, stopping_criteria=StoppingCriteriaList(both[1:]), **drafts)
        new = expected.sequences[:, WIDTH:].tolist()
        lengths = [row.index(11) if 11 in row else len(row) for row in new]
        check(found, expected, lengths)
        gaps.add(tuple(lengths))
        for place, (own, other) in enumerate(zip(both[1].seen, both[0].seen, strict=True)):
            # Of rows that have ended, transformers shows what would come after the padding.
            live = torch.tensor(lengths) > place
            torch.testing.assert_close(own[live], other[live])
    assert len(gaps) == 3


def test_scores_of_sampled_rows() -> None:
    prompt = torch.tensor([PROMPTS[0]]).expand(4, -1)
    sampled = {"do_sample": True, "temperature": 1.5, "top_k": 7, "seed": 3}
    options = {**CALL, "input_ids": prompt, "attention_mask": torch.ones_like(prompt), **sampled}
    found = ours(TARGET, **options, draft_model=perturbed(TARGET))
    with torch.no_grad():
        logits = TARGET(found.sequences).logits.float()[:, prompt.shape[1] - 1 : -1].unbind(1)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(1.5), TopKLogitsWarper(7)])
    torch.testing.assert_close(found.logits, tuple(logits))
    torch.testing.assert_close(found.scores, tuple(warpers(found.sequences, row) for row in logits))
    # As transformers' own function reads them.
    transition = TARGET.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    assert transition.shape == (4, 12) and bool((transition.exp() > 0).all())


def test_an_encoder_decoder_has_them_too() -> None:
    """With a draft that has no config, which transformers would look into."""
    options = {**arguments("t5"), **ASKED, "max_new_tokens": 6}
    found = ours(shared_tiny("t5"), **options, assistant_model=PromptLookup(1, 1), schedule="constant")
    check(found, plain(shared_tiny("t5"), **options), [6, 6, 6])
    assert isinstance(found, GenerateEncoderDecoderOutput)
    assert found.stats.num_proposed > 0 and len(found.stats.seeds) == 3


def test_scores_come_from_eager_steps() -> None:
    eager = ours(TARGET, **CALL)
    assert eager.stats.compiled == "eager: scores and logits are kept"
    with pytest.raises(ValueError, match="compile: expected False or 'auto', got True: scores and logits are kept"):
        ours(TARGET, **CALL, compile=True)
    none = ours(TARGET, **(CALL | {"output_scores": False}))
    assert none.scores is None and torch.equal(none.logits[3], eager.logits[3])
    assert ours(TARGET, **(CALL | {"output_logits": False})).logits is None
    assert torch.equal(ours(TARGET, **(CALL | {"return_dict_in_generate": False})), eager.sequences)
    # The loop that measures the cost of a draft first.
    again = ours(TARGET, **CALL, draft_model=perturbed(TARGET), schedule="auto")
    torch.testing.assert_close(again.logits, eager.logits)
