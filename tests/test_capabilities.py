"""How the ops and the loop stand in torch's modes and machinery: what works gives the same tokens, the rest refuses.

The tables of docs/capabilities.md name these tests.
"""

from __future__ import annotations

import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from op_cases import OPS, call, equal, op_arguments, tensor_arguments
from tiny_models import PROMPTS, padded, perturbed, tiny
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.func import functionalize, grad, jvp
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_specops
from torch_specops import compilation
from torch_specops.drafts import NGram

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "inference_mode": torch.inference_mode,
}
# Each takes a graph of its own.
COMPILED_IN = ((torch.float32, "autocast bfloat16"), (torch.bfloat16, "inference_mode"))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("op", OPS)
def test_modes_change_nothing(op: str) -> None:
    """Neither an op nor, beside the first one, a compiled op and the uniforms."""
    compiled = torch.compile(torch_specops.verify_exact, fullgraph=True, backend="aot_eager")
    numbers = torch.arange(3), torch.tensor([0, 7, 2**40]), 5, "accept"
    uniforms = torch_specops.uniforms(*numbers)
    for dtype in (torch.float32, torch.bfloat16):
        arguments = op_arguments(op, dtype=dtype)
        expected = call(op, arguments)
        for mode in MODES:
            with MODES[mode]():
                assert equal(call(op, arguments), expected), mode
                if op == "verify_exact" and (dtype, mode) in COMPILED_IN:
                    assert equal(compiled(**arguments), expected), mode
                assert torch.equal(torch_specops.uniforms(*numbers), uniforms), mode
        assert equal(functionalize(call)(op, arguments), expected)


def texts() -> Tensor:
    target = tiny("llama", num_hidden_layers=1)
    draft = perturbed(target, 0.05)
    sampling = torch_specops.SamplingParams(temperature=[0.0, 0.8, 1.0], top_k=20, top_p=0.9)
    decoder = torch_specops.SpeculativeDecoder(target, draft, num_draft_tokens=3, sampling=sampling, compile=False)
    ids, mask = padded(PROMPTS, "left")
    return decoder.generate(ids, attention_mask=mask, max_new_tokens=12, seed=3).sequences


def test_deterministic_mode_refuses_nothing_and_changes_nothing() -> None:
    expected, expected_texts = {op: call(op, op_arguments(op)) for op in OPS}, texts()
    torch.use_deterministic_algorithms(True)
    try:
        assert all(equal(call(op, op_arguments(op)), expected[op]) for op in OPS)
        assert torch.equal(texts(), expected_texts)
    finally:
        torch.use_deterministic_algorithms(False)


