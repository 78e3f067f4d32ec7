"""The ops on a GPU, one call at a time: `make test-gpu`. Skipped where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import gpu_suite
import pytest
import torch
from attention_cases import CASES, TOLERANCE, AttentionCase
from gpu_suite import CASE_SETS, CaseSet, call, case_of, filters, is_smoke, no_synchronisation, size, verify_inputs
from op_cases import OPS, equal
from report import Report
from torch import Tensor

import torch_specops
from torch_specops import testing
from torch_specops.ops.attention import MIN_CAUSAL_TOKENS, attend, attend_causal, is_long_text
from torch_specops.ops.uniforms import step_uniforms
from torch_specops.testing import chi_square

pytestmark = pytest.mark.gpu

TWO_TILES = size("vocabulary of two tiles")
MANY_TILES = size("vocabulary of many tiles")


def oracle_cases() -> Iterator[Any]:
    for op in OPS:
        for cases in CASE_SETS:
            for name in cases.names_of(op):
                marks = [pytest.mark.smoke] if is_smoke(op, cases.vocab_size, name) else []
                yield pytest.param(op, cases, name, marks=marks, id=f"{op}-{cases.vocab_size}-{name}")


ORACLE_CASES = list(oracle_cases())
# On a device the smoke part has one case of every op over each of its vocabularies.
assert gpu_suite.STAND_IN or sum(bool(each.marks) for each in ORACLE_CASES) == 3 * len(OPS)


@pytest.mark.parametrize("op, cases, name", ORACLE_CASES)
def test_cuda_agrees_with_the_oracle_and_the_cpu(op: str, cases: CaseSet, name: str, report: Report) -> None:
    case = case_of(op, cases.vocab_size, name, limits=cases.limits)
    with testing.poison_memory():
        got = call(case)
    comparison = testing.compare(case, got)
    report.add(case, comparison)
    assert comparison.wrong == []

    on_cpu = call(case_of(op, cases.vocab_size, name, device="cpu", limits=cases.limits))
    differs = torch.zeros(len(got[0]), dtype=torch.bool)
    for a, b in zip(on_cpu, got, strict=True):
        # A logsumexp has a bound of its own, which the oracle's comparison knows.
        if op == "filter_logits" or not a.is_floating_point():
            differs |= (a != b.cpu()).flatten(1).any(1) if a.dim() > 1 else a != b.cpu()
    # Where rounding may decide, CPU and CUDA may differ.
    assert not differs.any() or not (differs & ~testing.rounding_rows(case)).any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_agrees_with_the_oracle(case: AttentionCase) -> None:
    """Slots outside of all spans are NaN: they are not read."""
    with testing.poison_memory():
        output = attend(*case.arguments("cuda"))
    assert case.error(output) <= 1
    assert torch.equal(output, attend(*case.arguments("cuda")))


# Kinds that flash attention does not take with grouped queries.
@pytest.mark.parametrize("dtype, head_dim", [(torch.float32, 64), (torch.bfloat16, 320)])
def test_causal_attention_writes_no_scores(dtype: torch.dtype, head_dim: int) -> None:
    count = size("tokens of a long text")
    *tensors, spans, scale = AttentionCase(2, 4, 2, count, count, head_dim, dtype).arguments()
    # A cache has more slots than the text.
    queries, *caches = (each.cuda() for each in tensors)
    caches = [torch.cat([each, torch.full_like(each, math.nan)], 2) for each in caches]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = attend_causal(queries, *caches, scale)
    assert torch.cuda.max_memory_allocated() - before < 2 * 4 * count**2 * dtype.itemsize
    queries, *caches = tensors
    expected = attend(queries[:, :, -16:], *caches, spans[:, -16:], scale)
    assert output.shape == (2, count, 4, head_dim)
    assert (output[:, -16:].cpu() - expected).abs().amax() <= TOLERANCE[dtype]


def test_long_texts_begin_in_the_first_slot() -> None:
    positions = torch.arange(MIN_CAUSAL_TOKENS, device="cuda").expand(2, -1)
    assert is_long_text(positions)
    other = torch.stack([positions[0], positions[0] + 1])
    for short in (positions[:, :-1], positions + 1, other, positions.cpu()):
        assert not is_long_text(short)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        assert not is_long_text(positions)
        positions + 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_uniforms_are_bit_identical_on_cpu_and_cuda() -> None:
    seeds, positions = torch.tensor([0, 7, -5, 2**63 - 1]), torch.tensor([0, 1, 2**33, 10])

    def every_stream(seeds: Tensor, positions: Tensor) -> Tensor:
        streams = ("propose", "accept", "sample")
        drawn = [torch_specops.uniforms(seeds, positions, 11, stream) for stream in streams]
        return torch.stack([*drawn, step_uniforms(seeds, positions, 10)])

    on_cpu = every_stream(seeds, positions)
    assert torch.equal(on_cpu, every_stream(seeds.cuda(), positions.cuda()).cpu())
    compiled = torch.compile(every_stream, fullgraph=True)(seeds.cuda(), positions.cuda())
    assert torch.equal(on_cpu, compiled.cpu())


@pytest.mark.parametrize("op", OPS)
def test_no_host_synchronisation(op: str) -> None:
    case = case_of(op, TWO_TILES)
    call(case)
    with no_synchronisation():
        call(case)
        # The control: a read of the result does synchronise.
        with pytest.raises(RuntimeError, match="synchroniz"):
            call(case)[0].sum().item()


def test_more_than_2_to_the_31_elements() -> None:
    """The last sequences of a tensor too long for 32-bit offsets, against the same sequences alone."""
    elements = size("elements that 32 bits cannot count")
    num_drafts, vocab_size = 3, 131_072 if elements >= 2**31 else 67
    batch = elements // ((num_drafts + 1) * vocab_size) + 5
    last = verify_inputs(4, num_drafts, vocab_size)
    last |= {"draft_logits": None}
    last.pop("draft_lse")
    # Elsewhere token 5 has all the weight, and token 0, which has none, is drafted: an offset that wrapped around
    # would read that.
    target = torch.full((batch, num_drafts + 1, vocab_size), -30.0, dtype=torch.bfloat16, device="cuda")
    assert target.numel() > elements
    target[:, :, 5] = 30.0
    whole: dict[str, Any] = {"target_logits": target, "draft_logits": None}
    for name, elsewhere in (("draft_tokens", 0), ("accept_uniforms", 0.5), ("sample_uniforms", 0.5)):
        part = last[name]
        whole[name] = torch.full((batch, *part.shape[1:]), elsewhere, dtype=part.dtype, device="cuda")
        whole[name][-4:] = part
    target[-4:] = last["target_logits"]
    output_tokens, num_accepted = torch_specops.verify_exact(**whole)
    assert equal((output_tokens[-4:], num_accepted[-4:]), torch_specops.verify_exact(**last))
    assert (num_accepted[:-4] == 0).all()
    assert (output_tokens[:-4, 0] == 5).all()


def launches(case: testing.Case) -> list[str]:
    """The kernels of one call, by name."""
    call(case)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call(case)
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize(
    "op, name, limit",
    [
        ("verify_exact", "bf16_fp16", 3),
        ("verify_block", "bf16_fp16", 6),
        ("verify_sigmoid", "bf16_fp16", 2),
        ("verify_gumbel", "bf16_fp16", 2),
        ("sample", "bf16_fp16", 2),
        ("sample_gumbel", "bf16_fp16", 2),
        # Of two 16-bit types, so that target and draft rows need a search each.
        ("verify_exact", "filters_temperature", 2 + 2 + 3),
        ("verify_block", "filters_temperature", 2 + 2 + 6),
        ("verify_gumbel", "filters_temperature", 2 + 2),
        ("sample", "filters_temperature", 2 + 2),
        ("filter_logits", "filters_temperature", 2 + 1),
    ],
)
def test_number_of_launches(op: str, name: str, limit: int) -> None:
    found = launches(case_of(op, TWO_TILES, name))
    assert 0 < len(found) <= limit, found


@pytest.mark.parametrize("op", OPS)
def test_bitwise_repeatable(op: str) -> None:
    case = case_of(op, MANY_TILES)
    first = call(case)
    assert all(equal(first, call(case)) for _ in range(size("repetitions")))


@pytest.mark.parametrize("op", OPS)
def test_a_plan_computes_what_a_first_call_does(op: str) -> None:
    """On other data than those of the call that left it. Triton's interpreter leaves no plan."""
    from torch_specops.ops.cuda import plans

    case, other = case_of(op, TWO_TILES), case_of(op, TWO_TILES)
    for x in other.args.values():
        if isinstance(x, Tensor):
            x.copy_(x.flip(0))
    plans.plans.clear()
    call(case)
    assert gpu_suite.STAND_IN or all(plan is not None for plan in plans.plans.values())
    planned = call(other)
    assert len(plans.plans) == (0 if gpu_suite.STAND_IN else 1)
    plans.plans.clear()
    assert equal(planned, call(other))


