"""`torch_specops.inductor`: what the pass absorbs and what it leaves, the same tokens, Inductor's hook."""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import slow
from op_cases import VERIFY_OPS, op_arguments
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_leaves

import torch_specops
from torch_specops.inductor import AbsorbPass, absorb, install, uninstall

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, NUM_DRAFTS, VOCAB_SIZE = 48, 3, 40
T = 2.0 ** (torch.arange(BATCH) % 4 - 1)
FILTERS = {"top_k": torch.arange(BATCH) % 9, "top_p": torch.full((BATCH,), 0.8), "min_p": torch.full((BATCH,), 0.01)}
Prepare = Callable[[Tensor], Tensor]


def inputs(op: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Logits with ties, -inf, +inf and NaN; drafts that are accepted, rejected and padding."""
    given = op_arguments(op, BATCH, NUM_DRAFTS, VOCAB_SIZE, dtype=dtype, filtered=False)
    more = {name for name, value in given.items() if not isinstance(value, Tensor)}
    more |= {"temperature", "draft_lse", "draft_is_one_hot"}
    given = {name: value for name, value in given.items() if name not in more}
    rows = given["target_logits" if op in VERIFY_OPS else "logits"]
    rows[::5, ..., 7], rows[1::7, ..., 3], rows[2::7, ..., 5], rows[3::9] = -torch.inf, torch.inf, torch.nan, 0.0
    return given


def run(function: Callable[..., Any], given: dict[str, Tensor], any_temperature: bool = False, **options: Any) -> Any:
    """What the pass absorbs in Dynamo's graph of the function, and what the graph that it leaves returns."""
    absorbed: Counter[str] = Counter()

    def backend(module: GraphModule, _: Any) -> Callable[..., Any]:
        before = len(module.graph.nodes)
        AbsorbPass((), any_temperature, absorbed)(module.graph)
        # A temperature takes up to two nodes.
        assert len(module.graph.nodes) <= before - absorbed.total() + 2 * (absorbed["division"] > 0)
        module.graph.lint()
        module.recompile()
        return module.forward

    torch._dynamo.reset()
    return absorbed, torch.compile(function, backend=backend, fullgraph=True, **options)(**given)


def assert_same(got: Any, expected: Any) -> None:
    for one, other in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


DRAWING_OPS = (*VERIFY_OPS, "sample", "sample_gumbel")
NARROW = (torch.bfloat16, torch.float16)


# Ops that read the same arguments are absorbed by the same code.
SAME_ARGUMENTS = ("verify_block", "verify_sigmoid", "sample_gumbel")


@pytest.mark.parametrize("op", [slow(op) if op in SAME_ARGUMENTS else op for op in DRAWING_OPS])
@pytest.mark.parametrize("dynamic", [slow(False), True])
def test_all_outputs_are_the_same_bit_for_bit(op: str, dynamic: bool) -> None:
    more: dict[str, Any] = {"alpha": -4.0, "beta": 3.0} if op == "verify_sigmoid" else FILTERS

    def step(**given: Tensor) -> Any:
        scaled = {name: given[name].float().clone() / 2 for name in given if name.endswith("logits")}
        return getattr(torch.ops.specops, op)(*(given | scaled).values(), **more)

    each_of = {dtype: inputs(op, dtype) for dtype in (*NARROW, torch.float32)}
    names = [name for name in each_of[torch.float32] if name.endswith("logits")]
    calls = [(given, names if dtype in NARROW else []) for dtype, given in each_of.items()]
    if dynamic:
        # Compiling takes long: of dynamic sizes the ops have one of the narrow dtypes in turn, and, if they have logits
        # of two kinds, float32 for one of these.
        turn = DRAWING_OPS.index(op) % 2
        calls = [calls[turn], calls[2]]
        if len(names) == 2:
            calls = [(calls[0][0] | {names[turn]: calls[1][0][names[turn]]}, [names[1 - turn]])]
    for given, cast in calls:
        absorbed, outputs = run(step, given, dynamic=dynamic)
        # Of float32 logits `.float()` is no cast; the pass takes it for a copy.
        steps = {"cast": len(cast), "copy": 2 * len(names) - len(cast), "division": len(names)}
        assert absorbed == Counter(steps)
        assert_same(outputs, step(**given))


def sampled(prepare: Prepare, **more: bool) -> Callable[..., Any]:
    return lambda logits, uniforms: torch_specops.sample(prepare(logits), uniforms, **more)


def verified(target: Prepare, draft: Prepare, **more: Tensor) -> Callable[..., Any]:
    def step(target_logits: Tensor, draft_logits: Tensor, **given: Tensor) -> Any:
        return torch_specops.verify_exact(target(target_logits), draft_logits=draft(draft_logits), **given, **more)

    return step


def by(divisor: Any) -> Prepare:
    return lambda x: x.float() / divisor


def written(change: Callable[[Tensor], Any], temperature: float = 0.0) -> Callable[..., Any]:
    """A copy of the logits, or the temperature, is written to before the op reads it."""

    def step(logits: Tensor, uniforms: Tensor) -> Any:
        base = uniforms[:, None] + temperature if temperature else logits.clone()
        read = logits.float() / base if temperature else base[:, 1:].float()
        change(base)
        return torch_specops.sample(read, uniforms), base

    return step


def also_read(prepare: Prepare, then: Prepare) -> Callable[..., Any]:
    def step(logits: Tensor, uniforms: Tensor) -> Any:
        read = prepare(logits)
        return torch_specops.sample(then(read), uniforms), read

    return step


LSE = {t: (inputs("verify_exact")["draft_logits"].float() / t).logsumexp(-1) for t in (2, 0.7)}
# What is absorbed before the op; in a near miss, less than the steps that one sees.
STEPS: dict[str, tuple[Callable[..., Any], str]] = {
    ".to(float32)": (sampled(lambda x: x.to(torch.float32)), "cast"),
    "torch.clone, .div": (sampled(lambda x: torch.clone(x.float()).div(0.25)), "cast copy division"),
    "a slice, contiguous": (sampled(lambda x: x[:, 3:17].contiguous()), "copy"),
    "by one": (sampled(by(1)), "cast division"),
    "one tensor": (sampled(by(T[3])), "cast division"),
    "per sequence": (verified(lambda x: x / T[:, None, None], lambda x: x / T[:, None, None]), "division division"),
    "another tensor is written": (written(lambda x: x.clone().mul_(2)), "cast"),
    "a draft_lse of the quotient": (verified(by(2), by(2), draft_lse=LSE[2]), "cast division cast division"),
    "the cast is read": (also_read(torch.Tensor.float, lambda x: x / 2), "division"),
    "the quotient is read": (also_read(by(2), torch.clone), "copy"),
    "a narrower dtype": (sampled(lambda x: (x.float() * 0.3).to(torch.bfloat16)), ""),
    "narrowed, then cast": (sampled(lambda x: x.float().half().float()), "cast"),
    "divided in bfloat16": (sampled(lambda x: (x / 2).float()), "cast"),
    "divided twice": (sampled(lambda x: x.float() / 2 / 2), "division"),
    "a rounded quotient": (sampled(lambda x: torch.div(x.float(), 2, rounding_mode="floor")), ""),
    "a divisor per token": (sampled(by(torch.linspace(1, 2, VOCAB_SIZE))), ""),
    "a divisor per draft": (verified(by(T[:4, None]), by(T[:3, None])), ""),
    "below zero": (sampled(by(-2)), ""),
    "a copy of rows with gaps": (sampled(lambda x: x[:, ::2].contiguous()), ""),
    "written in place": (written(lambda x: x.mul_(2)), ""),
    "written through a view": (written(lambda x: x.view(-1).zero_()), ""),
    "written by index": (written(lambda x: x.__setitem__((slice(None), 5), -torch.inf)), ""),
    "written by an operator": (written(lambda x: operator.imul(x, 2)), ""),
    "written as out": (written(lambda x: torch.neg(x, out=x)), ""),
    "written by a function": (written(lambda x: F.relu(x, True)), ""),
    "written by an op": (written(lambda x: torch.ops.aten.fill_(x, 1.0)), ""),
    "the temperature is written": (written(lambda x: x.mul_(2), temperature=1.0), ""),
    "other temperatures": (verified(lambda x: x / T[:, None, None], lambda x: x / T.flip(0)[:, None, None]), ""),
    "the target alone": (verified(by(2), torch.Tensor.float), "cast"),
    "the op has a temperature": (verified(by(2), by(2), temperature=T), ""),
    "a rounded temperature and a draft_lse": (verified(by(0.7), by(0.7), draft_lse=LSE[0.7]), ""),
    "a draft_lse with bounds": (verified(by(2), by(2), draft_lse=LSE[2].unsqueeze(-1).expand(-1, -1, 3)), ""),
    "returned bounds": (sampled(by(2), with_bounds=True), ""),
    "filter_logits": (lambda logits, uniforms: torch_specops.filter_logits(logits.float().clone() / 2, **FILTERS), ""),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_and_near_misses(name: str) -> None:
    step, steps = STEPS[name]
    given = inputs("verify_exact" if "verified" in step.__qualname__ else "sample")
    absorbed, outputs = run(step, given, any_temperature=True)
    assert absorbed == Counter(steps.split())
    assert_same(outputs, step(**given))


def test_inductor_absorbs_rounding_on_request() -> None:
    given = inputs("sample")
    for prepare in (by(0.7), by(T[3]), lambda x: x / T[:, None]):
        assert run(sampled(prepare), given)[0] == {}
    absorbed, outputs = run(sampled(by(0.7)), given, any_temperature=True)
    assert absorbed == {"cast": 1, "division": 1}
    torch.testing.assert_close(outputs[1], sampled(by(0.7))(**given)[1], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_inductors_cache_keeps_the_graphs_apart() -> None:
    step, given, runs = sampled(by(2)), inputs("sample"), []
    with fresh_cache():
        for setting in (contextlib.nullcontext(), absorb(), absorb(), contextlib.nullcontext()):
            torch._dynamo.reset()
            counters.clear()
            with setting as absorbed:
                tokens, _ = torch.compile(step, fullgraph=True)(**given)
                assert torch.equal(tokens, step(**given)[0])
            runs.append((counters["aot_autograd"]["autograd_cache_hit"], absorbed))
    counted = {"division": 1, "cast": 1}
    # Passes before torch 2.13 may run, and count, before the cache is asked.
    again = runs.pop(2)
    assert again == (1, {}) or (torch.__version__ < "2.13" and again == (1, counted))
    assert runs == [(0, None), (0, counted), (1, None)]


def test_names_of_passes_in_inductors_cache() -> None:
    assert AbsorbPass((), False, Counter()).uuid() != AbsorbPass((), True, Counter()).uuid()
    assert AbsorbPass((lambda graph: None,), False, Counter()).uuid() is None  # no name, no cache


@pytest.mark.parametrize("number", [0, 1, 2])
def test_other_passes_at_the_hook_stay(number: int) -> None:
    ran: list[int] = []
    others = [lambda graph, i=i: ran.append(i) for i in range(number)]
    before = others if number > 1 else next(iter(others), None)
    with config.patch(pre_grad_custom_pass=before):
        with absorb(), absorb(any_temperature=True):
            config.pre_grad_custom_pass(Graph())
        assert config.pre_grad_custom_pass == before and ran == list(range(number))
        for _ in range(2):
            install()
            assert config.pre_grad_custom_pass.others == tuple(others)
        uninstall()
        assert config.pre_grad_custom_pass == before
