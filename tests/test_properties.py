"""What holds for every input, by hypothesis: logits of any values and dtypes, any tokens, any uniforms."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from oracle import Case, compare, rounding_rows
from torch import Tensor

import torch_specops
from torch_specops import reference

settings.register_profile(
    "properties",
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("properties")

INF, NAN = math.inf, math.nan
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What replaces some of the normal logits.
SPECIAL = (-INF, INF, NAN, 0.0, 3e38, -3e38, 1e-30, -80.0, 30000.0)
TEMPERATURES = (1.0, 0.0, 0.7, 1e-3, 100.0, -1.0, NAN)
EDGES = (0.0, 1.0 - 2.0**-24, 0.5)
# Off, ordinary, of one token, and no number at all.
FILTERS = {"top_k": (0, 1, 2, 5, 40), "top_p": (1.0, 0.9, 0.3, 0.0, NAN), "min_p": (0.0, 0.1, 1.0, NAN)}


@st.composite
def logits(draw: st.DrawFn, generator: torch.Generator, *shape: int) -> Tensor:
    values = draw(st.sampled_from((0.5, 3.0, 20.0))) * torch.randn(shape, generator=generator)
    # Most rows stay ordinary; a few entries, or whole rows, become special.
    for share in draw(st.lists(st.sampled_from((0.05, 0.5, 1.0)), max_size=2)):
        special = draw(st.sampled_from(SPECIAL))
        row = torch.rand(*shape[:-1], 1, generator=generator) < 0.4
        values[row & (torch.rand(shape, generator=generator) < share)] = special
    return values.to(draw(st.sampled_from(DTYPES)))


@st.composite
def uniform(draw: st.DrawFn, generator: torch.Generator, *shape: int) -> Tensor:
    dtype = draw(st.sampled_from((torch.float32, torch.float64)))
    values = torch.rand(shape, generator=generator, dtype=dtype)
    edge = draw(st.sampled_from((None, *EDGES)))
    if edge is not None:
        values[torch.rand(shape, generator=generator) < 0.5] = edge
    return values


@st.composite
def filters(draw: st.DrawFn, generator: torch.Generator, rows: int) -> dict[str, Tensor]:
    chosen = draw(st.sets(st.sampled_from(tuple(FILTERS)))) if draw(st.booleans()) else set()
    return {
        name: torch.tensor(FILTERS[name])[torch.randint(len(FILTERS[name]), (rows,), generator=generator)]
        for name in FILTERS
        if name in chosen
    }


@st.composite
def verify_args(draw: st.DrawFn, op: str) -> dict[str, Any]:
    batch, num_drafts = draw(st.integers(0, 5)), draw(st.integers(0, 4))
    vocab_size = draw(st.sampled_from((1, 2, 3, 7, 33)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    args: dict[str, Any] = {
        "target_logits": draw(logits(generator, batch, num_drafts + 1, vocab_size)),
        "draft_logits": draw(logits(generator, batch, num_drafts, vocab_size)),
        "accept_uniforms": draw(uniform(generator, batch, num_drafts)),
        "sample_uniforms": draw(uniform(generator, batch)),
    }
    law = {}
    if draw(st.booleans()):
        index = torch.randint(len(TEMPERATURES), (batch,), generator=generator)
        law["temperature"] = torch.tensor(TEMPERATURES)[index]
    if op != "verify_sigmoid":
        law |= draw(filters(generator, batch))
    args |= law
    flat = args["draft_logits"].reshape(batch * num_drafts, vocab_size)
    flat_law = map_tensors(law, lambda x: x.repeat_interleave(num_drafts))
    sampled, lse = torch_specops.sample(flat, torch.rand(len(flat), generator=generator), **flat_law)
    tokens = sampled.view(batch, num_drafts)
    wild = torch.randint(-3, vocab_size + 3, tokens.shape, generator=generator)
    wild_share = draw(st.sampled_from((0.0, 0.3, 1.0)))
    tokens = torch.where(torch.rand(tokens.shape, generator=generator) < wild_share, wild, tokens)
    args["draft_tokens"] = tokens.to(draw(st.sampled_from((torch.int64, torch.int32))))
    if op != "verify_sigmoid":
        draft = draw(st.sampled_from(("logits", "lse", "one-hot")))
        if draft == "lse":
            args["draft_lse"] = lse.view(batch, num_drafts)
        elif draft == "one-hot":
            args["draft_logits"] = None
        if op == "verify_exact":
            args["lenience"] = draw(st.sampled_from((1.0, 0.3)))
    else:
        args["alpha"], args["beta"] = draw(st.sampled_from(((-5.0, 5.0), (-1e3, 1e3), (-1e4, 1e4), (-0.5, 30.0))))
    return args


@st.composite
def sample_args(draw: st.DrawFn) -> dict[str, Any]:
    rows, vocab_size = draw(st.integers(0, 8)), draw(st.sampled_from((1, 2, 3, 7, 33)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    args = {"logits": draw(logits(generator, rows, vocab_size)), "uniforms": draw(uniform(generator, rows))}
    if draw(st.booleans()):
        index = torch.randint(len(TEMPERATURES), (rows,), generator=generator)
        args["temperature"] = torch.tensor(TEMPERATURES)[index]
    return args | draw(filters(generator, rows))


def calls() -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    verify = st.sampled_from(("verify_exact", "verify_block", "verify_sigmoid")).flatmap(
        lambda op: st.tuples(st.just(op), verify_args(op))
    )
    return st.one_of(verify, verify, st.tuples(st.just("sample"), sample_args()))


def verify_calls() -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return calls().filter(lambda call: call[0] != "sample")


def run(op: str, args: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return getattr(torch_specops, op)(**args)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal with their NaNs."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return torch.equal(*(x.contiguous().view(integers[x.element_size()]) for x in (a, b)))


def map_tensors(args: dict[str, Any], change: Any) -> dict[str, Any]:
    return {name: change(value) if isinstance(value, Tensor) else value for name, value in args.items()}


@given(verify_calls())
def test_output_is_well_formed(call: tuple[str, dict[str, Any]]) -> None:
    """Accepted drafts, a token of the vocabulary or -1, then -1; -1 for the next token only where no law is."""
    op, args = call
    output, n = run(op, args)
    batch, rows, vocab_size = args["target_logits"].shape
    assert output.shape == (batch, rows) and n.shape == (batch,)
    assert output.dtype == n.dtype == torch.int64
    assert ((n >= 0) & (n <= rows - 1)).all()
    assert ((output >= -1) & (output < vocab_size)).all()
    position = torch.arange(rows)
    accepted = position < n.unsqueeze(-1)
    assert torch.equal(output[accepted], args["draft_tokens"].long()[accepted[:, :-1]])
    assert (output[accepted] >= 0).all()
    assert (output[position > n.unsqueeze(-1)] == -1).all()


@given(calls())
def test_masked_tokens_are_never_drawn(call: tuple[str, dict[str, Any]]) -> None:
    op, args = call
    output, n = run(op, args)
    if op == "sample":
        tokens, row = output, args["logits"]
    else:
        every = torch.arange(len(n))
        tokens, row = output[every, n], args["target_logits"][every, n]
    drawn = tokens >= 0
    values = row[drawn].gather(1, tokens[drawn].unsqueeze(-1))
    assert (values > -INF).all()


@given(calls())
def test_no_token_only_without_a_law(call: tuple[str, dict[str, Any]]) -> None:
    """The next token is -1 exactly where the row has no entry above -inf, or its temperature or a filter is none."""
    op, args = call
    output, n = run(op, args)
    every = torch.arange(output.shape[0])
    tokens, row = (output, args["logits"]) if op == "sample" else (output[every, n], args["target_logits"][every, n])
    lawful = (row > -INF).any(-1)
    t = args.get("temperature", torch.ones(len(lawful)))
    lawful &= t >= 0
    for name in ("top_p", "min_p"):
        if name in args:
            lawful &= (t == 0) | ~args[name].isnan()
    assert torch.equal(tokens >= 0, lawful)


@given(calls())
def test_inputs_are_untouched_and_outputs_own_their_memory(call: tuple[str, dict[str, Any]]) -> None:
    op, args = call
    before = map_tensors(args, Tensor.clone)
    outputs = run(op, args)
    for name, value in args.items():
        if isinstance(value, Tensor):
            assert same_bits(value, before[name]), name
            for output in outputs:
                assert output.numel() == 0 or output.data_ptr() != value.data_ptr()
    assert outputs[0].numel() == 0 or outputs[0].data_ptr() != outputs[1].data_ptr()


@given(calls())
def test_deterministic(call: tuple[str, dict[str, Any]]) -> None:
    first, second = run(*call), run(*call)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


@given(calls(), st.randoms(use_true_random=False))
def test_rows_do_not_depend_on_their_neighbours(call: tuple[str, dict[str, Any]], random: Any) -> None:
    """Rows in another order, and each on its own, give the same results, bit for bit."""
    op, args = call
    outputs = run(op, args)
    batch = outputs[0].shape[0]
    order = torch.tensor(random.sample(range(batch), batch), dtype=torch.int64)
    shuffled = run(op, map_tensors(args, lambda x: x[order]))
    assert all(same_bits(a[order], b) for a, b in zip(outputs, shuffled, strict=True))
    for b in range(batch):
        alone = run(op, map_tensors(args, lambda x, b=b: x[b : b + 1]))
        assert all(same_bits(a[b : b + 1], c) for a, c in zip(outputs, alone, strict=True))


@given(calls())
def test_strides_do_not_matter(call: tuple[str, dict[str, Any]]) -> None:
    op, args = call
    reversed_layout = map_tensors(
        args, lambda x: x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    )
    spread = map_tensors(args, lambda x: torch.stack([x, x], -1)[..., 0])
    outputs = run(op, args)
    for strided in (reversed_layout, spread):
        assert all(same_bits(a, b) for a, b in zip(outputs, run(op, strided), strict=True))


@given(calls())
def test_no_temperature_is_a_temperature_of_one(call: tuple[str, dict[str, Any]]) -> None:
    op, args = call
    args.pop("temperature", None)
    ones = torch.ones(next(iter(args.values())).shape[0])
    outputs = zip(run(op, args), run(op, args | {"temperature": ones}), strict=True)
    assert all(same_bits(a, b) for a, b in outputs)


@given(calls())
def test_every_dtype_counts_as_its_float32_values(call: tuple[str, dict[str, Any]]) -> None:
    op, args = call
    wide = {
        name: value.float() if name.endswith("logits") and value is not None else value for name, value in args.items()
    }
    assert all(same_bits(a, b) for a, b in zip(run(op, args), run(op, wide), strict=True))


@given(verify_args("verify_exact"))
def test_draft_lse_of_sample_changes_nothing_off_the_margin(args: dict[str, Any]) -> None:
    """Where float32 resolves the lse: one of 1e4 is rounded by up to 5e-4, and q with it."""
    args["draft_logits"] = args["target_logits"][:, :-1] if args["draft_logits"] is None else args["draft_logits"]
    args.pop("draft_lse", None)
    batch, num_drafts, vocab_size = args["draft_logits"].shape
    flat = args["draft_logits"].reshape(-1, vocab_size)
    law = {name: args[name].repeat_interleave(num_drafts) for name in ("temperature", *FILTERS) if name in args}
    _, lse = torch_specops.sample(flat, torch.zeros(len(flat)), **law)
    with_lse = args | {"draft_lse": lse.view(batch, num_drafts)}
    given_lse = run("verify_exact", with_lse)
    without = run("verify_exact", args)
    margin = rounding_rows(Case("", "verify_exact", args)) | rounding_rows(Case("", "verify_exact", with_lse))
    margin |= (with_lse["draft_lse"].nan_to_num(neginf=0.0).abs() > 100).any(1)
    for a, b in zip(given_lse, without, strict=True):
        assert torch.equal(a[~margin], b[~margin])


@given(verify_args("verify_exact"))
def test_lenience_never_shortens_the_walk(args: dict[str, Any]) -> None:
    _, strict = run("verify_exact", args | {"lenience": 1.0})
    _, lenient = run("verify_exact", args | {"lenience": 0.3})
    assert (lenient >= strict).all()


@given(verify_calls())
def test_smaller_accept_uniforms_never_shorten_the_walk(call: tuple[str, dict[str, Any]]) -> None:
    op, args = call
    _, n = run(op, args)
    _, longer = run(op, args | {"accept_uniforms": args["accept_uniforms"] / 2})
    assert (longer >= n).all()


@given(verify_calls().filter(lambda call: call[0] != "verify_block"))
def test_what_comes_after_the_rejection_does_not_matter(call: tuple[str, dict[str, Any]]) -> None:
    """Later rows, tokens and uniforms may hold anything."""
    op, args = call
    outputs = run(op, args)
    n = outputs[1].unsqueeze(-1)
    k = args["draft_tokens"].shape[1]
    after = torch.arange(k + 1) > n
    changed = dict(args)
    changed["target_logits"] = args["target_logits"].masked_fill(after.unsqueeze(-1), 7.0)
    changed["draft_tokens"] = args["draft_tokens"].masked_fill(after[:, :k], 0)
    changed["accept_uniforms"] = args["accept_uniforms"].masked_fill(after[:, :k], 0.0)
    if args["draft_logits"] is not None:
        changed["draft_logits"] = args["draft_logits"].masked_fill(after[:, :k].unsqueeze(-1), NAN)
    assert all(torch.equal(a, b) for a, b in zip(outputs, run(op, changed), strict=True))


@given(calls())
def test_ops_equal_the_oracle(call: tuple[str, dict[str, Any]]) -> None:
    op, args = call
    case = Case("drawn by hypothesis", op, args)
    assert compare(case, getattr(reference, op)(**args)).wrong == []
    assert compare(case, run(op, args)).wrong == []


def test_the_profile_finds_a_token_out_of_range() -> None:
    """The inputs are wild enough: an op that lets padding through fails the first property."""

    @settings(phases=[Phase.generate])
    @given(verify_calls())
    def accepts_padding(call: tuple[str, dict[str, Any]]) -> None:
        op, args = call
        output, _ = getattr(reference, op)(**args)
        tokens = args["draft_tokens"].long()
        output[:, :-1] = torch.where(tokens < -1, tokens, output[:, :-1])
        assert (output >= -1).all()

    with pytest.raises(AssertionError):
        accepts_padding()
