"""Attention to spans of a static cache: the op against its oracle, in the interpreter too, and models that use it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import CASES, AttentionCase
from tiny_models import tiny
from torch import Tensor

from torch_specops import SamplingParams, SpeculativeDecoder, compilation
from torch_specops.compilation import compile_piece
from torch_specops.hf import language_model, models
from torch_specops.ops.attention import SPANS_PAY, attend

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


def test_a_call_reads_no_slot_beyond_the_last_that_is_seen() -> None:
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


def test_the_kernel_agrees_with_the_oracle() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).parents[1] / "helpers" / "interpret_attention.py"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert errors.pop("wrong") > 1
    assert len(errors) == 2 * len(CASES) and max(errors.values()) <= 1, errors


@pytest.mark.parametrize(
    "dtype, head_dim, rows, parts",
    [
        ("bf16", 128, 32, 32),
        *(pytest.param(*build, marks=pytest.mark.slow) for build in [("bf16", 256, 32, 1), ("fp32", 64, 32, 32)]),
    ],
)
@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_100", marks=pytest.mark.slow)])
def test_the_kernel_spills_nothing_and_copies_16_bytes_at_a_time(
    target: str, dtype: str, head_dim: int, rows: int, parts: int
) -> None:
    triton = pytest.importorskip("triton")
    from benchmarks import kernel_resources as aot
    from torch_specops.ops.cuda import attention

    tile = attention.TILE_BYTES // (head_dim * (4 if dtype == "fp32" else 2))
    constants = {"SCALE": 0.1, "GROUP": 4, "D": head_dim, "PARTS": parts, "ROWS": rows}
    constants |= {"BLOCK_D": head_dim, "TILE": tile}
    names = attention.attend_kernel.arg_names
    tensors = ["queries_ptr", "keys_ptr", "values_ptr"]
    types = {"spans_ptr": "*i64", "sums_ptr": "*fp32", "scales_ptr": "*fp32"} | dict.fromkeys(tensors, f"*{dtype}")
    if parts == 1:
        types["sums_ptr"] = f"*{dtype}"
    source = triton.compiler.ASTSource(
        attention.attend_kernel,
        {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in types},
    )
    compiled = triton.compile(source, target=aot.TARGETS[target], options={"num_warps": 4, **aot.launch.OPTIONS})
    sass = aot.cuobjdump(compiled, "--dump-sass")
    assert "STACK:0 " in aot.cuobjdump(compiled, "--dump-resource-usage")
    assert not re.search(r"\b(?:LDL|STL)\b", sass)
    copies = re.findall(r"\bLDGSTS\.[\w.]*", sass)
    assert copies and all(".128" in copy for copy in copies)


@pytest.mark.parametrize("family", DECODERS)
@torch.inference_mode()
def test_spans_and_masks_give_the_same_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged rows, a rollback, and sliding windows."""
    adapter = language_model(tiny(family).float())
    tokens = torch.randint(0, adapter.vocab_size, (3, 24), generator=torch.Generator().manual_seed(0))
    found = {}
    for use_spans in (False, True):
        monkeypatch.setattr(models, "spans_serve", lambda *_, serve=use_spans: serve)
        adapter.start(3, 32)
        parts = []
        for starts in ([0, 0, 0], [9, 5, 10], [14, 3, 8]):
            width = 10 if starts == [0, 0, 0] else 4
            positions = torch.tensor(starts).unsqueeze(1) + torch.arange(width)
            parts.append(adapter.forward(tokens.gather(1, positions), positions))
        found[use_spans] = torch.cat(parts, 1)
    torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-4)


def test_a_compiled_step_attends_to_spans_of_a_long_cache(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    monkeypatch.setattr(compilation, "compile_piece", partial(compile_piece, backend=backend))
    prompts = torch.randint(3, 50, (2, 5), generator=torch.Generator().manual_seed(1))
    model = tiny("llama").float()
    expected = SpeculativeDecoder(model, sampling=GREEDY, compile=False).generate(prompts, max_new_tokens=6)
    for capacity, use_spans in ((SPANS_PAY, True), (SPANS_PAY, False), (64, True)):
        target = language_model(model)
        target.max_length, target.use_spans = None, use_spans
        loop = SpeculativeDecoder(target, sampling=GREEDY, compile=True, max_length=capacity)
        called.clear()
        output = loop.generate(prompts, max_new_tokens=6)
        attends = any("specops.attend" in name for name in called)
        assert attends == (use_spans and capacity >= SPANS_PAY)
        assert torch.equal(output.sequences, expected.sequences)
