"""The bits of a token's results do not depend on what is computed with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from torch_specops.ops import invariant
from torch_specops.ops.attention import attend_masked

DTYPES = (torch.float32, torch.bfloat16)
PIECES = (1, 2, 3, 5, 7, 8, 15, 17, 33, 40, 64)
NUM_TOKENS = 270


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def differing(function: Callable[..., Tensor], *given: Tensor) -> int:
    """How many numbers of function(x[n, ...], ...) [n, ...] differ between all tokens at once and pieces of them."""
    whole, start, count = function(*given), 0, 0
    for size in PIECES:
        part = slice(start, start + size)
        count += int((function(*(each[part] for each in given)) != whole[part]).sum())
        start += size
    return count


def linear_case(
    dtype: torch.dtype, size: int, outputs: int, *, with_bias: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(size, outputs, generator=generator).to(dtype).mul_(size**-0.5)
    weight = weight.t() if transposed else weight.t().contiguous()
    x = torch.randn(NUM_TOKENS, size, generator=generator).to(dtype)
    return x, weight, torch.randn(outputs, generator=generator).to(dtype) if with_bias else None


@torch.no_grad()
def test_linear(threads: int) -> None:
    plain = dict.fromkeys(DTYPES, 0)
    for dtype in DTYPES:
        for size, outputs, with_bias, transposed in (
            *((72, 148, False, False), (128, 344, True, True), (1536, 192, False, False)),
        ):
            x, weight, bias = linear_case(dtype, size, outputs, with_bias=with_bias, transposed=transposed)
            case = dtype, size, outputs
            assert differing(partial(invariant.linear, weight=weight, bias=bias), x) == 0, case
            torch.testing.assert_close(invariant.linear(x[:5], weight, bias), F.linear(x[:5], weight, bias))
            plain[dtype] += differing(partial(F.linear, weight=weight, bias=bias), x)
    # Control: pieces of a plain layer differ.
    assert plain[torch.float32] > 100, plain


@torch.no_grad()
def test_pointwise(threads: int) -> None:
    plain = 0
    for dtype in DTYPES:
        for function in (F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), torch.sigmoid):
            for size in (148, 344):
                x = torch.randn(NUM_TOKENS, size, generator=torch.Generator().manual_seed(0)).to(dtype)
                assert differing(partial(invariant.pointwise, function), x) == 0
                assert invariant.pointwise(function, x[:0]).shape == (0, size)
                torch.testing.assert_close(invariant.pointwise(function, x), function(x))
                plain += differing(function, x)
    # Control: pieces of a plain activation differ.
    assert plain > 10


def attention(
    attend: Callable[..., Tensor], keys: Tensor, values: Tensor, window: int, queries: Tensor, positions: Tensor
) -> Tensor:
    """Of queries [n, B, heads, D] at positions [n], over a cache that is hardly wider than they see."""
    slots = torch.arange(min(int(positions[-1]) + 1 + len(positions) % 3, keys.shape[2]))
    seen = (slots <= positions.unsqueeze(1)) & (slots > positions.unsqueeze(1) - window)
    caches = (each[: queries.shape[1], :, : len(slots)] for each in (keys, values))
    return attend(queries.permute(1, 2, 0, 3).contiguous(), *caches, seen[None, None], 0.3).transpose(0, 1)


@torch.no_grad()
def test_attend(threads: int) -> None:
    plain = 0
    # The last tokens see two blocks.
    positions = torch.arange(NUM_TOKENS) + invariant.BLOCK - NUM_TOKENS // 2
    for dtype in DTYPES:
        for batch, heads, group, size, window in ((3, 2, 3, 16, 999), (2, 1, 8, 18, 40), (1, 1, 1, 64, 999))[
            : 4 - threads
        ]:
            generator = torch.Generator().manual_seed(size)
            shapes = (NUM_TOKENS, batch, heads * group, size), *[(batch, heads, 1030, size)] * 2
            queries, keys, values = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
            ours, theirs = (
                partial(attention, each, keys, values, window) for each in (invariant.attend, attend_masked)
            )
            assert differing(ours, queries, positions) == 0, (dtype, size)
            whole = ours(queries, positions)
            assert torch.equal(ours(queries[50:55, :1], positions[50:55]), whole[50:55, :1])
            rounding = 2e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(whole, theirs(queries, positions), atol=rounding, rtol=1e-2)
            plain += differing(theirs, queries, positions)
    # Control: pieces of plain attention differ.
    assert plain > 100
    unseen = torch.zeros(1, 1, 5, 1030, dtype=torch.bool)
    assert not invariant.attend(queries[:5].permute(1, 2, 0, 3), keys, values, unseen, 0.3).any()


def test_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    # Some processors have no number of rows that agrees for sizes like 9.
    x, weight = (torch.randn(16, 32, generator=generator).div_(4).requires_grad_() for _ in range(2))
    seen = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()

    def layer(linear: Callable[..., Tensor], attend: Callable[..., Tensor], act: Callable[..., Tensor]) -> list[Tensor]:
        hidden = act(linear(x, weight))
        heads = hidden.view(1, 1, 16, 16)
        output = attend(heads, heads, heads, seen, 0.3)
        return list(torch.autograd.grad(output.square().sum(), (x, weight)))

    ours = layer(invariant.linear, invariant.attend, lambda each: invariant.pointwise(F.silu, each))
    torch.testing.assert_close(ours, layer(F.linear, attend_masked, F.silu))


def test_no_number_of_rows_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant, "_agreeing", {})
    # A row depends on its place.
    monkeypatch.setattr(F, "linear", lambda rows, weight, bias: rows[:, :4] + torch.arange(len(rows)).unsqueeze(1))
    with pytest.raises(RuntimeError, match=r"invariant: on this machine products with \[4, 6\] weights have"):
        invariant.linear(torch.ones(3, 6), torch.ones(4, 6))


def test_rounding_shows_in_comparisons() -> None:
    """In bfloat16 too, another order of a sum must not pass for the same order."""
    rows, weights = invariant._cancelling(48, 576, -1), invariant._cancelling(64, 576, 1)
    assert float((rows.double() @ weights.double().t()).abs().max()) < 1e-9
    order = torch.randperm(576, generator=torch.Generator().manual_seed(0))
    pairs = (rows, weights), (rows[:, order], weights[:, order])
    sums, others = (a.bfloat16().float() @ b.bfloat16().float().t() for a, b in pairs)
    # 0.89 with AVX2, more with AVX-512.
    assert float((sums.bfloat16() != others.bfloat16()).float().mean()) > 0.8
