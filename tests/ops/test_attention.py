"""Attention to spans of a static cache: the op against its oracle, and models that use it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from attention_cases import CASES, AttentionCase
from tiny_models import tiny
from torch import Tensor

from torch_specops import SamplingParams, SpeculativeDecoder, compilation
from torch_specops.compilation import compile_piece
from torch_specops.hf import language_model, models
from torch_specops.ops.attention import MIN_SPAN_CAPACITY, attend

CASE = AttentionCase(3, 4, 2, 3, 40, 16)
GREEDY = SamplingParams(temperature=0.0)
# Without Gemma 2, which transformers 5.21 and later give eager attention.
DECODERS = ("gemma", "gemma3", "gpt2", "gpt_neox", "llama", "mistral", "opt", "phi", "qwen2 sliding", "qwen3")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_that_of_the_oracle(case: AttentionCase) -> None:
    *tensors, spans, scale = case.arguments()
    # What lies between the spans of a row or before them has to be finite here, as it is in a cache.
    queries, keys, values = (each.nan_to_num(0.0) for each in tensors)
    assert case.error(attend(queries, keys, values, spans, scale)) <= 1
    assert case.error(attend(queries, keys, values, (spans - 1).clamp(min=0), scale)) > 1


def test_attend_reads_no_unseen_slot() -> None:
    queries, keys, values, spans, scale = CASE.arguments()
    spans = spans[:1].expand(3, -1, -1)
    keys[:, :, :3] = values[:, :, :3] = 1.0
    assert attend(queries, keys, values, spans, scale).isfinite().all()


# torch's own: its exporter copies what it deprecates.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_traced_attention_looks_at_no_data(fresh_dynamo: None) -> None:
    """A compiler of a CPU calls the op whole; an exported program keeps it; what runs without Python has a mask."""
    *tensors, spans, scale = CASE.arguments()
    arguments = (*(each.nan_to_num(0.0) for each in tensors), spans, scale)
    expected = attend(*arguments)
    assert torch.equal(torch.compile(attend, fullgraph=True)(*arguments), expected)

    class Call(torch.nn.Module):
        def forward(self, *given: Any) -> Tensor:
            return attend(*given, scale)

    program = torch.export.export(Call(), arguments[:-1])
    assert "specops.attend" in program.graph_module.code
    torch.testing.assert_close(program.module()(*arguments[:-1]), expected)
    torch.library.opcheck(torch.ops.specops.attend.default, arguments)


def test_what_does_not_fit_is_refused() -> None:
    queries, keys, values, spans, scale = CASE.arguments()
    for arguments, error, message in (
        ((queries, keys[:, :, :, :8], values, spans), ValueError, "keys, values: expected"),
        ((queries[:, :3], keys, values, spans), ValueError, "H a divisor of 3"),
        ((queries, keys, values, spans[:, :2]), ValueError, r"spans: expected int64 \[3, 3, 2\]"),
        ((queries, keys.half(), values, spans), TypeError, "expected one dtype"),
    ):
        with pytest.raises(error, match=message):
            attend(*arguments, scale)


@pytest.mark.parametrize("family", DECODERS)
@torch.inference_mode()
def test_spans_and_masks_give_the_same_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged rows, a rollback, sliding windows, and texts that are read as long ones are on CUDA."""
    adapter = language_model(tiny(family).float())
    tokens = torch.randint(0, adapter.vocab_size, (3, 24), generator=torch.Generator().manual_seed(0))
    found = {}
    for way in ("mask", "spans", "long"):
        monkeypatch.setattr(models, "spans_serve", lambda *_, serve=way != "mask": serve)
        monkeypatch.setattr(models, "is_long_text", lambda at, is_long=way == "long": is_long and at.shape[1] == 10)
        adapter.start(3, 32)
        parts = []
        for starts in ([0, 0, 0], [9, 5, 10], [14, 3, 8]):
            width = 10 if starts == [0, 0, 0] else 4
            positions = torch.tensor(starts).unsqueeze(1) + torch.arange(width)
            parts.append(adapter.forward(tokens.gather(1, positions), positions))
        found[way] = torch.cat(parts, 1)
    for way in ("spans", "long"):
        torch.testing.assert_close(found[way], found["mask"], rtol=1e-4, atol=1e-4)


def test_compiled_step_attends_to_spans(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    monkeypatch.setattr(compilation, "compile_piece", partial(compile_piece, backend=backend))
    prompts = torch.randint(3, 50, (2, 5), generator=torch.Generator().manual_seed(1))
    model = tiny("llama", num_hidden_layers=1).float()
    expected = SpeculativeDecoder(model, sampling=GREEDY, compile=False).generate(prompts, max_new_tokens=6)
    for capacity, use_spans in ((MIN_SPAN_CAPACITY, True), (MIN_SPAN_CAPACITY, False), (64, True)):
        target = language_model(model)
        target.max_length, target.use_spans = None, use_spans
        loop = SpeculativeDecoder(target, sampling=GREEDY, compile=True, max_length=capacity)
        called.clear()
        output = loop.generate(prompts, max_new_tokens=6)
        attends = any("specops.attend" in name for name in called)
        assert attends == (use_spans and capacity >= MIN_SPAN_CAPACITY)
        assert torch.equal(output.sequences, expected.sequences)