def allocated(call: Callable[[], object]) -> int:
    """The most bytes that it holds at a time."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def test_large_batch_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_specops.ops.cuda import exact, launch, plans

    rows, num_drafts = size("rows and drafts of a large batch")
    arguments = verify_inputs(rows, num_drafts, size("vocabulary of a language model"))
    expected = torch_specops.verify_exact(**arguments)
    logits = arguments["target_logits"].nbytes + arguments["draft_logits"].nbytes
    # Allocations are whole blocks of 512 bytes, which are many for a small batch.
    assert allocated(lambda: torch_specops.verify_exact(**arguments)) <= logits / 100 or rows < 64

    # However many tiles a program takes, one after another, and whatever the first launch leaves to another.
    for module, name in ((launch, "RESIDENT_PROGRAMS"), (exact, "EARLY_EXIT_TILES")):
        for number in (1, 10**9):
            monkeypatch.setattr(module, name, number)
            # A plan keeps the numbers of its first call.
            plans.plans.clear()
            assert equal(torch_specops.verify_exact(**arguments), expected)


@pytest.mark.not_rehearsed("that a shared stream fails: it takes more trials than the interpreter has time for")
def test_law_on_cuda() -> None:
    """Chi-square of the first token, V = 16, 2**20 trials, adversarial draft, alpha 1e-4; a shared stream must fail."""
    trials, vocab_size = size("trials of a law"), 16
    p = torch.linspace(-2, 2, vocab_size, device="cuda")
    seeds = torch.arange(trials, device="cuda")
    zero = torch.zeros_like(seeds)
    target = p.expand(trials, 2, vocab_size)
    draft = -p.expand(trials, 1, vocab_size)
    propose = torch_specops.uniforms(seeds, zero, 1, "propose")
    accept = torch_specops.uniforms(seeds, zero, 1, "accept")
    tokens, _ = torch_specops.sample(draft[:, 0], propose[:, 0])

    def p_value(sample: Tensor) -> float:
        output, _ = torch_specops.verify_exact(target, tokens.unsqueeze(1), draft, accept, sample)
        counts = torch.bincount(output[:, 0].cpu(), minlength=vocab_size)
        return chi_square(counts, p.cpu().double().softmax(0))

    assert p_value(torch_specops.uniforms(seeds, zero, 1, "sample")[:, 0]) > 1e-4
    wrong = p_value(propose[:, 0])
    assert wrong < 1e-4 or trials < 2**12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_filters_allocate_no_copy(dtype: torch.dtype) -> None:
    """Neither a mask, nor a float32 copy, nor what a sort would need: what `filter/bounds.py` counts for a group of 64
    entries."""
    rows, num_drafts = size("rows and drafts of a large batch")
    x = verify_inputs(rows, num_drafts, size("vocabulary of a language model"), dtype)["target_logits"].flatten(0, 1)
    given = filters(len(x)) | {"uniforms": torch.rand(len(x), device="cuda")}
    torch_specops.sample(x, **given)
    counted = (6 * x.element_size() + 28) / (64 * x.element_size())
    # The last tile of a row is counted whole.
    assert allocated(lambda: torch_specops.sample(x, **given)) <= 1.05 * counted * x.nbytes or rows < 64


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("op", OPS)
def test_a_call_runs_where_its_tensors_are(op: str) -> None:
    """Triton launches on the current device, which need not be theirs."""
    expected = call(case_of(op, TWO_TILES, device="cuda:0"))
    elsewhere = case_of(op, TWO_TILES, device="cuda:1")
    assert torch.cuda.current_device() == 0
    for of_op in (getattr(torch_specops, op), getattr(torch.ops.specops, op)):
        got = of_op(**elsewhere.args)
        got = got if isinstance(got, tuple) else (got,)
        assert all(tensor.device == torch.device("cuda:1") for tensor in got)
        torch.cuda.synchronize("cuda:1")
        assert equal(tuple(tensor.cpu() for tensor in got), tuple(tensor.cpu() for tensor in expected))
    assert torch.cuda.current_device() == 0
