"""What only a GPU can show: `make test-gpu`. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_specops
from torch_specops import testing

pytestmark = pytest.mark.gpu

OPS = ("verify_exact", "verify_block", "verify_sigmoid", "sample", "filter_logits")


def call(case: testing.Case) -> tuple[Tensor, ...]:
    result = getattr(torch_specops, case.op)(**case.args)
    return result if isinstance(result, tuple) else (result,)


def inputs(batch: int, num_drafts: int, vocab_size: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    generator = torch.Generator(device="cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    target = (3 * random(batch, num_drafts + 1, vocab_size)).to(dtype)
    draft = (target[:, :num_drafts] + 0.5 * random(batch, num_drafts, vocab_size)).to(dtype)
    seeds = torch.arange(batch, device="cuda")
    positions = torch.zeros_like(seeds)
    propose = torch_specops.uniforms(seeds, positions, num_drafts, "propose")
    tokens, lse = torch_specops.sample(draft.flatten(0, 1), propose.flatten())
    return {
        "target_logits": target,
        "draft_tokens": tokens.view(batch, num_drafts),
        "draft_logits": draft,
        "accept_uniforms": torch_specops.uniforms(seeds, positions, num_drafts, "accept"),
        "sample_uniforms": torch_specops.uniforms(seeds, positions, 1, "sample")[:, 0],
        "draft_lse": lse.view(batch, num_drafts),
    }


def filters(rows: int) -> dict[str, Tensor]:
    """Rows with each filter alone, with two, and with all three."""
    given = {"top_k": (50, 0, 0, 1000, 5), "top_p": (1.0, 0.9, 1.0, 0.5, 0.95), "min_p": (0.0, 0.0, 0.05, 0.0, 0.02)}
    dtypes = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    return {
        name: torch.tensor([values[r % len(values)] for r in range(rows)], dtype=dtypes[name], device="cuda")
        for name, values in given.items()
    }


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("vocab_size", [1, 17, 1025, 50257, 151_936])
def test_cuda_agrees_with_the_oracle(op: str, vocab_size: int) -> None:
    """Over every dtype, mask, stride and padding of the shared cases."""
    for case in testing.sample_inputs(op, device="cuda", vocab_sizes=[vocab_size]):
        with testing.poison_memory():
            got = call(case)
        assert testing.compare(case, got).wrong == [], case.name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("vocab_size", [600, 51_865])
def test_cuda_equals_cpu_off_the_margin(op: str, vocab_size: int) -> None:
    on_cpu = testing.sample_inputs(op, vocab_sizes=[vocab_size])
    on_cuda = testing.sample_inputs(op, device="cuda", vocab_sizes=[vocab_size])
    for cpu_case, cuda_case in zip(on_cpu, on_cuda, strict=True):
        differs = torch.zeros_like(testing.rounding_rows(cpu_case))
        for a, b in zip(call(cpu_case), call(cuda_case), strict=True):
            if not a.is_floating_point() or op == "filter_logits":
                differs |= (a != b.cpu()).flatten(1).any(1) if a.dim() > 1 else a != b.cpu()
        assert not (differs & ~testing.rounding_rows(cpu_case)).any(), cpu_case.name


def test_uniforms_are_bit_identical_on_cpu_and_cuda() -> None:
    seeds, positions = torch.tensor([0, 7, -5, 2**63 - 1]), torch.tensor([0, 1, 2**33, 10])
    for stream in ("propose", "accept", "sample"):
        on_cpu = torch_specops.uniforms(seeds, positions, 11, stream)
        on_cuda = torch_specops.uniforms(seeds.cuda(), positions.cuda(), 11, stream)
        compiled = torch.compile(torch_specops.uniforms, fullgraph=True)(seeds.cuda(), positions.cuda(), 11, stream)
        assert torch.equal(on_cpu, on_cuda.cpu())
        assert torch.equal(on_cpu, compiled.cpu())


@pytest.mark.parametrize("given", ["draft_lse", "draft rows", "one-hot", "greedy", "filters", "sigmoid"])
def test_graph_replay_with_fresh_uniforms(given: str) -> None:
    """One captured graph, new numbers in its inputs: equal to eager each time, and not the same tokens again."""
    arguments = inputs(8, 5, 50257)
    op: Callable[..., tuple[Tensor, Tensor]] = torch_specops.verify_exact
    if given != "draft_lse":
        arguments.pop("draft_lse")
    if given == "one-hot":
        arguments["draft_logits"] = None
    if given == "greedy":
        arguments["temperature"] = torch.tensor([0.0, 1.0] * 4, device="cuda")
    if given == "filters":
        arguments.pop("draft_lse")
        arguments |= filters(8)
    if given == "sigmoid":
        op = torch_specops.verify_sigmoid
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        op(**arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output_tokens, num_accepted = op(**arguments)

    seen = set()
    seeds = torch.arange(8, device="cuda")
    for step in range(5):
        positions = torch.full_like(seeds, step)
        arguments["accept_uniforms"].copy_(torch_specops.uniforms(seeds, positions, 5, "accept"))
        arguments["sample_uniforms"].copy_(torch_specops.uniforms(seeds, positions, 1, "sample")[:, 0])
        graph.replay()
        expected = op(**arguments)
        assert torch.equal(output_tokens, expected[0])
        assert torch.equal(num_accepted, expected[1])
        seen.add(str(output_tokens.tolist()))
    assert len(seen) == 5


@pytest.mark.parametrize("op", OPS)
def test_no_host_synchronisation(op: str) -> None:
    case = next(testing.sample_inputs(op, device="cuda", vocab_sizes=[600]))
    call(case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(case)
        # The control: a read of the result does synchronise.
        with pytest.raises(RuntimeError, match="synchroniz"):
            call(case)[0].sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_than_2_to_the_31_elements() -> None:
    """The last sequences of a tensor too long for 32-bit offsets, against the same sequences alone."""
    batch, num_drafts, vocab_size = 4200, 3, 131_072
    target = torch.empty(batch, num_drafts + 1, vocab_size, dtype=torch.bfloat16, device="cuda")
    assert target.numel() > 2**31
    last = inputs(4, num_drafts, vocab_size)
    # Elsewhere one token has all the weight: an offset that wrapped around would read it.
    target.fill_(-30.0)
    target[:, :, 5] = 30.0
    target[-4:] = last["target_logits"]
    whole = {}
    for name, part in last.items():
        if name in ("target_logits", "draft_logits", "draft_lse"):
            continue
        whole[name] = torch.zeros(batch, *part.shape[1:], dtype=part.dtype, device="cuda")
        whole[name][-4:] = part
    last["draft_logits"] = None
    last.pop("draft_lse")
    got = torch_specops.verify_exact(target_logits=target, draft_logits=None, **whole)
    expected = torch_specops.verify_exact(**last)
    assert torch.equal(got[0][-4:], expected[0])
    assert torch.equal(got[1][-4:], expected[1])
    # Token 0, drafted everywhere else, has no weight there; 5 has all of it.
    assert (got[1][:-4] == 0).all()
    assert (got[0][:-4, 0] == 5).all()


@pytest.mark.parametrize("op, limit", [("verify_exact", 3), ("verify_block", 6), ("verify_sigmoid", 2), ("sample", 2)])
def test_number_of_launches(op: str, limit: int) -> None:
    case = next(testing.sample_inputs(op, device="cuda", vocab_sizes=[600]))
    call(case)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(case)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len(kernels) <= limit, kernels


@pytest.mark.parametrize("op", OPS)
def test_bitwise_repeatable(op: str) -> None:
    case = next(testing.sample_inputs(op, device="cuda", vocab_sizes=[50257]))
    first = call(case)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, call(case), strict=True))


def test_extra_memory_is_a_hundredth_of_the_logits() -> None:
    arguments = inputs(64, 5, 128_256)
    torch_specops.verify_exact(**arguments)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch_specops.verify_exact(**arguments)
    logits = arguments["target_logits"].nbytes + arguments["draft_logits"].nbytes
    assert torch.cuda.max_memory_allocated() - before <= logits / 100


@pytest.mark.parametrize("op", OPS)
def test_compiled_cuda_branch_in_a_cuda_graph(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fullgraph, the kernels inlined, and Inductor's own CUDA graphs, which raise here instead of skipping."""
    monkeypatch.setattr(torch._inductor.config.triton, "cudagraph_or_error", True)
    for case in list(testing.sample_inputs(op, device="cuda", vocab_sizes=[600]))[:4]:
        compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead", dynamic=False)
        expected = call(case)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(case)
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), case.name


