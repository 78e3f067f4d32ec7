"""`torch.compile(fullgraph=True)`: one graph, no recompilation, eager's integers, nothing vocabulary-sized."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_specops

VERIFY_OPS = ("verify_exact", "verify_block", "verify_sigmoid")
OPS = (*VERIFY_OPS, "sample")


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def inputs(
    op: str, seed: int, batch: int = 4, num_drafts: int = 3, vocab_size: int = 61, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """All tensor arguments; greedy, sampled and unlawful rows; padding; drafts near the target, so that all n occur."""
    g = torch.Generator().manual_seed(seed)
    temperature = torch.tensor([0.0, 0.7, 1.3, -1.0]).repeat(batch // 4 + 1)[:batch].roll(seed)
    if op == "sample":
        logits = 3 * torch.randn(batch, vocab_size, generator=g)
        return {"logits": logits.to(dtype), "uniforms": torch.rand(batch, generator=g), "temperature": temperature}
    target_logits = 3 * torch.randn(batch, num_drafts + 1, vocab_size, generator=g)
    draft_logits = target_logits[:, :-1] + torch.randn(batch, num_drafts, vocab_size, generator=g)
    noise = torch.rand(batch, num_drafts, vocab_size, generator=g)
    draft_tokens = (draft_logits - 0.5 * (-noise.log()).log()).argmax(-1)
    draft_tokens[torch.rand(batch, num_drafts, generator=g) < 0.1] = -1
    arguments = {
        "target_logits": target_logits.to(dtype),
        "draft_tokens": draft_tokens,
        "draft_logits": draft_logits.to(dtype),
        "accept_uniforms": torch.rand(batch, num_drafts, generator=g),
        "sample_uniforms": torch.rand(batch, generator=g),
        "temperature": temperature,
    }
    if op == "verify_sigmoid":
        return arguments | {"alpha": -4.0, "beta": 3.0}
    scaled = arguments["draft_logits"].float() / torch.where(temperature > 0, temperature, 1.0).view(-1, 1, 1)
    return arguments | {"draft_lse": scaled.logsumexp(-1), "lenience": 0.9 if op == "verify_exact" else 1.0}


def assert_same(op: str, got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[0], expected[0])
    if op == "sample":
        torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=0)
    else:
        assert torch.equal(got[1], expected[1])


def assert_one_graph() -> None:
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("op", OPS)
def test_static(op: str) -> None:
    eager = getattr(torch_specops, op)
    compiled = torch.compile(eager, fullgraph=True, dynamic=False)
    assert_same(op, compiled(**inputs(op, 0)), eager(**inputs(op, 0)))
    seen: set[int] = set()
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in range(1, 30):
            expected = eager(**inputs(op, seed))
            assert_same(op, compiled(**inputs(op, seed)), expected)
            seen.update(expected[1].tolist() if op in VERIFY_OPS else ())
    # The batches reach every outcome: nothing accepted, some and all.
    assert op == "sample" or seen == {0, 1, 2, 3}
    assert_one_graph()


@pytest.mark.parametrize("op", OPS)
def test_dynamic(op: str) -> None:
    """One compilation serves every B >= 2, K >= 2 and V > 1024; torch specialises sizes 0 and 1 by rule, and a
    vocabulary of a single tile is another graph. Block verification looks at K - 1 residuals, so its K is >= 3."""
    eager = getattr(torch_specops, op)
    compiled = torch.compile(eager, fullgraph=True, dynamic=True)
    # Sizes that are equal by chance (B = K + 1) would be taken for one.
    first = inputs(op, 0, batch=6, vocab_size=1100)
    assert_same(op, compiled(**first), eager(**first))
    fewest = 3 if op == "verify_block" else 2
    sizes = [(4, 5, 1100), (7, fewest, 1100), (2, 3, 1030), (5, 6, 2500), (3, 4, 4096)]
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed, (batch, num_drafts, vocab_size) in enumerate(sizes):
            arguments = inputs(op, seed, batch, num_drafts, vocab_size)
            assert_same(op, compiled(**arguments), eager(**arguments))
    assert_one_graph()


def test_fail_on_recompile_sees_a_recompilation() -> None:
    """Control for the tests above: another dtype does need another graph."""
    compiled = torch.compile(torch_specops.sample, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(**inputs("sample", 0))
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        pytest.raises(RuntimeError, match="recompile"),
    ):
        compiled(**inputs("sample", 0, dtype=torch.bfloat16))


def test_one_hot_drafts_without_temperature() -> None:
    def verify(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return torch.ops.specops.verify_exact(
            arguments["target_logits"], arguments["draft_tokens"], None, arguments["accept_uniforms"],
            arguments["sample_uniforms"],
        )  # fmt: skip

    compiled = torch.compile(verify, fullgraph=True)
    for seed in range(10):
        assert_same("verify_exact", compiled(inputs("verify_exact", seed)), verify(inputs("verify_exact", seed)))
    assert_one_graph()


class Toy(torch.nn.Module):
    """Next-token logits from the last token alone."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.register_buffer("table", torch.randn(vocab_size, vocab_size, generator=g))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


