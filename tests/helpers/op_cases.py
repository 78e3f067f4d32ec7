"""One call of each op, for the tests that ask the same of all of them; and calls that are compared with the oracle."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from report import Report
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_specops
from torch_specops import ops
from torch_specops.ops.registration import bodies
from torch_specops.testing import Case, compare, poison_memory

# In the order of their registration.
OPS = tuple(name.removeprefix("specops::") for name in bodies if name.removeprefix("specops::") in ops.__all__)
VERIFY_OPS = tuple(op for op in OPS if op.startswith("verify"))
FILTERS = ("top_k", "top_p", "min_p")
# Seeds and positions, of which all words count.
NOISE_PLACES = [(0, 0), (7, 2**32 - 1), (-1, 5), (2**62 + 12345, 2**40 + 3), (-(2**63), 2**63 - 1)]


def op_arguments(
    op: str,
    batch: int = 4,
    num_drafts: int = 3,
    vocab_size: int = 37,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    filtered: bool = True,
) -> dict[str, Any]:
    """Every argument that the op has, in its order: rows with and without a law, greedy and sampled, padded drafts.

    Drafts are sampled near the target, so that every number of accepted drafts occurs.
    """
    g = torch.Generator().manual_seed(seed)
    target_logits = 3 * torch.randn(batch, num_drafts + 1, vocab_size, generator=g)
    draft_logits = target_logits[:, :-1] + torch.randn(batch, num_drafts, vocab_size, generator=g)
    noise = torch.rand(batch, num_drafts, vocab_size, generator=g)
    draft_tokens = (draft_logits - 0.5 * (-noise.log()).log()).argmax(-1)
    draft_tokens[torch.rand(batch, num_drafts, generator=g) < 0.1] = -1
    uniforms = torch.rand(batch, num_drafts + 1, generator=g)
    temperature = torch.tensor([0.7, 0.0, 1.3, -1.0]).repeat(batch // 4 + 1)[:batch].roll(seed)
    seeds, positions = torch.arange(batch) + 100 * seed, 7 * torch.arange(batch)
    if op == "verify_gumbel":
        every = positions.unsqueeze(1) + torch.arange(num_drafts)
        rows = (draft_logits.flatten(0, 1), seeds.repeat_interleave(num_drafts), every.flatten())
        draft_tokens = torch_specops.sample_gumbel(*rows, temperature.repeat_interleave(num_drafts)).view_as(every)
    scaled = draft_logits / torch.where(temperature > 0, temperature, 1.0).view(-1, 1, 1)
    values: dict[str, Any] = {
        "logits": target_logits[:, 0].to(dtype, copy=True, memory_format=torch.contiguous_format),
        "uniforms": uniforms[:, 0].contiguous(),
        "target_logits": target_logits.to(dtype),
        "draft_tokens": draft_tokens,
        "draft_logits": draft_logits.to(dtype),
        "accept_uniforms": uniforms[:, :-1].contiguous(),
        "sample_uniforms": uniforms[:, -1].contiguous(),
        "seeds": seeds,
        "positions": positions,
        "temperature": temperature,
        "draft_lse": scaled.to(dtype).float().logsumexp(-1),
        "lenience": 0.9 if op == "verify_exact" else 1.0,
        "argmax_lenience": 0.8,
        "alpha": -4.0,
        "beta": 3.0,
        # Some rows keep every token.
        "top_k": torch.arange(batch) % 3 * (vocab_size // 4),
        "top_p": torch.tensor([0.9, 0.5, 1.0, 0.7]).repeat(batch // 4 + 1)[:batch],
        "min_p": torch.tensor([0.0, 0.02, 0.1, 0.0]).repeat(batch // 4 + 1)[:batch],
        "filter_draft": op == "verify_exact",
    }
    schema = getattr(torch.ops.specops, op).default._schema
    left_out = () if filtered else (*FILTERS, "filter_draft")
    return {each.name: values[each.name] for each in schema.arguments if each.name not in left_out}


def call(op: str, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The public function, its result always a tuple."""
    outputs = getattr(torch_specops, op)(**arguments)
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def tensor_arguments(op: str, *sizes: int, **options: Any) -> dict[str, Tensor]:
    """Those of `op_arguments` that are tensors."""
    return {name: value for name, value in op_arguments(op, *sizes, **options).items() if isinstance(value, Tensor)}