@pytest.mark.parametrize("op", OPS)
def test_opcheck_on_cuda(op: str) -> None:
    for case in list(testing.sample_inputs(op, device="cuda", vocab_sizes=[17]))[:6]:
        torch.library.opcheck(getattr(torch.ops.specops, op).default, (), case.args)


def test_law_on_cuda() -> None:
    """Chi-square of the first token, V = 16, 2**20 trials, adversarial draft, alpha 1e-4; a shared stream must fail."""
    trials, vocab_size = 2**20, 16
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
        return testing.chi_square(torch.bincount(output[:, 0], minlength=vocab_size).cpu(), p.double().softmax(0).cpu())

    assert p_value(torch_specops.uniforms(seeds, zero, 1, "sample")[:, 0]) > 1e-4
    assert p_value(propose[:, 0]) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab_size", [50_257, 128_256])
def test_top_k_is_that_of_transformers(dtype: torch.dtype, vocab_size: int) -> None:
    """Bit for bit: no rounding takes part in it, and a row of bfloat16 is full of ties."""
    processors = pytest.importorskip("transformers.generation.logits_process")
    x = inputs(8, 1, vocab_size, dtype)["target_logits"].flatten(0, 1)
    for k in (1, 20, 1000, vocab_size - 1):
        expected = processors.TopKLogitsWarper(k)(None, x)
        top_k = torch.full((len(x),), k, device="cuda")
        assert torch.equal(torch_specops.filter_logits(x, top_k=top_k), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_filters_repeat_bit_for_bit_and_allocate_no_copy(dtype: torch.dtype) -> None:
    x = inputs(64, 5, 128_256, dtype)["target_logits"].flatten(0, 1)
    given = filters(len(x))
    uniforms = torch.rand(len(x), device="cuda")
    filtered = torch_specops.filter_logits(x, **given)
    drawn = torch_specops.sample(x, uniforms, **given)
    assert (filtered > -torch.inf).any(1).all()
    assert (filtered.gather(1, drawn[0].unsqueeze(1)) > -torch.inf).all()
    for _ in range(20):
        assert torch.equal(torch_specops.filter_logits(x, **given), filtered)
        assert all(torch.equal(a, b) for a, b in zip(torch_specops.sample(x, uniforms, **given), drawn, strict=True))
    # Neither a mask, nor a float32 copy, nor what a sort would need.
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch_specops.sample(x, uniforms, **given)
    assert torch.cuda.max_memory_allocated() - before <= 0.03 * x.nbytes


@pytest.mark.parametrize(
    "op, limit", [("verify_exact", 9 + 9 + 3), ("verify_block", 9 + 9 + 6), ("sample", 9 + 2), ("filter_logits", 9 + 1)]
)
def test_number_of_launches_with_filters(op: str, limit: int) -> None:
    """Of two 16-bit types, so that target and draft rows need a search each."""
    (case,) = testing.sample_inputs(op, device="cuda", vocab_sizes=[600], names=["filters_temperature"])
    call(case)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(case)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len(kernels) <= limit, kernels


@pytest.mark.parametrize("op", ["verify_exact", "sample", "filter_logits"])
def test_compiled_filters_in_a_cuda_graph(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches of the search write into each other's scratch: Inductor must keep their order."""
    monkeypatch.setattr(torch._inductor.config.triton, "cudagraph_or_error", True)
    (case,) = testing.sample_inputs(op, device="cuda", vocab_sizes=[5000], names=["filters"])
    expected = call(case)
    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead", dynamic=False)
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        assert all(torch.equal(a, b) for a, b in zip(expected, compiled(case), strict=True))
