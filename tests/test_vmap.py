"""`torch.func.vmap` over the ops: what is mapped over joins the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import torch_specops

N, B, K, V = 3, 2, 3, 19


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    return {
        "target_logits": 3 * rand(N, B, K + 1, V),
        "draft_tokens": torch.randint(-1, V, (N, B, K), generator=generator),
        "draft_logits": 3 * rand(N, B, K, V),
        "accept_uniforms": rand(N, B, K),
        "sample_uniforms": rand(N, B),
        "temperature": torch.tensor([[0.0, 1.0], [0.5, 2.0], [1.0, 0.0]]),
    }


def verify(name: str) -> Callable[..., tuple[Tensor, ...]]:
    op = getattr(torch_specops, name)

    def call(target: Tensor, tokens: Tensor, draft: Tensor, u: Tensor, s: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        return op(target, tokens, draft, u, s, temperature=t)

    return call


def one_by_one(call: Callable[..., Any], arguments: list[Tensor]) -> list[Tensor]:
    results = [call(*(argument[i] for argument in arguments)) for i in range(N)]
    return [torch.stack(each) for each in zip(*results, strict=True)]


@pytest.mark.parametrize("name", ["verify_exact", "verify_sigmoid", "verify_block"])
def test_verify_over_a_leading_axis(name: str) -> None:
    arguments = list(tensors().values())
    expected = one_by_one(verify(name), arguments)
    for got, want in zip(vmap(verify(name))(*arguments), expected, strict=True):
        assert torch.equal(got, want)


def test_an_axis_anywhere_and_tensors_that_are_shared() -> None:
    given = tensors()
    shared = given["draft_logits"][0]
    arguments = [given["target_logits"].movedim(0, 2), given["draft_tokens"].movedim(0, 1), shared]
    rest = [given["accept_uniforms"], given["sample_uniforms"].T, given["temperature"][1]]
    got = vmap(verify("verify_exact"), in_dims=(2, 1, None, 0, 1, None))(*arguments, *rest)
    for i in range(N):
        call = [given["target_logits"][i], given["draft_tokens"][i], shared, given["accept_uniforms"][i]]
        want = verify("verify_exact")(*call, given["sample_uniforms"][i], given["temperature"][1])
        assert all(torch.equal(a[i], b) for a, b in zip(got, want, strict=True))


def test_two_axes() -> None:
    given = tensors()
    arguments = [torch.stack([value, value.roll(1, 0)]) for value in given.values()]
    got = vmap(vmap(verify("verify_exact")))(*arguments)
    for i in range(2):
        want = one_by_one(verify("verify_exact"), [argument[i] for argument in arguments])
        assert all(torch.equal(a[i], b) for a, b in zip(got, want, strict=True))


def test_sample_and_filter_logits() -> None:
    given = tensors()
    logits, uniforms, top_k = given["draft_logits"][:, 0], given["accept_uniforms"][:, 0], torch.tensor([1, 4, 0])
    tokens, lse = vmap(lambda z, u: torch_specops.sample(z, u, top_k=top_k))(logits, uniforms)
    filtered = vmap(lambda z: torch_specops.filter_logits(z, top_k=top_k))(logits)
    for i in range(N):
        want_tokens, want_lse = torch_specops.sample(logits[i], uniforms[i], top_k=top_k)
        assert torch.equal(tokens[i], want_tokens) and torch.equal(lse[i], want_lse)
        assert torch.equal(filtered[i], torch_specops.filter_logits(logits[i], top_k=top_k))


def test_no_rows_at_all() -> None:
    arguments = [value[:, :0] for value in tensors().values()]
    output, num_accepted = vmap(verify("verify_exact"))(*arguments)
    assert output.shape == (N, 0, K + 1) and num_accepted.shape == (N, 0)


def test_it_traces_as_one_graph() -> None:
    torch._dynamo.reset()
    arguments = list(tensors().values())
    compiled = torch.compile(vmap(verify("verify_exact")), fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*arguments), one_by_one(verify("verify_exact"), arguments), strict=True):
        assert torch.equal(got, want)
    torch._dynamo.reset()


def test_errors_name_the_argument_still() -> None:
    given = tensors() | {"temperature": torch.ones(N, B, dtype=torch.float64)}
    with pytest.raises(TypeError, match=r"^temperature: expected float32, got float64$"):
        vmap(verify("verify_exact"))(*given.values())