class Names(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace` is deprecated"
)
def test_what_records_calls_sees_the_ops() -> None:
    """And not the numbers that eager calls read and return, although those skip the dispatcher."""
    seeds = {"seeds": torch.arange(4), "positions": torch.arange(4)}
    for op in (*OPS, "uniforms"):
        numbers = {"n": 5, "stream": "accept"} if op == "uniforms" else {}
        tensors = seeds if op == "uniforms" else tensor_arguments(op)

        def run(*values: Tensor, op: str = op, names: Any = tuple(tensors), numbers: Any = numbers) -> Any:
            return getattr(torch_specops, op)(**dict(zip(names, values, strict=True)), **numbers)

        with Names() as names:
            run(*tensors.values())
        assert names.seen == [f"specops::{op}"]
        traced = torch.jit.trace(run, tuple(tensors.values()), check_trace=False)
        assert [node.kind() for node in traced.graph.nodes() if "::" in node.kind() and "prim" not in node.kind()] == [
            f"specops::{op}"
        ]


class Plain(Tensor):
    """A subclass that only has another name."""


@pytest.mark.parametrize("op", OPS)
def test_subclasses_that_pass(op: str) -> None:
    """Those without a dispatch of their own; and what a wrapper's dispatch hands on, here both of two tensors."""
    for kind in (partial(torch.Tensor.as_subclass, cls=Plain), torch.nn.Parameter, torch.nn.Buffer):
        arguments = tensor_arguments(op)
        wrapped = {name: kind(value) for name, value in arguments.items() if name.endswith("logits")}
        outputs = call(op, arguments | wrapped)
        assert equal(tuple(output.as_subclass(Tensor) for output in outputs), call(op, arguments))
        assert not any(output.requires_grad for output in outputs)
    first, second = tensor_arguments(op), tensor_arguments(op, seed=1)
    both = call(op, {name: TwoTensor(first[name], second[name]) for name in first})
    assert equal(tuple(output.a for output in both), call(op, first))
    assert equal(tuple(output.b for output in both), call(op, second))


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refused(kind: str, value: Tensor) -> Tensor:
    if kind == "DTensor":
        return distribute_tensor(value, init_device_mesh("cpu", (1,)), [Replicate()])
    with warnings.catch_warnings():
        # Prototypes, as they say when they are made.
        warnings.simplefilter("ignore")
        if kind == "MaskedTensor":
            return masked_tensor(value, value > 0)
        return torch.nested.nested_tensor(list(value), layout=torch.jagged if kind == "jagged" else torch.strided)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("op", OPS)
def test_subclasses_refused_by_name(op: str) -> None:
    arguments = tensor_arguments(op)
    logits = "logits" if "logits" in arguments else "target_logits"
    of_logits = [(logits, kind) for kind in ("DTensor", "MaskedTensor", "jagged", "nested")]
    for name, kind in [*of_logits, ("temperature", "DTensor")]:
        shown = "NestedTensor" if kind in ("jagged", "nested") else kind
        advice = "; torch_specops.vocab_parallel takes sharded logits" if kind == "DTensor" else ""
        with pytest.raises(TypeError, match=f"^{name}: expected a plain tensor, got a {shown}{advice}$"):
            call(op, arguments | {name: refused(kind, arguments[name])})


@pytest.mark.parametrize("op", OPS)
def test_nothing_passes_a_gradient(op: str) -> None:
    """No op has a derivative: outputs say so, a backward through them alone is an error, so is one under `grad`."""
    arguments = tensor_arguments(op)
    name = "logits" if "logits" in arguments else "target_logits"
    logits = arguments.pop(name)

    def last_output(value: Tensor) -> Tensor:
        return call(op, {name: value, **arguments})[-1]

    output = last_output(logits.clone().requires_grad_())
    assert not output.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        output.sum().backward()
    with pytest.raises(RuntimeError):
        grad(lambda value: last_output(value).sum())(logits)
    assert bool((jvp(last_output, (logits,), (torch.ones_like(logits),))[1] == 0).all())


@pytest.mark.parametrize("compile", [True, False])
def test_a_decoder_is_pickled(compile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled one too, after it was used: the copy compiles anew."""
    monkeypatch.setattr(compilation, "compile_piece", partial(compilation.compile_piece, backend="eager"))
    target = tiny("llama", num_hidden_layers=1)
    ngram = NGram.from_tokens(torch.arange(90) % 7 + 3, vocab_size=60, probabilities=True)
    draft = ngram if compile else tiny("llama", num_hidden_layers=1)
    sampling = torch_specops.SamplingParams(temperature=0.7, top_k=20)
    decoder = torch_specops.SpeculativeDecoder(target, draft, num_draft_tokens=1, sampling=sampling, compile=compile)
    prompt = torch.tensor([[5, 6, 7, 5, 6]])
    outputs = [decoder.generate(prompt, max_new_tokens=9, seed=1)]
    copied = pickle.loads(pickle.dumps(decoder))
    assert copied.sampling == sampling and copied.compiled == compile
    outputs.append(copied.generate(prompt, max_new_tokens=9, seed=1))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    again = pickle.loads(pickle.dumps(outputs[0]))
    assert torch.equal(again.sequences, outputs[0].sequences) and again.stats == outputs[0].stats


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_three_graphs_for_batches_that_are_not_marked() -> None:
    """One for the first size, one for a batch of 1, and one for all others."""
    verify, found = torch.compile(torch_specops.verify_exact, fullgraph=True, backend="eager"), []
    for batch in (2, 1, 5, 7):
        verify(*list(op_arguments("verify_exact", batch, 3).values())[:5])
        found.append(counters["stats"]["unique_graphs"])
    assert found == [1, 2, 3, 3]


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_graph_for_every_batch() -> None:
    """Batch marked dynamic, vocabulary static, and K one of the buckets of a schedule, each of which has a graph."""

    def arguments(batch: int, num_drafts: int, vocab_size: int = 37) -> list[Tensor]:
        values = list(op_arguments("verify_exact", batch, num_drafts, vocab_size).values())[:5]
        for value in values:
            torch._dynamo.mark_dynamic(value, 0)
            for axis in range(1, value.dim()):
                torch._dynamo.mark_static(value, axis)
        return values

    verify = torch.compile(torch_specops.verify_exact, fullgraph=True, backend="eager")
    buckets = (2, 4)
    for num_drafts in buckets:
        verify(*arguments(6, num_drafts))
    assert counters["stats"]["unique_graphs"] == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch, num_drafts in itertools.product((2, 3, 7, 64), buckets):
            given = arguments(batch, num_drafts)
            assert equal(verify(*given), torch_specops.verify_exact(*given))
        for other in ((4, 3, 37), (4, 4, 38)):
            with pytest.raises(RuntimeError, match="recompile"):
                verify(*arguments(*other))
    # torch takes a batch of 1 for a constant.
    verify(*arguments(1, 2))
    assert counters["stats"]["unique_graphs"] == 3