class Call(nn.Module):
    """An op as a module that is given the tensors; numbers are constants of the module."""

    def __init__(self, op: str, **numbers: Any) -> None:
        super().__init__()
        self.op, self.numbers = op, numbers

    def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return call(self.op, tensors | self.numbers)


class _WithoutValues(TorchDispatchMode):
    """What a compiler records: no operator may read a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert torch.Tag.data_dependent_output not in func.tags, f"a traced op calls {func}"
        return func(*args, **(kwargs or {}))


def call_traced(op: str, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The same by the dense form that is traced, which has to do without looking at values."""
    bound = inspect.signature(getattr(torch_specops, op)).bind(**arguments)
    bound.apply_defaults()
    with _WithoutValues():
        outputs = bodies[f"specops::{op}"](*bound.args)
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def check(results: Iterable[tuple[Case, tuple[Tensor, ...]]], report: Report) -> None:
    """Every result is the oracle's, and few rows differ from it by rounding."""
    rounding = rows = 0
    for case, got in results:
        comparison = compare(case, got)
        report.add(case, comparison)
        assert comparison.wrong == [], f"{case.name}: rows {comparison.wrong} differ from the oracle"
        rounding, rows = rounding + comparison.rounding, rows + comparison.rows
    assert rounding <= 0.01 * rows


def results(cases: Iterable[Case]) -> Iterator[tuple[Case, tuple[Tensor, ...]]]:
    """What the eager form returns, and what the traced one does where it differs. Memory that is read before it is
    written shows."""
    for case in cases:
        with poison_memory():
            eager, traced = call(case.op, case.args), call_traced(case.op, case.args)
        yield case, eager
        if not equal(eager, traced):
            yield case, traced


def equal(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def assert_equal(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Integers to the bit; a compiled logsumexp may differ in its last one."""
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6 if a.is_floating_point() else 0, atol=0)


def empty_arguments(
    op: str,
    options: str = "temperature",
    batch: int = 4,
    num_drafts: int = 5,
    vocab_size: int = 50_257,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> dict[str, Tensor | None]:
    """Arguments without values, for fake tensors of a device that need not be there. `options` may name temperature,
    filters, draft_lse and one-hot. `dtype` is that of the target's logits; those of a draft are bfloat16."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    rows = {"temperature": empty(batch)} if "temperature" in options else {}
    if "filters" in options and op != "verify_sigmoid":
        rows |= {"top_k": empty(batch, dtype=torch.int64), "top_p": empty(batch), "min_p": empty(batch)}
    if op.endswith("gumbel"):
        rows = {name: empty(batch, dtype=torch.int64) for name in ("seeds", "positions")} | rows
    if op not in VERIFY_OPS:
        uniforms = {"uniforms": empty(batch)} if op == "sample" else {}
        return {"logits": empty(batch, vocab_size, dtype=dtype), **uniforms, **rows}
    drafts = {
        "target_logits": empty(batch, num_drafts + 1, vocab_size, dtype=dtype),
        "draft_tokens": empty(batch, num_drafts, dtype=torch.int64),
    }
    if op == "verify_gumbel":
        return drafts | rows
    draft_logits = None if "one-hot" in options else empty(batch, num_drafts, vocab_size, dtype=torch.bfloat16)
    return {
        **drafts,
        "draft_logits": draft_logits,
        "accept_uniforms": empty(batch, num_drafts),
        "sample_uniforms": empty(batch),
        **rows,
        **({"draft_lse": empty(batch, num_drafts)} if "draft_lse" in options else {}),
    }
