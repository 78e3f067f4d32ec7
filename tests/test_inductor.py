"""`torch_specops.inductor`: what is rewritten, what is not, the same tokens, and the setting of Inductor it uses."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from naive_verification import (
    NEAR_MISSES,
    OWN_SOFTMAX,
    PARTS,
    Function,
    Values,
    cdf,
    normalised,
    scattered,
    spelled,
    with_output,
)
from torch import Tensor
from torch._dynamo.utils import counters as dynamo_counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import torch_specops
from torch_specops.inductor import counters, install, rewrite, uninstall
from torch_specops.inductor.graph_pass import RewritePass, digest, source_digest
from torch_specops.inductor.rewriter import Counters, rewrite_graph
from torch_specops.testing import Case, rounding_rows, sample_inputs

OP = "specops.verify_exact.default"
# All of B = 6, K = 3, V = 17: near the draft and far from it, masked logits, equal logits, u = 0, s = 0, p = q.
CASES = ("k3", "masked", "opposite", "plateaus", "tie_u_zero", "tie_s_zero", "tie_same")
ARGUMENTS = ("target_logits", "draft_tokens", "draft_logits", "accept_uniforms", "sample_uniforms", "temperature")
TEMPERATURE = torch.tensor([0.5, 0.7, 1.0, 1.3, 2.0, 0.9])


@functools.cache
def decompositions() -> dict[Any, Any]:
    return select_decomp_table()


def traced(function: Function, arguments: tuple[Any, ...], decomposed: bool) -> GraphModule:
    """The graph as AOTAutograd makes it for a backend: functional, and with Inductor's decompositions or without."""
    table = decompositions() if decomposed else {}
    return make_fx(torch.func.functionalize(function), decomposition_table=table, tracing_mode="fake")(*arguments)