def decode_step(
    target: Toy, draft: Toy, last_tokens: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """A user's own step: K drafts sampled one after the other, one target forward, one verification."""
    num_drafts = 2
    ops = torch.ops.specops
    propose = torch_specops.uniforms(seeds, positions, num_drafts, "propose")
    tokens, draft_logits, draft_lse = [last_tokens], [], []
    for i in range(num_drafts):
        logits = draft(tokens[-1])
        drawn, lse = ops.sample(logits, propose[:, i], temperature)
        tokens.append(drawn)
        draft_logits.append(logits)
        draft_lse.append(lse)
    return ops.verify_exact(
        target(torch.stack(tokens, 1)),
        torch.stack(tokens[1:], 1),
        torch.stack(draft_logits, 1),
        torch_specops.uniforms(seeds, positions, num_drafts, "accept"),
        torch_specops.uniforms(seeds, positions, 1, "sample")[:, 0],
        temperature,
        torch.stack(draft_lse, 1),
    )


def step_inputs(seed: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    last_tokens = torch.randint(0, 19, (4,), generator=g)
    seeds = torch.randint(-(2**63), 2**63 - 1, (4,), generator=g)
    return last_tokens, seeds, torch.arange(4) + 100 * seed, torch.tensor([0.0, 0.5, 1.0, 2.0])


def test_a_whole_step_is_one_graph() -> None:
    target, draft = Toy(19, 0), Toy(19, 0)
    draft.table += 0.5 * torch.randn(19, 19, generator=torch.Generator().manual_seed(1))
    explained = torch._dynamo.explain(decode_step)(target, draft, *step_inputs(0))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    torch._dynamo.reset()
    counters.clear()

    compiled = torch.compile(decode_step, fullgraph=True)
    seen: set[int] = set()
    compiled(target, draft, *step_inputs(0))
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed in range(20):
            got = compiled(target, draft, *step_inputs(seed))
            assert_same("verify_exact", got, decode_step(target, draft, *step_inputs(seed)))
            seen.update(got[1].tolist())
    assert seen == {0, 1, 2}
    assert_one_graph()


def allocations(code: str) -> list[int]:
    """The number of elements of every buffer that Inductor's CPU wrapper allocates."""
    shapes = re.findall(r"empty_strided_cpu\w*\(\(([^)]*)\)", code)
    assert shapes
    counts = []
    for shape in shapes:
        count = 1
        for size in shape.split(","):
            count *= int(size) if size.strip() else 1
        counts.append(count)
    return counts


def softmax_verify(
    target_logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor, accept_uniforms: Tensor, sample_uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """The usual formulation, which writes p and q out."""
    p, q = target_logits.softmax(-1), draft_logits.softmax(-1)
    p_x = p[:, :-1].gather(2, draft_tokens.unsqueeze(-1)).squeeze(-1)
    q_x = q.gather(2, draft_tokens.unsqueeze(-1)).squeeze(-1)
    n = (accept_uniforms * q_x < p_x).long().cumprod(1).sum(1)
    residual = torch.cat([(p[:, :-1] - q).clamp(min=0), p[:, -1:]], 1)
    weights = residual[torch.arange(n.shape[0]), n]
    return (weights.cumsum(-1) > (sample_uniforms * weights.sum(-1)).unsqueeze(-1)).int().argmax(-1), n


def test_no_vocabulary_sized_intermediate() -> None:
    """[B, K, V] and [B, K+1, V] are read and never written: what is allocated is a small multiple of [B, V]."""
    batch, num_drafts, vocab_size = 3, 7, 2048
    g = torch.Generator().manual_seed(0)
    arguments = (
        torch.randn(batch, num_drafts + 1, vocab_size, generator=g),
        torch.randint(0, vocab_size, (batch, num_drafts), generator=g),
        torch.randn(batch, num_drafts, vocab_size, generator=g),
        torch.rand(batch, num_drafts, generator=g),
        torch.rand(batch, generator=g),
    )

    def largest(function: Callable[..., Any]) -> int:
        _, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), *arguments)
        return max(allocations(code))

    assert largest(torch_specops.verify_exact) <= batch * (vocab_size + 1024)
    torch._dynamo.reset()
    assert largest(softmax_verify) >= batch * num_drafts * vocab_size


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", ["fake", "meta"])
def test_without_data(op: str, mode: str) -> None:
    """Fake and meta tensors hold no data: an op that read any would raise."""
    arguments = inputs(op, 0)
    if mode == "fake":
        with FakeTensorMode() as fake:
            arguments = {k: fake.from_tensor(v) if isinstance(v, Tensor) else v for k, v in arguments.items()}
            outputs = getattr(torch_specops, op)(**arguments)
    else:
        arguments = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in arguments.items()}
        outputs = getattr(torch_specops, op)(**arguments)
    described = [(list(o.shape), o.dtype, o.device.type) for o in outputs]
    device = "cpu" if mode == "fake" else "meta"
    if op == "sample":
        assert described == [([4], torch.int64, device), ([4], torch.float32, device)]
    else:
        assert described == [([4, 4], torch.int64, device), ([4], torch.int64, device)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_and_inference_mode_change_nothing(op: str, dtype: torch.dtype) -> None:
    eager = getattr(torch_specops, op)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    for seed in range(5):
        arguments = inputs(op, seed, dtype=dtype)
        expected = eager(**arguments)
        for function in (eager, compiled):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = function(**arguments)
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
            with torch.inference_mode():
                got = function(**arguments)
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("op", OPS)
def test_logits_that_require_grad(op: str) -> None:
    """A model outside `no_grad` compiles too: the ops' outputs are not differentiable."""
    arguments = inputs(op, 0)
    expected = getattr(torch_specops, op)(**arguments)
    for name in arguments:
        if name.endswith("logits"):
            arguments[name].requires_grad_()
    compiled = torch.compile(getattr(torch_specops, op), fullgraph=True, backend="aot_eager")
    for outputs in (compiled(**arguments), getattr(torch_specops, op)(**arguments)):
        assert torch.equal(outputs[0], expected[0]) and torch.equal(outputs[1], expected[1])
        assert not any(output.requires_grad for output in outputs)
