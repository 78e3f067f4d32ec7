"""`torch.compile(fullgraph=True)`: one graph, no recompilation, eager's integers, nothing vocabulary-sized."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from op_cases import OPS, VERIFY_OPS, assert_equal, call, equal, op_arguments
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_specops

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def assert_one_graph() -> None:
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("op", OPS[:-1])
def test_dynamic(op: str) -> None:
    """One compilation serves every B >= 2, K >= 2 and V > 1024; torch specialises sizes 0 and 1 by rule, and a
    vocabulary of a single tile is another graph. Block verification looks at K - 1 residuals, so its K is >= 3."""
    compiled = torch.compile(getattr(torch_specops, op), fullgraph=True, dynamic=True)
    # Sizes that are equal by chance (B = K + 1) would be taken for one.
    sizes = [(6, 3, 1100), (4, 5, 1100), (7, 3 if op == "verify_block" else 2, 1100), (2, 3, 1030), (5, 6, 2500)]
    for seed, (batch, num_drafts, vocab_size) in enumerate(sizes):
        arguments = op_arguments(op, batch, num_drafts, vocab_size, seed=seed, filtered=False)
        with torch.compiler.set_stance("fail_on_recompile" if seed > 0 else "default"):
            assert_equal(compiled(**arguments), call(op, arguments))
    assert_one_graph()


@pytest.mark.parametrize("op", ["verify_exact", *(pytest.param(op, marks=pytest.mark.slow) for op in OPS[1:4])])
def test_static(op: str) -> None:
    """The batches reach every outcome: nothing accepted, some and all."""
    compiled = torch.compile(getattr(torch_specops, op), fullgraph=True, dynamic=False)
    seen: set[int] = set()
    for seed in range(30):
        arguments = op_arguments(op, seed=seed, filtered=False)
        with torch.compiler.set_stance("fail_on_recompile" if seed > 0 else "default"):
            expected = call(op, arguments)
            assert_equal(compiled(**arguments), expected)
        seen.update(expected[1].tolist() if op in VERIFY_OPS else ())
    assert op == "sample" or seen == {0, 1, 2, 3}
    assert_one_graph()


def test_one_hot_drafts_and_numbers_that_are_integers() -> None:
    compiled = torch.compile(torch_specops.verify_exact, fullgraph=True, backend="aot_eager")
    arguments = op_arguments("verify_exact", filtered=False) | {"draft_logits": None, "draft_lse": None, "lenience": 1}
    assert equal(compiled(**arguments), call("verify_exact", arguments))
    compiled = torch.compile(torch_specops.verify_sigmoid, fullgraph=True, backend="aot_eager")
    for alpha in (-1, -2, -3.5):
        arguments = op_arguments("verify_sigmoid") | {"alpha": alpha}
        assert equal(compiled(**arguments), call("verify_sigmoid", arguments))


def decode_step(
    target: Tensor, draft: Tensor, last_tokens: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """A user's own step: K = 1 drafts sampled one after the other, one read of the target, one verification. The models
    are tables [V, V] of logits, by the last token. Two drafts compile for half as long again."""
    num_drafts = 1
    propose = torch_specops.uniforms(seeds, positions, num_drafts, "propose")
    tokens, draft_lse = [last_tokens], []
    for i in range(num_drafts):
        drawn, lse = torch.ops.specops.sample(draft[tokens[-1]], propose[:, i], temperature)
        tokens.append(drawn)
        draft_lse.append(lse)
    return torch.ops.specops.verify_exact(
        target[torch.stack(tokens, 1)],
        torch.stack(tokens[1:], 1),
        draft[torch.stack(tokens[:-1], 1)],
        torch_specops.uniforms(seeds, positions, num_drafts, "accept"),
        torch_specops.uniforms(seeds, positions, 1, "sample")[:, 0],
        temperature,
        torch.stack(draft_lse, 1),
    )


def test_a_whole_step_is_one_graph() -> None:
    g = torch.Generator().manual_seed(0)
    target = torch.randn(19, 19, generator=g)
    models = target, target + 0.5 * torch.randn(19, 19, generator=g)
    compiled = torch.compile(decode_step, fullgraph=True)
    seen: set[int] = set()
    for step in range(20):
        rows = torch.randint(19, (4,), generator=g), torch.arange(4) - 2**40, torch.arange(4) + 100 * step
        arguments = (*models, *rows, torch.tensor([0.0, 0.5, 1.0, 2.0]))
        with torch.compiler.set_stance("fail_on_recompile" if step > 0 else "default"):
            got = compiled(*arguments)
        assert equal(got, decode_step(*arguments))
        seen.update(got[1].tolist())
    assert seen == {0, 1}
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
    arguments = list(op_arguments("verify_exact", batch, num_drafts, vocab_size).values())[:5]
    arguments[1] = arguments[1].clamp(min=0)

    def largest(function: Any) -> int:
        _, (code,) = run_and_get_code(torch.compile(function, fullgraph=True), *arguments)
        return max(allocations(code))

    assert largest(torch_specops.verify_exact) <= batch * (vocab_size + 1024)
    torch._dynamo.reset()
    assert largest(softmax_verify) >= batch * num_drafts * vocab_size


def test_without_data() -> None:
    """Fake and meta tensors hold no data: an op that read any would raise."""
    fake = FakeTensorMode()
    for op in OPS:
        arguments, expected = op_arguments(op), call(op, op_arguments(op))
        with fake:
            given = {k: fake.from_tensor(v) if isinstance(v, Tensor) else v for k, v in arguments.items()}
            faked = call(op, given)
        meta = call(op, {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in arguments.items()})
        for outputs, device in ((faked, "cpu"), (meta, "meta")):
            described = [(output.shape, output.dtype, output.device.type) for output in outputs]
            assert described == [(output.shape, output.dtype, device) for output in expected], op
