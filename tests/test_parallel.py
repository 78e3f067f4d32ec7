"""Verification and sampling on sharded logits, in four gloo processes, against the op on the whole logits."""

from __future__ import annotations

import contextlib
import io
import itertools
import multiprocessing
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import Report
from functorch.compile import make_boxed_func
from test_laws import TRIALS, Uniforms, V, chain_p_values, emit, tables
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import compile_fx_inner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_specops
from torch_specops import parallel
from torch_specops.parallel import exact, shard_sizes, wire_bytes
from torch_specops.parallel.exchange import all_gather, shard_of
from torch_specops.testing import Case, chi_square, compare, poison_memory, rounding_rows, sample_inputs

NUM_RANKS = 4
# Two of the four, so that a rank of the group is not the rank of the process.
PAIR = (1, 3)
TIMEOUT = 240

Result = tuple[Tensor, Tensor]


class Ranks:
    """Processes of one group. Each call runs a function of this module in all of them, with the same arguments."""

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connections, self.processes = [], []
        for rank in range(NUM_RANKS):
            own, other = context.Pipe()
            process = context.Process(target=serve, args=(rank, str(folder / "store"), other), daemon=True)
            process.start()
            self.connections.append(own)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for connection in self.connections:
            connection.send((function.__name__, args))
        answers = []
        for rank, connection in enumerate(self.connections):
            assert connection.poll(TIMEOUT), f"rank {rank} does not answer"
            answers.append(torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False))
        errors = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(answers) if error is not None]
        assert not errors, "\n".join(errors)
        return [result for _, result in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def serve(rank: int, store: str, connection: Connection) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=TIMEOUT)
    )
    global pair
    pair = dist.new_group(list(PAIR))
    while True:
        name, args = connection.recv()
        error = result = None
        try:
            result = globals()[name](*args)
        except Exception:
            error = traceback.format_exc()
        stream = io.BytesIO()
        torch.save((error, result), stream)
        connection.send_bytes(stream.getvalue())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    processes = Ranks(tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.close()


@dataclass(frozen=True)
class Split:
    """How the logits lie: over four ranks or two, in shards of which sizes, the draft's sharded or whole."""

    sizes: tuple[int, ...]
    draft_is_whole: bool = False

    def group(self) -> dist.ProcessGroup | None:
        """None on a rank that does not take part."""
        if len(self.sizes) == NUM_RANKS:
            return dist.group.WORLD
        return pair if dist.get_rank() in PAIR else None

    def cut(self, args: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
        """The arguments as one rank has them: a view of its columns."""
        start = sum(self.sizes[: group.rank()])
        stop = start + self.sizes[group.rank()]
        names = {"logits", "target_logits"} | (set() if self.draft_is_whole else {"draft_logits"})
        sharded = {name: args[name][..., start:stop] for name in names if args.get(name) is not None}
        return args | sharded | {"group": group, "shard_sizes": self.sizes}


def run_cases(cases: list[Case], split: Split) -> list[tuple[Tensor, ...]] | None:
    group = split.group()
    if group is None:
        return None
    with poison_memory():
        return [getattr(parallel, case.op)(**split.cut(case.args, group)) for case in cases]


def run_sample_inputs(op: str, vocab_size: int, split: Split) -> list[tuple[Tensor, ...]] | None:
    return run_cases(shared_cases(op, vocab_size), split)


def shared_cases(op: str, vocab_size: int) -> list[Case]:
    """The cases of every backend, but for arguments that these functions do not have."""
    filters = {"top_k", "top_p", "min_p", "argmax_lenience"}
    return [case for case in sample_inputs(op, vocab_sizes=[vocab_size]) if not filters & case.args.keys()]


def agreed(results: list[Any]) -> list[tuple[Tensor, ...]]:
    """What the ranks that took part returned, which must be the same bit for bit."""
    first, *others = [result for result in results if result is not None]
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    return first


def check(cases: list[Case], results: list[Any], report: Report) -> int:
    """Off the margin as the op on the whole logits and the oracle, within it lawful. How many rows were open."""
    open_rows = 0
    for case, got in zip(cases, agreed(results), strict=True):
        comparison = compare(case, got)
        report.add(case, comparison)
        assert comparison.wrong == [], f"{case.name}: rows {comparison.wrong} differ from the oracle off the margin"
        single = getattr(torch_specops, case.op)(**case.args)
        differing = [row for row, (a, b) in enumerate(zip(got[0], single[0], strict=True)) if not torch.equal(a, b)]
        assert not differing or bool(rounding_rows(case)[differing].all()), case.name
        open_rows += 0 if case.name.startswith("tie_") else comparison.rounding
    return open_rows


SPLITS = [
    Split(shard_sizes(130, 4)),
    Split((5, 0, 1, 124), draft_is_whole=True),
    Split(shard_sizes(17, 4)),
    Split((16, 1)),
    Split(shard_sizes(3, 2), draft_is_whole=True),
    Split((0, 1, 0, 0)),
]


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(map(str, split.sizes)))
@pytest.mark.parametrize("op", ["verify_exact", "sample"])
def test_sharded_equals_whole(op: str, split: Split, ranks: Ranks, report: Report) -> None:
    """Every case of the other backends: dtypes, strides, masks, NaN, temperatures, padding, one-hot, lse, lenience."""
    cases = shared_cases(op, sum(split.sizes))
    assert len(cases) > 30
    open_rows = check(cases, ranks(run_sample_inputs, op, sum(split.sizes), split), report)
    assert open_rows < 0.02 * sum(len(next(iter(case.args.values()))) for case in cases)


def base_case(vocab_size: int, **edits: Any) -> dict[str, Any]:
    """64 rows of three drafts drawn from the draft, a third of them greedy."""
    generator = torch.Generator().manual_seed(vocab_size)
    target = 2 * torch.randn(64, 4, vocab_size, generator=generator)
    draft = target[:, :3] + torch.randn(64, 3, vocab_size, generator=generator)
    temperature = torch.tensor([0.0, 1.0, 0.7]).repeat(22)[:64]
    drafts, lse = torch_specops.sample(
        draft.flatten(0, 1), torch.rand(192, generator=generator), temperature.repeat_interleave(3)
    )
    return {
        "target_logits": target,
        "draft_tokens": drafts.view(64, 3),
        "draft_logits": draft,
        "accept_uniforms": torch.rand(64, 3, generator=generator),
        "sample_uniforms": torch.rand(64, generator=generator),
        "temperature": temperature,
        "draft_lse": lse.view(64, 3),
    } | edits


def special_cases() -> list[Case]:
    """What a split makes special: shards without a finite entry, and residuals that lie in one shard or in none."""
    args = base_case(16)
    cases = []
    for shard in range(4):
        columns = slice(4 * shard, 4 * shard + 4)
        for value in (-torch.inf, torch.nan):
            target, draft = args["target_logits"].clone(), args["draft_logits"].clone()
            target[..., columns] = value
            cases.append(Case(f"target {value} in shard {shard}", "verify_exact", args | {"target_logits": target}))
            draft[..., columns] = value
            without_lse = args | {"draft_logits": draft, "draft_lse": None}
            cases.append(Case(f"draft {value} in shard {shard}", "verify_exact", without_lse))
            cases.append(
                Case(f"both {value} in shard {shard}", "verify_exact", without_lse | {"target_logits": target})
            )
        # The target beats the draft in this shard alone, and the drafts are of the others.
        draft = args["target_logits"][:, :3].clone()
        draft[..., columns] -= 3.0
        drafts = torch.full((64, 3), 4 * ((shard + 1) % 4))
        in_one = args | {"draft_logits": draft, "draft_lse": None, "draft_tokens": drafts}
        rejecting = in_one | {"accept_uniforms": torch.full((64, 3), 1 - 2.0**-24)}
        cases.append(Case(f"residual in shard {shard}", "verify_exact", rejecting))
    # Equal logits and an lse too small: q exceeds p everywhere, drafts are rejected, and no shard has a residual.
    same = args["target_logits"][:, :3].clone()
    for shift in (-0.5, 0.0, 0.5):
        lse = torch.logsumexp(same / args["temperature"].clamp(min=1e-3).view(-1, 1, 1), -1) + shift
        zero = args | {"draft_logits": same, "draft_lse": lse, "accept_uniforms": torch.full((64, 3), 1 - 2.0**-24)}
        cases.append(Case(f"tie_no residual, lse + {shift}", "verify_exact", zero))
    nothing = torch.full((64, 4, 16), -torch.inf)
    cases.append(Case("no finite entry", "verify_exact", args | {"target_logits": nothing}))
    cases.append(Case("no draft has one", "verify_exact", args | {"draft_logits": nothing[:, :3], "draft_lse": None}))
    # One maximum in every shard: the lowest index wins, across shards too.
    tied = args["target_logits"].clone()
    tied[..., [3, 6, 9, 15]] = 50.0
    tied[::2, :, 3] = 0.0
    cases.append(Case("tied maxima", "verify_exact", args | {"target_logits": tied}))
    # Maxima so far apart that a shard's mass vanishes relative to another's.
    apart = args["target_logits"] + 200.0 * torch.arange(16).div(4, rounding_mode="floor")
    cases.append(Case("shards far apart", "verify_exact", args | {"target_logits": apart}))
    for name in ("no finite entry", "tied maxima", "shards far apart"):
        verify = next(case.args for case in cases if case.name == name)
        logits, s, t = verify["target_logits"][:, 0], verify["sample_uniforms"], verify["temperature"]
        cases.append(Case(f"sample, {name}", "sample", {"logits": logits, "uniforms": s, "temperature": t}))
    return cases


def run_special_cases(split: Split) -> list[tuple[Tensor, ...]] | None:
    return run_cases(special_cases(), split)


@pytest.mark.parametrize("split", [Split((4, 4, 4, 4)), Split((4, 12), draft_is_whole=True)], ids=["even", "uneven"])
def test_shards_without_mass(split: Split, ranks: Ranks, report: Report) -> None:
    cases = special_cases()
    results = ranks(run_special_cases, split)
    check(cases, results, report)
    got = dict(zip([case.name for case in cases], agreed(results), strict=True))
    for shard in range(4):
        output, n = got[f"residual in shard {shard}"]
        next_token = output[torch.arange(64), n]
        rejected = (n < 3) & (cases[0].args["temperature"] > 0)
        assert rejected.sum() > 30 and (next_token[rejected] // 4 == shard).all()
    rejected = got["tie_no residual, lse + -0.5"][1] < 3
    assert rejected.sum() > 30 and (got["tie_no residual, lse + 0.5"][1][1::3] == 3).all()
    assert (got["no finite entry"][0][:, 0] == -1).all()


class CountCollectives(TorchDispatchMode):
    """The name of every collective that an eager call makes, and the bytes that this rank receives by it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.received = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.name().split("::")
        if "c10d" in namespace and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.names.append(name)
            sent, num_ranks = args[0], args[1]
            self.received += sent.nbytes * (num_ranks - 1)
        return func(*args, **(kwargs or {}))


def count_collectives(names: list[str], split: Split) -> list[tuple[list[str], int]] | None:
    group = split.group()
    if group is None:
        return None
    counts = []
    for case in sample_inputs("verify_exact", vocab_sizes=[sum(split.sizes)], names=names):
        with CountCollectives() as counted:
            parallel.verify_exact(**split.cut(case.args, group))
        counts.append((counted.names, counted.received))
    return counts


@pytest.mark.parametrize("split", [Split((5, 5, 5, 2)), Split((9, 8), draft_is_whole=True)], ids=["4", "2"])
def test_wire_bytes_are_counted(split: Split, ranks: Ranks) -> None:
    names = [
        "k3",
        "k8",
        "k0",
        "k0_greedy",
        "greedy",
        "greedy_mixed",
        "one_hot",
        "one_hot_cold",
        "lse",
        "lse_temperature",
    ]
    cases = list(sample_inputs("verify_exact", vocab_sizes=[17], names=names))
    assert len(cases) == len(names)
    counts = [count for count in ranks(count_collectives, names, split) if count is not None]
    assert len(counts) == len(split.sizes)
    for i, case in enumerate(cases):
        args = case.args
        batch, num_drafts = args["draft_tokens"].shape
        draft = "one_hot" if args["draft_logits"] is None else "lse" if "draft_lse" in args else "logits"
        expected = wire_bytes(batch, num_drafts, len(split.sizes), draft, "temperature" in args)
        for rank in counts:
            assert rank[i] == (["all_gather_into_tensor"] * 3, expected), case.name


def count_at_model_size(vocab_size: int, num_drafts: int) -> tuple[int, int]:
    """Bytes received by verification and by all-gathers of the logits, counted alike, in bfloat16."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    sizes = shard_sizes(vocab_size, NUM_RANKS)
    target = torch.zeros(1, num_drafts + 1, sizes[dist.get_rank()], dtype=torch.bfloat16)
    draft = target[:, :num_drafts]
    tokens, u, s = torch.zeros(1, num_drafts, dtype=torch.int64), torch.zeros(1, num_drafts), torch.zeros(1)
    with CountCollectives() as verification:
        parallel.verify_exact(target, tokens, draft, u, s, temperature=torch.ones(1), group=mesh)
    with CountCollectives() as logits:
        for x in (target, draft):
            DTensor.from_local(x, mesh, [Shard(-1)]).full_tensor()
    return verification.received, logits.received


def test_wire_bytes_against_an_all_gather(ranks: Ranks, record_property: Callable[[str, object], None]) -> None:
    vocab_size, num_drafts = 128_256, 5
    for verification, logits in ranks(count_at_model_size, vocab_size, num_drafts):
        record_property("wire_bytes", verification)
        record_property("logits_bytes", logits)
        assert verification == wire_bytes(1, num_drafts, NUM_RANKS) == 1032
        assert logits == 3 * (2 * num_drafts + 1) * vocab_size // NUM_RANKS * 2 == 2_116_224


def test_wire_bytes_grow_with_ranks_and_rows() -> None:
    assert wire_bytes(64, 5, 8) == 64 * 7 * wire_bytes(1, 5, 2)


def emit_sharded(seed: int, kind: str | None, num_drafts: int, wrong: str | None) -> Tensor:
    """Tokens by steps whose verification is sharded; without a `kind`, drafts are one-hot."""
    target, draft = tables(seed, kind or "close")
    split = Split((V // NUM_RANKS,) * NUM_RANKS)

    def verify(propose: Tensor, **args: Any) -> Result:
        return parallel.verify_exact(**split.cut(args, dist.group.WORLD))

    with contextlib.ExitStack() as mistakes:
        if wrong is not None:
            name, replacement = WRONG[wrong]
            mistakes.enter_context(mock.patch.object(exact, name, replacement))
        return emit(target, draft if kind else None, num_drafts, Uniforms(seed=seed + 1), verify=verify)


def residual_normalised_per_shard(x: Tensor, shards: Any) -> Tensor:
    """A shard is drawn by its mass of p, the token in it from its residual."""
    every = all_gather(x, shards)
    if x.shape == (3, TRIALS):
        every[:, 1] = every[:, 0] * (every[:, 1] > 0)
    return every


def sums_without_the_maximum(z_max: Tensor, z_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums relative to the maximum of each shard are added as though it were one."""
    return z_max.amax(0), z_sum.sum(0), z_sum


def one_number_for_shard_and_token(mass: Tensor, uniforms: Tensor) -> Result:
    """The uniform number that chose the shard chooses in it too, as it is."""
    return shard_of(mass, uniforms)[0], uniforms.double()


WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "residual normalised per shard": ("all_gather", residual_normalised_per_shard),
    "sums without the maximum": ("merge_stats", sums_without_the_maximum),
    "one number for shard and token": ("shard_of", one_number_for_shard_and_token),
}
# The laws of this module share a level of 1e-4, as those of test_laws do.
LAWS = [("opposite", 2), ("close", 1), (None, 2)]
LEVEL = 1e-4 / (5 * len(LAWS) + 1)


@pytest.mark.parametrize("kind, num_drafts", LAWS)
def test_tokens_follow_the_target(
    kind: str | None, num_drafts: int, ranks: Ranks, record_property: Callable[[str, object], None]
) -> None:
    """16 tokens over four ranks: the marginals and joint laws of three tokens, as in test_laws."""
    first, *others = ranks(emit_sharded, 21, kind, num_drafts, None)
    assert all(torch.equal(first, other) for other in others)
    assert first.unique().tolist() == list(range(V))
    p_values = chain_p_values(first, tables(21, kind or "close")[0])
    record_property("p_values", p_values)
    assert min(p_values.values()) > LEVEL, p_values


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_verification_is_caught(wrong: str, ranks: Ranks, record_property: Callable[[str, object], None]) -> None:
    p_values = chain_p_values(ranks(emit_sharded, 21, "opposite", 2, wrong)[0], tables(21, "opposite")[0])
    record_property("p_values", p_values)
    assert min(p_values.values()) < LEVEL, p_values


def sample_sharded() -> Result:
    logits, _ = tables(23, "close")
    uniforms = torch.rand(TRIALS, generator=torch.Generator().manual_seed(24))
    own = logits[0].expand(TRIALS, V)[:, 4 * dist.get_rank() :][:, :4]
    return parallel.sample(own, uniforms, torch.full((TRIALS,), 0.7))


def test_sample_follows_softmax(ranks: Ranks) -> None:
    tokens, lse = agreed([[result] for result in ranks(sample_sharded)])[0]
    z = tables(23, "close")[0][0].double() / 0.7
    assert chi_square(torch.bincount(tokens, minlength=V), torch.softmax(z, 0)) > LEVEL
    torch.testing.assert_close(lse, torch.logsumexp(z, 0).float().expand(TRIALS))


def run_dtensors(vocab_size: int) -> list[tuple[Tensor, ...]]:
    """Every pair of placements, on a mesh of one dimension and on one of two."""
    args = base_case(vocab_size, draft_lse=None)
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    shard, whole = (Shard(-1),), (Replicate(),)
    results = []
    for mesh, target, draft, extra in (
        (line, shard, shard, {}),
        (line, shard, whole, {"group": line}),
        (line, whole, shard, {"group": dist.group.WORLD}),
        (line, whole, whole, {"shard_sizes": shard_sizes(vocab_size, 4)}),
        (square, whole + shard, whole + shard, {}),
        (square, whole + shard, whole + whole, {}),
        (square, whole + whole, whole + whole, {"group": square["model"]}),
        (line, shard, None, {}),
    ):
        placements = {"target_logits": target, "draft_logits": draft, "draft_tokens": whole * mesh.ndim}
        placed = {
            name: args[name] if placement is None else distribute_tensor(args[name], mesh, placement)
            for name, placement in placements.items()
        }
        results.append(parallel.verify_exact(**args | placed, **extra))
    whole_logits = distribute_tensor(args["target_logits"][:, 0], line, shard)
    results.append(parallel.sample(whole_logits, args["sample_uniforms"], args["temperature"]))
    return results


@pytest.mark.parametrize("vocab_size", [17, 5])
def test_dtensors(vocab_size: int, ranks: Ranks, report: Report) -> None:
    """5 tokens over 4 ranks leave the last without a column."""
    args = base_case(vocab_size, draft_lse=None)
    cases = [Case(f"DTensor {i}", "verify_exact", args) for i in range(8)]
    sampled = {"logits": args["target_logits"][:, 0], "uniforms": args["sample_uniforms"]}
    cases.append(Case("DTensor", "sample", sampled | {"temperature": args["temperature"]}))
    check(cases, ranks(run_dtensors, vocab_size), report)


def compiled_step(options: dict[str, Any]) -> Callable[..., Result]:
    def step(args: dict[str, Any]) -> Result:
        return parallel.verify_exact(**args, **options)

    return step


def run_compiled(backend: str, dtensor: bool) -> tuple[list[list[str]], list[tuple[Tensor, ...]]]:
    """The collectives of every graph, and the results of two calls compiled and in eager."""
    graphs: list[list[str]] = []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if "c10d" in str(node.target)])
        return make_boxed_func(graph.forward) if backend == "record" else compile_fx_inner(graph, inputs)

    split = Split((5, 5, 5, 2))
    args = [split.cut(base_case(17, accept_uniforms=torch.full((64, 3), u)), dist.group.WORLD) for u in (0.5, 0.9)]
    options: dict[str, Any] = {"group": dist.group.WORLD, "shard_sizes": split.sizes}
    args = [{name: value for name, value in each.items() if name not in options} for each in args]
    if dtensor:
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        options = {}
        for each in args:
            for name in ("target_logits", "draft_logits"):
                local = each[name]
                shape = torch.Size([*local.shape[:-1], 17])
                stride = (17 * shape[1], 17, 1)
                each[name] = DTensor.from_local(local, mesh, [Shard(-1)], shape=shape, stride=stride)
    eager = compiled_step(options)
    compiled = torch.compile(eager, fullgraph=True, backend=aot_autograd(fw_compiler=record))
    results = []
    try:
        for i, each in enumerate(args):
            with torch._dynamo.config.patch(error_on_recompile=i > 0):
                results += [compiled(each), eager(each)]
    finally:
        torch._dynamo.reset()
    return graphs, results


@pytest.mark.parametrize(
    "backend, dtensor",
    [("record", False), ("record", True), pytest.param("inductor", False, marks=pytest.mark.slow)],
    ids=["shards", "DTensors", "inductor"],
)
def test_one_graph_with_three_collectives(backend: str, dtensor: bool, ranks: Ranks) -> None:
    expected = ["_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.wait_tensor.default"] * 3
    every = ranks(run_compiled, backend, dtensor)
    for graphs, (first, first_eager, second, second_eager) in every:
        assert graphs == [expected]
        for compiled, eager in ((first, first_eager), (second, second_eager)):
            assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))
        assert not torch.equal(first[1], second[1])
    agreed([results for _, results in every])


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def bad_calls() -> dict[str, str]:
    args = Split((4, 4, 4, 4)).cut(base_case(16), dist.group.WORLD)
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    local, full = args["target_logits"], base_case(16)["target_logits"]
    logits, uniforms = local[:, 0], args["sample_uniforms"]

    def placed(mesh: Any, *placements: Any, value: Tensor = local) -> DTensor:
        return DTensor.from_local(value, mesh, placements, run_check=False)

    def of(**changes: Any) -> str:
        return raised(lambda: parallel.verify_exact(**args | changes))

    return {
        "list": of(target_logits=local.tolist()),
        "draft list": of(draft_logits=[]),
        "lenience": of(lenience=2.0),
        "lenience type": of(lenience="1"),
        "dimensions": of(target_logits=local[0]),
        "dtype": of(target_logits=local.double()),
        "whole target": of(target_logits=full),
        "draft width": of(draft_logits=args["draft_logits"][..., :3]),
        "draft rows": of(draft_logits=args["draft_logits"][:, :2]),
        "tokens": of(draft_tokens=args["draft_tokens"].float()),
        "too few sizes": of(shard_sizes=(8, 8)),
        "negative size": of(shard_sizes=(8, 8, 4, -4)),
        "no column": of(shard_sizes=(0, 0, 0, 0)),
        "other sizes": of(shard_sizes=(5, 5, 5, 1)),
        "group": of(group="world"),
        "mesh": of(group=square),
        "Shard(0)": of(target_logits=placed(line, Shard(0))),
        "Partial": of(target_logits=placed(line, Partial())),
        "twice": of(target_logits=placed(square, Shard(-1), Shard(-1)), group=None),
        "other mesh": of(target_logits=placed(square, Replicate(), Shard(-1))),
        "sharded tokens": of(draft_tokens=placed(line, Shard(0), value=args["draft_tokens"])),
        "sizes of a DTensor": of(target_logits=placed(line, Shard(-1)), shard_sizes=(4, 4, 4, 5)),
        "vocabularies": of(
            target_logits=placed(line, Shard(-1)), draft_logits=placed(line, Replicate(), value=args["draft_logits"])
        ),
        "sample": raised(lambda: parallel.sample(local, uniforms)),
        "sample uniforms": raised(lambda: parallel.sample(logits, uniforms[:3])),
        "sample temperature": raised(lambda: parallel.sample(logits, uniforms, 1.0)),
    }


MESSAGES = {
    "list": r"TypeError: target_logits: expected a tensor, got <class 'list'>",
    "draft list": r"TypeError: draft_logits: expected a tensor",
    "lenience": r"ValueError: lenience: expected a number in \(0, 1\], got 2.0",
    "lenience type": r"TypeError: lenience: expected a number",
    "dimensions": r"ValueError: target_logits: expected 3 dimensions, got shape \[4, 4\]",
    "dtype": r"TypeError: target_logits: expected float32",
    "whole target": r"ValueError: target_logits: expected 4 columns, the shard of rank \d of \[4, 4, 4, 4\], got shape",
    "draft width": r"ValueError: draft_logits: expected 4 columns, .* or 16, the whole vocabulary, got shape",
    "draft rows": r"ValueError: draft_logits: expected",
    "tokens": r"TypeError: draft_tokens: expected int64 or int32",
    "too few sizes": r"ValueError: shard_sizes: expected 4 numbers of columns, one a rank, got \[8, 8\]",
    "negative size": r"ValueError: shard_sizes: expected 4 numbers",
    "no column": r"ValueError: shard_sizes: expected 4 numbers",
    "other sizes": r"ValueError: target_logits: expected [51] columns, the shard of rank \d of \[5, 5, 5, 1\]",
    "group": r"TypeError: group: expected a ProcessGroup, a DeviceMesh or None, got <class 'str'>",
    "mesh": r"ValueError: group: expected a mesh of one dimension, got 2",
    "Shard(0)": r"ValueError: target_logits: expected placements Shard\(-1\) or Replicate\(\), got S(hard)?\(.*0\)",
    "Partial": r"ValueError: target_logits: expected placements Shard\(-1\) or Replicate\(\), got P",
    "twice": r"ValueError: target_logits: expected Shard\(-1\) on one dimension of the mesh",
    "other mesh": r"ValueError: target_logits: expected a DTensor sharded over the group of the call",
    "sharded tokens": r"ValueError: draft_tokens: expected placements Replicate\(\)",
    "sizes of a DTensor": r"ValueError: target_logits: expected a vocabulary of 17, as the shards have, got 16",
    "vocabularies": r"ValueError: draft_logits: expected a vocabulary of 16, as the shards have, got 4",
    "sample": r"ValueError: logits: expected 2 dimensions",
    "sample uniforms": r"ValueError: uniforms: expected \[N\] = \[64\]",
    "sample temperature": r"TypeError: temperature: expected a tensor",
}


def test_bad_arguments(ranks: Ranks) -> None:
    for got in ranks(bad_calls):
        assert got.keys() == MESSAGES.keys()
        for name, message in MESSAGES.items():
            assert re.match(message, got[name]), f"{name}: {got[name]}"


def test_no_process_group() -> None:
    """Here in the tests' own process there is none."""
    with pytest.raises(ValueError, match="group: expected a ProcessGroup or a DeviceMesh, or an initialised default"):
        parallel.sample(torch.zeros(2, 3), torch.zeros(2))


def disagreeing_calls() -> dict[str, str]:
    """Arguments that rank 2 has otherwise."""
    args = Split((4, 4, 4, 4)).cut(base_case(16), dist.group.WORLD)
    args |= {"shard_sizes": None, "check_ranks": True}
    odd = dist.get_rank() == 2
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "sample_uniforms": {"sample_uniforms": args["sample_uniforms"].flip(0)},
        "accept_uniforms": {"accept_uniforms": args["accept_uniforms"].double()},
        "draft_tokens": {"draft_tokens": args["draft_tokens"] + 1},
        "temperature": {"temperature": None},
        "lenience": {"lenience": 0.5},
        "draft_logits": {"draft_logits": None, "draft_lse": None},
        "shard_sizes": {"target_logits": args["target_logits"][..., :3], "draft_logits": args["draft_logits"][..., :3]},
        "target_logits": {name: value[:32] for name, value in args.items() if isinstance(value, Tensor)},
    }
    got = {
        name: raised(lambda change=change: parallel.verify_exact(**args | (change if odd else {})))
        for name, change in changes.items()
    }
    logits, uniforms = args["target_logits"][:, 0], args["sample_uniforms"]
    got["uniforms"] = raised(lambda: parallel.sample(logits, uniforms + 0.1 * odd, check_ranks=True))
    compiled = torch.compile(parallel.sample, backend="eager")
    try:
        compiled(logits, uniforms, check_ranks=True)
        got["compiled"] = "nothing"
    except Exception as error:
        got["compiled"] = str(error)
    torch._dynamo.reset()
    return got


def test_check_ranks(ranks: Ranks) -> None:
    for got in ranks(disagreeing_calls):
        assert got.pop("nothing") == "nothing"
        assert "check_ranks: expected False in a compiled call" in got.pop("compiled")
        for name, message in got.items():
            assert message == f"ValueError: {name}: expected the same on every rank, got another value on ranks [2]"


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: shard_sizes(0, 4), "vocab_size, num_ranks: expected numbers above 0, got 0, 4"),
        (lambda: shard_sizes(4, 0), "vocab_size, num_ranks: expected numbers above 0, got 4, 0"),
        (lambda: wire_bytes(1, 1, 2, "soft"), "draft: expected one of logits, lse, one_hot, got 'soft'"),
        (lambda: wire_bytes(1, -1, 2), "expected at least 0, 0 and 1, got 1, -1, 2"),
    ],
)
def test_bad_sizes(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize("vocab_size, num_ranks", list(itertools.product([1, 5, 16, 50257], [1, 2, 4, 8])))
def test_shard_sizes_are_those_of_chunk(vocab_size: int, num_ranks: int) -> None:
    chunks = [len(chunk) for chunk in torch.zeros(vocab_size).chunk(num_ranks)]
    assert shard_sizes(vocab_size, num_ranks) == (*chunks, *[0] * (num_ranks - len(chunks)))
