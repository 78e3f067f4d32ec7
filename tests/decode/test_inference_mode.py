"""Steps are computed in inference mode, or only without gradients where a model is observed (`is_observed`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_loops import DRAFTS, GREEDY
from tiny_models import encoder_inputs, perturbed, shared_tiny
from tiny_requests import texts, texts_alone
from torch import Tensor, nn

from torch_specops import Request, SpeculativeDecoder
from torch_specops.beam import beam_search
from torch_specops.drafts import HierarchicalDraft, LanguageModel, SuffixLookup
from torch_specops.hf import language_model

IDS = torch.tensor([[1, 2], [3, 4]])


class Observed(LanguageModel):
    """A model, the observers of which come and go."""

    is_observed = False
    modes: Sequence[tuple[bool, bool]] = ()

    def forward(self, *arguments: Any) -> Tensor:
        self.modes = [*self.modes, (torch.is_inference_mode_enabled(), torch.is_grad_enabled())]
        return super().forward(*arguments)


def observed(model: nn.Module) -> Any:
    adapter: Any = language_model(model)
    adapter.__class__ = type("Adapter", (Observed, type(adapter)), {})
    return adapter


@pytest.mark.parametrize(
    ("family", "draft", "first"),
    [
        ("llama", "prompt lookup", False),
        ("llama", "suffix lookup", True),
        ("llama", "perturbed", False),
        ("llama", "eagle 3", True),
        ("llama", "hierarchical", False),
        ("t5", "perturbed", True),
    ],
)
def test_inference_mode_may_end_between_steps(family: str, draft: str, first: bool) -> None:
    """Tensors of either mode serve in the other; `first` is whether the model is observed at first."""
    target = observed(shared_tiny(family))
    source = SuffixLookup() if draft == "suffix lookup" else DRAFTS[draft](family)
    decoder = SpeculativeDecoder(target, source, num_draft_tokens=3, sampling=GREEDY)
    given = [
        Request([1, 17, 5, 17, 5], 6 + row, eos_token_id=(), inputs=encoder_inputs(family, slice(row % 2, row % 2 + 1)))
        for row in range(5)
    ]
    expected = texts_alone(decoder, given)
    target.is_observed = first
    with decoder.session(2, max_length=40) as session:
        handles = []
        for request in given:
            target.modes = []
            handles.append(session.submit(request))
            while session.num_free < 1 and not session.is_idle:
                session.step()
                # `start` and what comes with it runs without a mode.
                assert target.modes[-1] == (not target.is_observed, False)
            target.is_observed = not target.is_observed
        while not session.is_idle:
            session.step()
    assert texts([handle.result() for handle in handles]) == expected


def test_inference_mode_is_that_of_every_model() -> None:
    """An observed draft keeps the target out of inference mode too, also if it stands inside another draft; and so does
    beam search."""
    model = shared_tiny("llama")
    target, small = observed(model), observed(perturbed(model))
    for draft in (small, HierarchicalDraft(shared_tiny("llama", seed=3), small)):
        decoder = SpeculativeDecoder(target, draft, sampling=GREEDY)
        for is_observed in (True, False):
            small.is_observed, target.modes = is_observed, []
            decoder.generate(IDS, max_new_tokens=4)
            assert set(target.modes) == {(not is_observed, False)}
    for is_observed in (True, False):
        small.is_observed, target.modes = is_observed, []
        beam_search(target, IDS, num_beams=2, draft=small, max_new_tokens=4)
        assert set(target.modes) == {(not is_observed, False)}