def rewritten(graph_module: GraphModule) -> Counters:
    found = rewrite_graph(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    return found


def operators(graph_module: GraphModule) -> Counter[str]:
    return Counter(str(node.target).removeprefix("aten.") for node in graph_module.graph.nodes if "call" in node.op)


def law_of(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `verify_exact` for a spelling of the probabilities."""
    target, draft = args["target_logits"], args["draft_logits"]
    t = torch.ones(target.shape[0])
    if name in ("temperature per row", "temperature per row, viewed"):
        return args | {"temperature": TEMPERATURE}
    if name in ("temperature 0.7", "temperature as a factor"):
        return args | {"temperature": 0.7 * t}
    if name == "temperature as a tensor":
        return args | {"temperature": TEMPERATURE[0] * t}
    if name == "temperature of the target alone":
        return args | {"target_logits": target / TEMPERATURE[:, None, None]}
    if name == "masked logits":
        masked = (x.masked_fill(x < -3, -torch.inf) for x in (target, draft))
        return args | dict(zip(("target_logits", "draft_logits"), masked, strict=True))
    return args


def without_law(law: dict[str, Any]) -> Tensor:
    """[B] where the plain code has no law: a draft token that the draft cannot have drawn, or that is none; a number
    that is no uniform; no temperature; a row without a finite logit, whose softmax is NaN."""
    target, draft, x = law["target_logits"], law["draft_logits"], law["draft_tokens"]
    vocab_size = target.shape[-1]
    tokens = (x >= 0) & (x < vocab_size)
    drawn = tokens & (draft.gather(2, x.clamp(0, vocab_size - 1).unsqueeze(-1)).squeeze(-1) > -torch.inf)
    u, s = law["accept_uniforms"], law["sample_uniforms"]
    lawful = drawn.all(1) & ((u >= 0) & (u < 1)).all(1) & (s >= 0) & (s < 1)
    lawful &= (target.amax(-1) > -torch.inf).all(1) & (draft.amax(-1) > -torch.inf).all(1)
    return ~lawful if law.get("temperature") is None else ~(lawful & (law["temperature"] > 0))


@functools.cache
def inputs(name: str = "softmax") -> list[tuple[tuple[Tensor, ...], Tensor]]:
    """Arguments of the plain functions, and the rows [B] for which rounding may decide or which have no law."""
    found = []
    for case in sample_inputs("verify_exact", vocab_sizes=[17], names=CASES, seed=0):
        law = law_of(name, case.args)
        open_rows = rounding_rows(Case(case.name, "verify_exact", law)) | without_law(law)
        found.append(((*(case.args[key] for key in ARGUMENTS[:-1]), TEMPERATURE), open_rows))
    return found


def assert_same_tokens(function: Function, graph_module: GraphModule, name: str = "softmax") -> int:
    compared = 0
    accepted = set()
    for arguments, open_rows in inputs(name):
        expected, got = function(*arguments), graph_module(*arguments)
        assert [(o.shape, o.dtype) for o in got] == [(o.shape, o.dtype) for o in expected]
        for want, have in zip(expected[:2], got[:2], strict=True):
            assert torch.equal(want[~open_rows], have[~open_rows])
        compared += int((~open_rows).sum())
        accepted.update(got[1].tolist())
    assert accepted == {0, 1, 2, 3}
    return compared


@pytest.mark.parametrize("decomposed", [False, True], ids=["torch", "Inductor"])
@pytest.mark.parametrize("part", PARTS)
def test_spellings(part: str, decomposed: bool) -> None:
    for name in PARTS[part]:
        function = spelled(**{part: name})
        graph_module = traced(function, inputs()[0][0], decomposed)
        found = rewritten(graph_module)
        assert (found.matched, dict(found.refused)) == (1, {}), name
        after = operators(graph_module)
        assert after[OP] == 1
        # Nothing of the plain code is left but what puts the output together.
        left = {op.split(".")[0] for op in after} & {"_softmax", "exp", "amax", "cumsum", "cumprod", "index", "argmax"}
        assert left == set(), name
        compared = assert_same_tokens(function, graph_module, name if part == "probabilities" else "softmax")
        assert compared >= 30


def test_the_graph_after() -> None:
    graph_module = traced(spelled(probabilities="temperature per row"), inputs()[0][0], decomposed=True)
    assert operators(graph_module)["exp.default"] == 2
    rewritten(graph_module)
    assert operators(graph_module) == {
        OP: 1,
        "<built-in function getitem>": 2,
        # The next token, from the op's output.
        "gather.default": 1,
        "squeeze.dim": 1,
        # The output as it was written.
        "prims.iota.default": 1,
        "unsqueeze.default": 4,
        "lt.Tensor": 1,
        "constant_pad_nd.default": 1,
        "scalar_tensor.default": 1,
        "where.self": 1,
        "scatter.src": 1,
    }
    (call,) = (node for node in graph_module.graph.nodes if str(node.target) == OP)
    # Logits before the division, and the temperature by itself.
    assert [arg.op for arg in call.args] == ["placeholder"] * 6
    assert len(set(call.args)) == 6


def test_combinations() -> None:
    """Spellings of the parts do not depend on each other."""
    generator = random.Random(0)
    for i in range(25):
        names = {part: generator.choice(list(table)) for part, table in PARTS.items()}
        if names["acceptance"] in OWN_SOFTMAX or names["weights"] == "softmax of the row":
            names["probabilities"] = "softmax"
        function = spelled(**names)
        graph_module = traced(function, inputs()[0][0], decomposed=i % 4 > 0)
        found = rewritten(graph_module)
        assert (found.matched, dict(found.refused)) == (1, {}), names
        assert_same_tokens(function, graph_module, names["probabilities"])


def test_near_misses() -> None:
    for name, (parts, reason) in NEAR_MISSES.items():
        graph_module = traced(spelled(**parts), inputs()[0][0], decomposed=True)
        before = operators(graph_module)
        found = rewritten(graph_module)
        assert found.matched == 0, name
        assert operators(graph_module) == before
        (refused,) = found.refused.elements()
        assert reason in refused, (name, refused)


@pytest.mark.parametrize("shape", [(1, 3, 17), (6, 1, 17), (1, 1, 5), (3, 2, 17), (2, 5, 1100)])
def test_sizes(shape: tuple[int, int, int]) -> None:
    """Also where B, K + 1 or K is 1 or two of them are equal."""
    batch, num_drafts, vocab_size = shape
    generator = torch.Generator().manual_seed(sum(shape))
    compared = 0
    viewed = {"probabilities": "temperature per row, viewed", "gather": "gather, viewed", "draw": "argmax, viewed"}
    for parts in ({}, viewed) * 2:
        function = spelled(**parts)
        target = 2 * torch.randn(batch, num_drafts + 1, vocab_size, generator=generator)
        args: dict[str, Any] = {
            "target_logits": target,
            "draft_tokens": torch.randint(vocab_size, (batch, num_drafts), generator=generator),
            "draft_logits": target[:, :-1] + torch.randn(batch, num_drafts, vocab_size, generator=generator),
            "accept_uniforms": torch.rand(batch, num_drafts, generator=generator),
            "sample_uniforms": torch.rand(batch, generator=generator),
        }
        arguments = (*args.values(), torch.ones(batch))
        graph_module = traced(function, arguments, decomposed=True)
        assert rewritten(graph_module).matched == 1
        closed_rows = ~rounding_rows(Case("", "verify_exact", args))
        for want, have in zip(function(*arguments), graph_module(*arguments), strict=True):
            assert torch.equal(want[closed_rows], have[closed_rows])
        compared += int(closed_rows.sum())
    assert compared >= 2 * batch


def test_low_precision_logits() -> None:
    """Half-precision logits go to the op as they are; divided in half precision, as they were divided."""
    arguments = (*(x.bfloat16() if x.dim() == 3 else x for x in inputs()[0][0]),)
    for probabilities, divided in (("float32 softmax", False), ("float softmax", False), ("temperature 0.7", True)):
        part = PARTS["probabilities"][probabilities]
        if divided:

            def part(v: Values) -> None:
                v.p, v.q = (torch.softmax((z / 0.7).float(), -1) for z in (v.t, v.d))

        graph_module = traced(spelled(probabilities=part), arguments, decomposed=True)
        assert rewritten(graph_module).matched == 1
        (call,) = (node for node in graph_module.graph.nodes if str(node.target) == OP)
        assert [call.args[i].meta["val"].dtype for i in (0, 2)] == [torch.bfloat16] * 2
        assert [call.args[i].op for i in (0, 2)] == ["call_function" if divided else "placeholder"] * 2
        assert call.args[5] is None


def test_uniforms_with_a_dimension() -> None:
    """One array of K + 1 numbers per sequence; and s as [B, 1]."""
    arguments = inputs()[0][0]
    numbers = torch.cat([arguments[3], arguments[4][:, None]], 1)

    def split(t: Tensor, x: Tensor, d: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
        return spelled()(t, x, d, numbers[:, :-1], numbers[:, -1], torch.ones(6))

    def column(t: Tensor, x: Tensor, d: Tensor, u: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        draw: Callable[[Values], Tensor] = lambda v: (cdf(v) > s).int().argmax(-1)  # noqa: E731
        return spelled(draw=draw)(t, x, d, u, s[:, 0], torch.ones(6))

    for function, own in ((split, (*arguments[:3], numbers)), (column, (*arguments[:4], arguments[4][:, None]))):
        graph_module = traced(function, own, decomposed=True)
        assert rewritten(graph_module).matched == 1
        for want, have in zip(spelled()(*arguments), graph_module(*own), strict=True):
            assert torch.equal(want, have)


def test_random_numbers_of_the_graph_keep_their_order() -> None:
    """`s` is drawn after n is known: what was computed in between moves behind the op."""

    def verify(t: Tensor, x: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        v = Values()
        v.t, v.x, v.d, v.u, v.temperature = t, x, d, torch.rand(x.shape), torch.ones(6)
        parts = {part: next(iter(table.values())) for part, table in PARTS.items()}
        parts["probabilities"](v)
        parts["gather"](v)
        v.accepted = parts["acceptance"](v)
        v.n = parts["count"](v)
        doubled = 2 * v.n
        v.s = torch.rand(x.shape[0])
        v.weights = parts["weights"](v)
        v.next_token = parts["draw"](v)
        return scattered(v), doubled

    arguments = inputs()[0][0][:3]
    graph_module = traced(verify, arguments, decomposed=True)
    before = [node.name for node in graph_module.graph.nodes if "rand" in node.name]
    assert rewritten(graph_module).matched == 1
    assert [node.name for node in graph_module.graph.nodes if "rand" in node.name] == before
    for seed in range(3):
        torch.manual_seed(seed)
        expected = verify(*arguments)
        torch.manual_seed(seed)
        assert all(map(torch.equal, expected, graph_module(*arguments)))


def test_two_steps_in_one_graph() -> None:
    """The second step's drafts depend on the first one's result."""
    first, second = (drawn((6, 3, 17), seed) for seed in range(2))

    def steps(*both: Tensor) -> tuple[Tensor, ...]:
        output_tokens, n = spelled()(*both[:6])
        drafts = (both[7] + n[:, None]) % 17
        return output_tokens, n, *spelled(count="cumprod", draw="searchsorted")(both[6], drafts, *both[8:])

    graph_module = traced(steps, (*first, *second), decomposed=True)
    assert rewritten(graph_module).matched == 2
    assert operators(graph_module)[OP] == 2 and operators(graph_module)["exp.default"] == 0
    for want, have in zip(steps(*first, *second), graph_module(*first, *second), strict=True):
        assert torch.equal(want, have)


OTHER_USERS: dict[str, tuple[Callable[[Values], Tensor], set[str]]] = {
    # What is needed, and the operators of the plain code that stay for it.
    "the target's probabilities": (lambda v: v.p, {"_softmax"}),
    "the draft's, of the row": (lambda v: v.q_n, {"_softmax", "index", "arange", "clamp"}),
    "the ratio": (lambda v: v.ratio, {"_softmax", "div"}),
    "the tests": (lambda v: v.accepted, {"_softmax", "div"}),
    "the mask": (lambda v: v.accepted.int().cumprod(1), set()),
    "the mask of the rest": (lambda v: (~v.accepted).cumsum(1) >= 1, set()),
    "whether all": (lambda v: v.accepted.all(1), set()),
    "whether any is rejected": (lambda v: (~v.accepted).any(1), set()),
    "n": (lambda v: v.n, set()),
    "the token": (lambda v: v.next_token, set()),
}


@pytest.mark.parametrize("name", OTHER_USERS)
def test_other_users_of_intermediate_values(name: str) -> None:
    """They keep what they need, and follow the op where its result says what they are."""
    make, stays = OTHER_USERS[name]
    function = with_output(make)
    graph_module = traced(function, inputs()[0][0], decomposed=False)
    assert rewritten(graph_module).matched == 1
    own = {op.split(".")[0] for op in operators(graph_module)}
    assert own & {"_softmax", "index", "clamp", "div", "cumsum", "cumprod", "all", "any", "argmax"} == stays - {
        "arange"
    }
    for arguments, open_rows in inputs():
        for want, have in zip(function(*arguments), graph_module(*arguments), strict=True):
            assert want.dtype == have.dtype and torch.equal(want[~open_rows], have[~open_rows])


def test_a_running_count_used_elsewhere_is_refused() -> None:
    """Where rounding decides, it could contradict the op."""
    graph_module = traced(with_output(lambda v: (~v.accepted).cumsum(1)), inputs()[0][0], decomposed=True)
    found = rewritten(graph_module)
    assert found.matched == 0 and list(found.refused) == ["the running count of rejections is used elsewhere"]
    assert operators(graph_module)[OP] == 0


def test_writing_in_place_is_refused() -> None:
    def verify(*arguments: Tensor) -> tuple[Tensor, ...]:
        arguments[2].sub_(1.0)
        return spelled()(*arguments)

    graph_module = make_fx(verify, tracing_mode="fake")(*inputs()[0][0])
    found = rewritten(graph_module)
    assert found.matched == 0 and list(found.refused) == ["the graph writes in place before its end"]


def test_uniforms_that_depend_on_the_walk_are_refused() -> None:
    def verify(t: Tensor, x: Tensor, d: Tensor, u: Tensor, s: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        draw: Callable[[Values], Tensor] = lambda v: (cdf(v) > (s + v.x.gather(1, v.n[:, None])[:, 0])[:, None]).int()  # noqa: E731
        return spelled(draw=lambda v: draw(v).argmax(-1))(t, x, d, u, s, temperature)

    found = rewritten(traced(verify, inputs()[0][0], decomposed=True))
    assert found.matched == 0 and found.refused.total() == 1


class _CallsOfTheOp(Interpreter):
    """Runs a graph and keeps the arguments of the op."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if str(target) == OP:
            self.arguments = args
        return super().call_function(target, args, kwargs)


EXCHANGED = {
    "lt": ("le", "gt", "ge"), "le": ("lt",), "gt": ("ge", "lt"), "ge": ("gt",),
    "add": ("sub",), "sub": ("add",), "mul": ("div",), "div": ("mul",),
    "maximum": ("minimum",), "minimum": ("maximum",), "clamp_min": ("clamp_max",), "clamp_max": ("clamp_min",),
    "argmax": ("argmin",), "amax": ("amin",), "cumsum": ("cumprod",), "relu": ("abs", "neg"),
}  # fmt: skip


def mutate(graph: Graph, generator: random.Random) -> None:
    """One change to one node: another operator, number or operand, or two operands swapped."""
    nodes = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    while True:
        node = generator.choice(nodes)
        packet, overload = str(node.target).removeprefix("aten.").split(".")[-2:]
        kind = generator.choice(["operator", "number", "operand", "swap"])
        args = list(node.args)
        numbers = [i for i, arg in enumerate(args) if isinstance(arg, (int, float)) and not isinstance(arg, bool)]
        lists = [i for i, arg in enumerate(args) if isinstance(arg, list) and arg and isinstance(arg[0], int)]
        if kind == "operator" and packet in EXCHANGED:
            other = getattr(torch.ops.aten, generator.choice(EXCHANGED[packet]))
            node.target = getattr(other, overload, None) or other.default
            return
        if kind == "number" and numbers:
            args[generator.choice(numbers)] += generator.choice([-1, 1])
        elif kind == "number" and lists:
            changed = list(args[lists[0]])
            changed[generator.randrange(len(changed))] += generator.choice([-1, 1])
            args[lists[0]] = changed
        elif kind == "swap" and len(args) >= 2 and all(isinstance(arg, Node) for arg in args[-2:]):
            args[-2:] = args[:-3:-1]
        elif kind == "operand" and (operands := [i for i, arg in enumerate(args) if isinstance(arg, Node)]):
            i = generator.choice(operands)
            like = [each for each in _before(graph, node) if _described(each) == _described(args[i])]
            args[i] = generator.choice(like)
        if tuple(args) != node.args:
            node.args = tuple(args)
            return


def _before(graph: Graph, node: Node) -> list[Node]:
    nodes = list(graph.nodes)
    return nodes[: nodes.index(node)]


def _described(node: Node) -> Any:
    value = node.meta.get("val")
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None


def copied(graph_module: GraphModule) -> GraphModule:
    result = GraphModule(graph_module, Graph())
    result.graph.output(result.graph.graph_copy(graph_module.graph, {}))
    return result


# B, K, V. Where sizes are equal, also a change of axis runs.
SHAPES = ((6, 3, 17), (4, 3, 4), (3, 3, 4))
NOT_A_GRAPH_THAT_RUNS = (RuntimeError, IndexError, TypeError, AttributeError, AssertionError, ValueError)


@functools.cache
def drawn(shape: tuple[int, int, int], seed: int) -> tuple[Tensor, ...]:
    """Arguments of the plain functions. Drafts are drawn from the draft. All numbers may pass for uniform ones."""
    batch, num_drafts, vocab_size = shape
    generator = torch.Generator().manual_seed(seed)
    target = 2 * torch.randn(batch, num_drafts + 1, vocab_size, generator=generator)
    draft = target[:, :-1] + torch.randn(batch, num_drafts, vocab_size, generator=generator)
    tokens = torch.multinomial(draft.softmax(-1).flatten(0, 1), 1, generator=generator).view(batch, num_drafts)
    u, s = (0.02 + 0.96 * torch.rand(size, generator=generator) for size in ((batch, num_drafts), (batch,)))
    return target, tokens, draft, u, s, 0.45 * TEMPERATURE[:batch]


def check_mutations(seed: int, number: int) -> Counter[str]:
    """Changes at random to spellings at random: what is still rewritten must still give the tokens of what it was
    written from."""
    generator = random.Random(seed)
    counts: Counter[str] = Counter()
    while counts["mutants"] < number:
        arguments = drawn(generator.choice(SHAPES), 0)
        names = {part: generator.choice(list(table)) for part, table in PARTS.items()}
        original = traced(spelled(**names), arguments, decomposed=generator.random() < 0.7)
        for _ in range(25):
            mutant = copied(original)
            mutate(mutant.graph, generator)
            mutant.recompile()
            try:
                after = mutant(*arguments)
                FakeTensorProp(mutant).propagate(*arguments)
            except NOT_A_GRAPH_THAT_RUNS:
                continue
            counts["mutants"] += 1
            counts["changed"] += not all(map(torch.equal, original(*arguments), after))
            graph_module = copied(mutant)
            if rewritten(graph_module).matched:
                counts["rewritten"] += 1
                counts["uncompared"] += compare_with_plain(mutant, graph_module, names) == 0
    return counts


def compare_with_plain(plain: GraphModule, graph_module: GraphModule, names: dict[str, str]) -> int:
    """How many batches were compared: those in which every row has a law and no rounding decides, as a change may mix
    the rows of the output."""
    batch, num_drafts, vocab_size = (*plain.graph.find_nodes(op="placeholder")[2].meta["val"].shape,)
    compared = 0
    for seed in range(4):
        arguments = drawn((batch, num_drafts, vocab_size), seed)
        calls = _CallsOfTheOp(graph_module)
        got = calls.run(*arguments)
        law = dict(zip(ARGUMENTS, calls.arguments, strict=True))
        if (rounding_rows(Case("", "verify_exact", law)) | without_law(law)).any():
            continue
        try:
            expected = plain(*arguments)
        except NOT_A_GRAPH_THAT_RUNS:
            continue
        assert all(map(torch.equal, expected, got)), (names, str(plain.graph))
        compared += 1
    return compared


def test_mutations() -> None:
    counts = check_mutations(seed=0, number=100)
    # Most changes change the tokens, and are no speculative sampling any more.
    assert counts["changed"] >= 60 and 10 <= counts["rewritten"] <= 45
    assert counts["uncompared"] <= 0.1 * counts["rewritten"]


def test_a_row_that_depends_on_the_count_of_another_is_refused() -> None:
    """q is masked by n < K of row v at token v, which only runs where B = V."""

    def weights(v: Values) -> Tensor:
        return normalised(F.relu(v.p_n - v.q_n * (v.n < v.k).float()[None, :]))

    found = rewritten(traced(spelled(weights=weights), drawn((4, 3, 4), 0), decomposed=True))
    assert found.matched == 0
    assert list(found.refused) == ["the token of one row depends on how many drafts of another are accepted"]


def test_rows_taken_before_the_softmax() -> None:
    """Each division by the temperature is of other rows."""

    def verify(t: Tensor, x: Tensor, d: Tensor, u: Tensor, s: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        def probabilities(v: Values) -> None:
            v.p = torch.softmax(t[:, :-1] / temperature[:, None, None], -1)
            v.q = torch.softmax(d / temperature[:, None, None], -1)

        def weights(v: Values) -> Tensor:
            p_n = torch.softmax(t[v.rows, v.n] / temperature[:, None], -1)
            bonus = torch.softmax(t[:, -1] / temperature[:, None], -1)
            return normalised(torch.where((v.n == v.k)[:, None], bonus, F.relu(p_n - v.q_n)))

        parts: dict[str, Any] = {"probabilities": probabilities, "gather": "gather without a slice", "weights": weights}
        return spelled(**parts)(t, x, d, u, s, temperature)

    for decomposed in (False, True):
        graph_module = traced(verify, inputs()[0][0], decomposed)
        assert rewritten(graph_module).matched == 1
        (call,) = (node for node in graph_module.graph.nodes if str(node.target) == OP)
        assert [arg.op for arg in call.args] == ["placeholder"] * 6
        assert_same_tokens(verify, graph_module, "temperature per row")


@pytest.fixture
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    dynamo_counters.clear()
    counters.reset()
    before = config.joint_custom_pre_pass
    yield
    assert config.joint_custom_pre_pass is before
    torch._dynamo.reset()


class OtherPass(CustomGraphPass):
    """A user's own: counts its calls."""

    def __init__(self, uuid: str | None = "theirs") -> None:
        self.calls = 0
        self.given = uuid

    def __call__(self, graph: Graph) -> None:
        self.calls += 1

    def uuid(self) -> Any:
        return self.given


def run_pass(function: Function, arguments: tuple[Any, ...]) -> GraphModule:
    """What Inductor does with the setting, without the rest of it."""
    graph_module = traced(function, arguments, decomposed=True)
    ours = config.joint_custom_pre_pass
    if ours is not None:
        ours(graph_module.graph)
    return graph_module


@pytest.mark.usefixtures("clean")
def test_installing_counting_and_restoring() -> None:
    arguments = inputs()[0][0]
    assert operators(run_pass(spelled(), arguments))[OP] == 0
    with rewrite() as outer:
        assert operators(run_pass(spelled(), arguments))[OP] == 1
        with rewrite() as inner:
            run_pass(spelled(draw="searchsorted"), arguments)
            run_pass(spelled(acceptance=NEAR_MISSES["u <= p / q"][0]["acceptance"]), arguments)
        assert isinstance(config.joint_custom_pre_pass, RewritePass)
        run_pass(spelled(), arguments)
    assert config.joint_custom_pre_pass is None
    assert (inner.matched, inner.refused.total()) == (1, 1)
    assert (outer.matched, outer.refused) == (3, inner.refused)
    assert (counters.matched, counters.refused) == (3, inner.refused)
    counters.reset()
    assert (counters.matched, counters.refused) == (0, {})

    install()
    install()
    uninstall()
    assert operators(run_pass(spelled(), arguments))[OP] == 1
    uninstall()
    assert config.joint_custom_pre_pass is None
    assert counters.matched == 1
    with pytest.raises(RuntimeError, match="uninstall: nothing is installed"):
        uninstall()


@pytest.mark.usefixtures("clean")
def test_an_exception_restores() -> None:
    def fail() -> None:
        with rewrite():
            assert isinstance(config.joint_custom_pre_pass, RewritePass)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert config.joint_custom_pre_pass is None


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("several", [False, True])
def test_a_pass_of_the_user_is_kept(several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = OtherPass()
    setting: Any = [theirs, theirs] if several else theirs
    with config.patch(joint_custom_pre_pass=setting):
        with rewrite() as counted:
            run_pass(spelled(), inputs()[0][0])
            assert config.joint_custom_pre_pass.uuid() == (
                "torch_specops.inductor", source_digest(), *["theirs"] * (1 + several),
            )  # fmt: skip
        assert config.joint_custom_pre_pass is setting
    assert theirs.calls == 1 + several and counted.matched == 1


@pytest.mark.usefixtures("clean")
def test_a_pass_set_inside_is_left_alone() -> None:
    theirs = OtherPass()
    with rewrite():
        config.joint_custom_pre_pass = theirs
    assert config.joint_custom_pre_pass is theirs
    config.joint_custom_pre_pass = None


def test_uuid(tmp_path: Path) -> None:
    """Another for another source; none, so no caching, beside a pass without one."""
    ours = RewritePass((), lambda found: None)
    assert ours.uuid() == ("torch_specops.inductor", source_digest())
    copies = []
    for file in (Path(torch_specops.__file__).parent / "inductor").glob("*.py"):
        copies.append(tmp_path / file.name)
        copies[-1].write_bytes(file.read_bytes())
    assert digest(copies) == source_digest()
    copies[0].write_text(copies[0].read_text() + "\n")
    assert digest(copies) != source_digest()

    assert RewritePass((OtherPass(None),), print).uuid() is None
    assert RewritePass((lambda graph: None,), print).uuid() is None


def hits_and_misses() -> list[int]:
    cache = dynamo_counters["aot_autograd"]
    return [cache["autograd_cache_hit"], cache["autograd_cache_miss"]]


FRESH_PROCESS = """
import sys, torch, torch_specops, torch_specops.inductor
assert "torch._inductor" not in sys.modules and "triton" not in sys.modules
from torch._inductor import config
assert config.joint_custom_pre_pass is None

from naive_verification import spelled
from torch._dynamo.utils import counters
function = torch.compile(spelled(probabilities="temperature per row", count="cumprod"), fullgraph=True, dynamic=False)
with torch_specops.inductor.rewrite() as counted:
    function(*torch.load(sys.argv[1]))
print(counters["aot_autograd"]["autograd_cache_hit"], counted.matched)
"""


@pytest.mark.usefixtures("clean")
def test_compiled() -> None:
    """With Inductor itself: the op is called, and gives the tokens of the plain code."""
    arguments, _ = inputs("temperature per row")[0]
    plain = spelled(probabilities="temperature per row", count="cumprod")
    with fresh_cache():
        compiled = torch.compile(plain, fullgraph=True, dynamic=False)
        with rewrite() as counted:
            _, code = run_and_get_code(compiled, *arguments)
        assert (counted.matched, dict(counted.refused), hits_and_misses()) == (1, {}, [0, 1])
        assert sum(text.count("torch.ops.specops.verify_exact.default(") for text in code) == 1
        assert not any("exp(" in text for text in code)
        for own, open_rows in inputs("temperature per row"):
            for want, have in zip(plain(*own), compiled(*own), strict=True):
                assert torch.equal(want[~open_rows], have[~open_rows])


def test_another_process_finds_the_rewritten_graph_in_the_cache(tmp_path: Path) -> None:
    """So the pass has the same uuid there. What is taken from the cache has been rewritten before."""
    arguments, _ = inputs("temperature per row")[0]
    torch.save(arguments, tmp_path / "tensors")
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", FRESH_PROCESS, str(tmp_path / "tensors")]
    hits_and_matched = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, timeout=300, check=True, capture_output=True, text=True)
        hits_and_matched.append(done.stdout.split())
    assert hits_and_matched == [["0", "1"], ["1", "0"]]


@pytest.mark.usefixtures("clean")
def test_without_the_pass_the_cache_of_the_pass_is_not_used() -> None:
    def square() -> None:
        torch._dynamo.reset()
        torch.compile(torch.square)(torch.ones(3))

    with fresh_cache():
        for _ in range(2):
            with rewrite():
                square()
        assert hits_and_misses() == [1, 1]
        square()
        assert hits_and_misses() == [1, 2]


@pytest.mark.usefixtures("clean")
def test_dynamic_batch() -> None:
    """One graph for every batch: sizes are expressions."""
    graphs: list[GraphModule] = []

    def backend(graph_module: GraphModule, examples: list[Any]) -> Any:
        from functorch.compile import make_boxed_func

        assert rewritten(graph_module).matched == 1
        graphs.append(graph_module)
        return make_boxed_func(graph_module.forward)

    from torch._dynamo.backends.common import aot_autograd

    aot = aot_autograd(fw_compiler=backend, decompositions=decompositions())
    function = spelled(weights="all rows", probabilities="temperature per row", output="by the mask of acceptances")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=aot)
    for rows in (slice(0, 5), slice(1, 6), slice(0, 3)):
        for arguments, open_rows in inputs("temperature per row")[:3]:
            own = tuple(argument[rows] for argument in arguments)
            with torch.no_grad():
                got = compiled(*own)
            for want, have in zip(function(*own), got, strict=True):
                assert torch.equal(want[~open_rows[rows]], have[~open_rows[rows]])
    assert len(graphs) == 1
    assert any(isinstance(n.meta["val"], torch.SymInt) for n in graphs[0].graph.nodes if n.op == "placeholder")
