"""The decoding loop on a GPU: `make test-gpu`. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCAB, perturbed, tiny

from torch_specops import GenerationOutput, SamplingParams, SpeculativeDecoder
from torch_specops.drafts import DraftSource, ModelDraft, PromptLookup
from torch_specops.hf import language_model

pytestmark = pytest.mark.gpu

PROMPTS = torch.randint(3, VOCAB, (3, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 7, [0] * 6 + [1], [1] * 4 + [0] * 3])


def decoder(device: str, kind: str, **options: object) -> SpeculativeDecoder:
    target = tiny("llama").to(device)
    draft: DraftSource | None = PromptLookup(min_ngram=1) if kind == "lookup" else None
    if kind == "model":
        draft = ModelDraft(language_model(perturbed(tiny("llama"), 0.05).to(device)))
    settings = {"num_draft_tokens": 4, "sampling": SamplingParams(temperature=[0.0, 0.8, 0.0])} | options
    return SpeculativeDecoder(target, draft, **settings)


def run(loop: SpeculativeDecoder, **options: object) -> GenerationOutput:
    device = loop.target.device
    settings = {"attention_mask": MASK.to(device), "max_new_tokens": [20, 30, 9], "seed": 3} | options
    return loop.generate(PROMPTS.to(device), **settings)


@pytest.mark.parametrize("kind", ["none", "lookup", "model"])
def test_captured_steps_give_the_tokens_of_the_cpu(kind: str) -> None:
    expected = run(decoder("cpu", kind, compile=False))
    eager = run(decoder("cuda", kind, compile=False))
    loop = decoder("cuda", kind)
    captured = [run(loop), run(loop)]
    assert loop._runner._graphs
    for output in (eager, *captured):
        assert torch.equal(output.sequences.cpu(), expected.sequences)
        assert torch.equal(output.lengths.cpu(), expected.lengths)
    assert captured[1].stats.compile_seconds == 0


def test_a_step_waits_for_nothing() -> None:
    loop = decoder("cuda", "model")
    run(loop)
    loop.stream(PROMPTS.cuda(), attention_mask=MASK.cuda(), max_new_tokens=20, seed=3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            loop._runner.run(4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_every_bucket_of_a_schedule_is_a_graph_of_its_own() -> None:
    loop = decoder("cuda", "model", schedule="heuristic", sampling=SamplingParams(temperature=0.0))
    output = run(loop)
    assert len(loop._runner._graphs) >= 2
    expected = run(decoder("cpu", "none", compile=False, sampling=SamplingParams(temperature=0.0)))
    assert torch.equal(output.sequences.cpu(), expected.sequences)
