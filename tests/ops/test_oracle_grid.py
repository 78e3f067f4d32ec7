"""Every op against the float64 oracle, on the cases that all backends share, and wrong ops that the comparison finds.

The dense ops have two forms, which must give the same: eager calls, which may look at values, and what is traced.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from marks import slow
from op_cases import OPS, VERIFY_OPS, call, call_traced, check, equal, results
from report import Report
from torch import Tensor

import torch_specops
from torch_specops import reference
from torch_specops.ops.arguments import Filters
from torch_specops.ops.cpu import eager_rows, filters
from torch_specops.testing import (
    MISTAKES,
    Case,
    Comparison,
    compare,
    poison_memory,
    rounding_rows,
    sample_inputs,
    verify_with_mistake,
)

DRAWING_OPS = (*VERIFY_OPS, "sample", "sample_gumbel")
# Some of the cases only: the oracle is slow. "hot" has nearly equal weights, which a prefix sum in float32 would lose.
LARGE_CASES = "k3 bf16 vocab_sliced greedy_mixed masked opposite one_hot lse hot tie_s_zero"


@functools.cache
def small_cases(op: str) -> list[Case]:
    """Made once: no op changes its arguments, says `test_invariants.py`."""
    return list(sample_inputs(op, vocab_sizes=[17]))


# What one token or several tiles change: sums, draws, maxima, filters. The walk, strides and padding they do not.
ONE_TOKEN_CASES = (
    "k3 k0 k0_greedy b0 bf16 fp16_fp32 vocab_sliced pad_ragged target_nan draft_nan mixed_nonfinite masked_token "
    "overflow greedy_mixed bad_temperature hot_overflow tie_u_zero tie_below_one uniforms_out_of_range_filters filters "
    "filters_temperature filters_nonfinite filters_without_law target_filters_lse one_hot one_hot_nonfinite lse "
    "mixed_one_hot_filters_lse "
    "lse_wrong lenience_0.3 argmax_lenience_mixed scale_1e3 far_below"
)
TILED_CASES = (
    "k3 k8 fp16_fp32 transposed vocab_sliced_bf16 target_inf mixed_nonfinite masked_token overflow overflow_fp16 "
    "greedy_mixed greedy_plateaus cold hot_overflow bad_temperature opposite plateaus exact_residual_below_least "
    "tie_s_zero tie_below_one uniforms_out_of_range_masked uniforms_out_of_range_filters tie_same top_k top_p min_p "
    "filters_plateaus filters_zero_maxima filters_masked filters_nonfinite filters_opposite filters_lse "
    "target_filters_plateaus one_hot_nonfinite lse_nonfinite lse_wrong_same lenience_lse argmax_lenience_plateaus "
    "mixed_one_hot mixed_one_hot_filters_lse "
    "argmax_lenience_nonfinite scale_narrow scale_largest scale_1e4_far"
)


@pytest.mark.parametrize("op", OPS)
def test_op_equals_oracle(op: str, report: Report) -> None:
    """An odd number of tokens below a tile of any backend."""
    check(results(small_cases(op)), report)


@pytest.mark.parametrize(
    "vocab_size, names",
    [(1, ONE_TOKEN_CASES), (1025, TILED_CASES), slow(1, None), slow(1025, None)],
    ids=["1", "1025", "all of 1", "all of 1025"],
)
@pytest.mark.parametrize("op", OPS)
def test_op_equals_oracle_on_tiles(op: str, vocab_size: int, names: str | None, report: Report) -> None:
    check(results(sample_inputs(op, vocab_sizes=[vocab_size], names=names and names.split())), report)


@pytest.mark.parametrize("op", DRAWING_OPS)
def test_op_equals_oracle_on_a_large_vocabulary(op: str, report: Report) -> None:
    """A tile of the search, and that of a language model."""
    sizes = [1024, 50257]
    check(results(sample_inputs(op, vocab_sizes=sizes, names=LARGE_CASES.split(), max_rows=3, max_drafts=2)), report)


def test_rows_read_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a large vocabulary are in an eager call, and by the filters."""
    cases = small_cases("verify_exact")
    together = [torch_specops.verify_exact(**case.args) for case in cases]
    monkeypatch.setattr(eager_rows, "CACHED_LOGITS", 1)
    monkeypatch.setattr(filters, "SHORT_ROW", 0)
    for case, expected in zip(cases, together, strict=True):
        found = torch_specops.verify_exact(**case.args)
        assert all(map(torch.equal, found, expected)), case.name


def test_eager_probabilities_of_every_size() -> None:
    """Of long rows, which a softmax normalises badly, and of tokens whose weight is no float32."""
    logits = 3 * torch.randn(1, 2, 151_936, generator=torch.Generator().manual_seed(0))
    logits[0, :, 5] = -300.0
    tokens = torch.stack([logits[0].argmax(-1), torch.tensor([5, 5])], 1)
    expected = logits.double().log_softmax(-1)
    for x in tokens:
        probability = eager_rows.read_rows(logits, None, Filters()).probabilities(x.unsqueeze(0))
        for i in range(2):
            assert math.log(probability(0, i)) == pytest.approx(float(expected[0, i, x[i]]), abs=1e-6)
    _, lse = torch_specops.sample(logits[0], torch.full((2,), 0.5))
    torch.testing.assert_close(lse.double(), logits[0].double().logsumexp(-1), rtol=0, atol=1e-6)
    # A draft as unlikely for the target as for the draft model is accepted.
    draft = (torch.full((1, 1), 5), logits[:, :1], torch.full((1, 1), 0.9), torch.rand(1))
    assert torch_specops.verify_exact(logits, *draft)[1].tolist() == [1]


@pytest.mark.parametrize("op", DRAWING_OPS)
def test_cases_are_what_their_names_say(op: str) -> None:
    cases = {case.name.rsplit("-", 1)[0]: case.args for case in small_cases(op)}
    logits = "target_logits" if op in VERIFY_OPS else "logits"
    assert {args[logits].dtype for args in cases.values()} == {torch.float32, torch.bfloat16, torch.float16}
    assert not cases["batch_sliced"][logits].is_contiguous() and cases["transposed"][logits].stride(-1) != 1
    sliced = cases["vocab_sliced"][logits]
    assert sliced.stride(-2) % 2 == 1 and sliced.storage_offset() % 2 == 1
    assert cases["expanded"][logits].stride(0) == 0
    # The same call gives the same numbers, another seed others.
    again, other = (next(iter(sample_inputs(op, vocab_sizes=[17], seed=seed))).args[logits] for seed in (0, 1))
    assert torch.equal(cases["k3"][logits], again) and not torch.equal(again, other)


@pytest.mark.parametrize("op", VERIFY_OPS)
def test_cases_reach_every_length_of_the_walk(op: str) -> None:
    """Acceptances of every length 0..K, drafts that are padding, and rejections in rows of every kind."""
    lengths = set()
    for case in small_cases(op):
        _, n = getattr(torch_specops, op)(**case.args)
        lengths |= {(case.args["draft_tokens"].shape[1], int(v)) for v in n}
    assert {(k, n) for k in (0, 1, 3, 8) for n in range(k + 1)} <= lengths


# Mistakes of an op that draws, and of one that verifies.
DRAWING_MISTAKES = "the token after; a last tile filled with 0; NaN as 0; logits in bfloat16; no temperature"
UNIFORM_MISTAKES = "the uniform of row 0; a search off by 1e-3"
NOISE_MISTAKES = "the seed of row 0; the next position; half a seed; half a position; g / 2; -g"
VERIFY_MISTAKES = "an unwritten tail; padding in the output; the next token counts"
EXACT_MISTAKES = "u l q <= p"
# Enough for all of them: a case costs the oracle twice.
MISTAKEN_CASES = "k3 k8 long bf16_fp16 pad_head target_nan target_minus_inf greedy hot_overflow tie_s_zero"


def mistakes_of(op: str) -> list[str]:
    noise = op.endswith("gumbel")
    found = [DRAWING_MISTAKES, NOISE_MISTAKES if noise else UNIFORM_MISTAKES]
    found += [VERIFY_MISTAKES] * (op in VERIFY_OPS) + [EXACT_MISTAKES] * (op in VERIFY_OPS and not noise)
    return "; ".join(found).split("; ")


def oracle_with(mistake: str, op: str, args: dict[str, Any]) -> tuple[Tensor, ...]:
    logits = {name: x for name, x in args.items() if name.endswith("logits") and x is not None}
    targets = {name: x for name, x in logits.items() if name != "draft_logits"}
    uniforms = "uniforms" if op == "sample" else "sample_uniforms"
    changed = {
        "a last tile filled with 0": {name: torch.nn.functional.pad(x, (0, 7)) for name, x in logits.items()},
        "NaN as 0": {name: torch.where(x.isnan(), 0.0, x) for name, x in logits.items()},
        "logits in bfloat16": {name: x.bfloat16() for name, x in logits.items()},
        "no temperature": {"temperature": None},
        # It differs at u = 0, where tokens that the target excludes are accepted.
        "u l q <= p": {name: torch.where(x == -torch.inf, -80.0, x) for name, x in targets.items()},
    }
    noises = {"g / 2": lambda g: g / 2, "-g": lambda g: -g}
    if op.endswith("gumbel"):
        seeds, positions = args["seeds"], args["positions"]
        changed |= {
            "the seed of row 0": {"seeds": seeds[:1].expand_as(seeds)},
            "the next position": {"positions": positions + 1},
            "half a seed": {"seeds": seeds & 0xFFFFFFFF},
            "half a position": {"positions": positions & 0xFFFFFFFF},
        }
    else:
        changed |= {
            "the uniform of row 0": {uniforms: args[uniforms][:1].expand_as(args[uniforms])},
            "a search off by 1e-3": {uniforms: args[uniforms] + 1e-3},
        }
    noise, change = reference.gumbel_noise, noises.get(mistake, lambda g: g)
    with mock.patch.object(reference, "gumbel_noise", lambda *place: change(noise(*place))):
        result = getattr(reference, op)(**args | changed.get(mistake, {}))
    output, *rest = (result,) if isinstance(result, Tensor) else result
    last = rest[0] if rest else torch.empty(0)
    if mistake == "the token after":
        rows = torch.arange(len(output))
        place = (rows, last) if op in VERIFY_OPS else (rows,)
        (vocab_size,) = {x.shape[-1] for x in logits.values()}
        output[place] = torch.where(output[place] < 0, -1, (output[place] + 1) % vocab_size)
    elif mistake == "an unwritten tail":
        output = torch.where(output == -1, 0, output)
    elif mistake == "padding in the output":
        tokens = args["draft_tokens"].long()
        output[:, :-1] = torch.where(tokens < -1, tokens, output[:, :-1])
    elif mistake == "the next token counts":
        last = last + 1
    return (output, last) if rest else (output,)


def is_wrong(case: Case, got: tuple[Tensor, ...]) -> bool:
    """Whether `compare` finds a wrong row. The first is enough: a wrong row costs the oracle up to a hundred calls."""
    for b in range(len(got[0])):
        row = {name: x[b : b + 1] if isinstance(x, Tensor) else x for name, x in case.args.items()}
        if compare(Case(case.name, case.op, row), tuple(x[b : b + 1] for x in got)).wrong:
            return True
    return False


@pytest.mark.parametrize("op", DRAWING_OPS)
def test_wrong_implementation_is_caught(op: str) -> None:
    """The oracle with one mistake."""
    made: list[Case] = []
    more = sample_inputs(op, vocab_sizes=[17, 600], names=MISTAKEN_CASES.split())

    def cases() -> Iterator[Case]:
        """Made one by one, until one of them shows the mistake, and kept for the next mistake."""
        yield from made
        for case in more:
            made.append(case)
            yield case

    for mistake in mistakes_of(op):
        assert any(is_wrong(case, oracle_with(mistake, op, case.args)) for case in cases()), mistake


def test_wrong_spelling_is_caught() -> None:
    """What a loop written by hand may get wrong. Without a mistake nothing is wrong."""
    cases = [next(sample_inputs("verify_exact", vocab_sizes=[17], seed=seed, names=["k3"])) for seed in range(6)]
    for mistake in (None, *MISTAKES):
        wrong = any(is_wrong(case, verify_with_mistake(mistake, **case.args)) for case in cases)
        assert wrong == (mistake is not None), mistake
    args = cases[0].args
    one, each = (
        verify_with_mistake(None, **args, temperature=t) for t in (0.5, torch.full((len(args["draft_tokens"]),), 0.5))
    )
    assert equal(one, each) and not equal(one, verify_with_mistake(None, **args))


def test_a_boundary_belongs_to_the_token_above_it() -> None:
    """Equal weights of a power of two add up without rounding, so that s lies on a boundary exactly."""
    for vocab_size in (4, 2048):
        args = {"logits": torch.zeros(vocab_size, vocab_size), "uniforms": torch.arange(vocab_size) / vocab_size}
        for form in (call, call_traced):
            assert torch.equal(form("sample", args)[0], torch.arange(vocab_size))


def test_small_probabilities_keep_their_ratio() -> None:
    """No epsilon: p(x) = 1e-9 against q(x) = 2e-9 accepts at u = 0.49 and rejects at u = 0.51."""
    rest = math.log1p(-1e-9)
    target = torch.tensor([[math.log(1e-9), rest, -torch.inf], [0.0, 0.0, 0.0]]).expand(2, 2, 3)
    draft = torch.tensor([[math.log(2e-9), rest, -torch.inf]]).expand(2, 1, 3)
    tokens, u = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[0.49], [0.51]])
    output, n = torch_specops.verify_exact(target, tokens, draft, u, torch.tensor([0.0, 0.5]))
    assert n.tolist() == [1, 0] and output.tolist() == [[0, 0], [1, -1]]


def test_rounding_of_a_score() -> None:
    """The second token, where its score lies so far below the largest."""
    seeds, positions = torch.arange(64), torch.zeros(64, dtype=torch.int64)
    noise = torch.stack([reference.gumbel_noise(seed, 0, 2) for seed in range(64)])
    for distance, is_rounding in ((1e-6, True), (1e-3, False)):
        logits = torch.stack([noise[:, 1] - noise[:, 0] + distance, torch.zeros(64, dtype=torch.float64)], 1).float()
        case = Case("near ties", "sample_gumbel", {"logits": logits, "seeds": seeds, "positions": positions})
        assert compare(case, torch.zeros(64, dtype=torch.int64)) == Comparison(64, 0, [])
        comparison = compare(case, torch.ones(64, dtype=torch.int64))
        assert (comparison.rounding, len(comparison.wrong)) == ((64, 0) if is_rounding else (0, 64))
        assert rounding_rows(case).sum() == comparison.rounding


def test_rounding_is_told_from_a_mistake() -> None:
    """The token below, where the uniform lies so far above the boundary of equal weights."""
    logits, boundaries = torch.zeros(63, 64), torch.arange(1, 64, dtype=torch.float64) / 64
    below = reference.sample(logits, boundaries - 0.01)
    for distance, is_rounding in ((1e-5, True), (1e-4, False)):
        case = Case("boundaries", "sample", {"logits": logits, "uniforms": boundaries + distance})
        comparison = compare(case, below)
        assert (comparison.rounding, len(comparison.wrong)) == ((63, 0) if is_rounding else (0, 63))
        assert rounding_rows(case).sum() == comparison.rounding


@pytest.mark.parametrize("op", [*VERIFY_OPS[:3], "sample"])
def test_rounding_of_an_unlikely_token(op: str) -> None:
    """Two likely tokens, between them others of 1e-9 down to 1e-26, and excluded ones: row b draws token b."""
    logits = torch.full((19, 19), -math.inf)
    logits[:, [0, 18]] = 0.0
    logits[:, 2:18:2] = torch.linspace(-60.0, -20.0, 8)
    tokens = torch.arange(19)
    for distance, rounding, wrong in ((1e-5, 9, range(1, 18, 2)), (1e-4, 0, range(1, 19))):
        s = torch.full((19,), 0.5 - distance)
        args: dict[str, Any] = {"logits": logits, "uniforms": s}
        got = tokens, logits.logsumexp(1)
        if op != "sample":
            drafts = {"draft_tokens": tokens.new_zeros(19, 0), "draft_logits": logits.new_zeros(19, 0, 19)}
            args = {"target_logits": logits.unsqueeze(1), **drafts, "accept_uniforms": s.new_zeros(19, 0)}
            args["sample_uniforms"] = s
            got = tokens.unsqueeze(1), torch.zeros_like(tokens)
        case = Case("unlikely tokens", op, args)
        comparison = compare(case, got)
        assert (comparison.rounding, comparison.wrong) == (rounding, list(wrong))
        assert rounding_rows(case).tolist() == [rounding > 0] * 19


def test_rounding_of_first_and_last_token() -> None:
    """Tokens of 1e-26; a uniform of 0 is exact."""
    logits = torch.tensor([[-60.0, 0.0, -60.0]] * 4)
    s = torch.tensor([2.0**-24, 1 - 2.0**-24, 0.0, 0.5])
    case = Case("ends", "sample", {"logits": logits, "uniforms": s})
    comparison = compare(case, (torch.tensor([0, 2, 1, 2]), logits.logsumexp(1)))
    assert (comparison.rounding, comparison.wrong) == (2, [2, 3])
    assert rounding_rows(case).tolist() == [True, True, False, False]


@pytest.mark.parametrize("vocab_size", [17, 1025])
def test_rounding_of_a_rejection(vocab_size: int) -> None:
    """A device sums rows of p = q in two orders, which makes p(x) a little less than q(x): it rejects at a uniform of
    1 - 2**-24, the first of each row. Nothing else is rejected by rounding, and nothing with a lenience."""
    (case,) = sample_inputs("verify_exact", vocab_sizes=[vocab_size], names=["tie_same"])
    uniforms = case.args["accept_uniforms"].double()

    def on_a_device(p_of_q: float, **changes: Any) -> tuple[Tensor, Tensor]:
        return reference.verify_exact(**case.args | changes | {"accept_uniforms": uniforms / p_of_q})

    output, n = on_a_device(1 - 1.06 * 2**-24)
    assert n.tolist() == [0] * 6 and torch_specops.verify_exact(**case.args)[1].tolist() == [3] * 6
    assert compare(case, (output, n)) == Comparison(rows=6, rounding=6, wrong=[])
    # Where rounding may decide, the GPU tests let a GPU and a CPU differ.
    assert rounding_rows(case).all()
    for wrong in (
        # Rejected at a uniform of 1/2 too, after an accepted first draft.
        reference.verify_exact(**case.args | {"accept_uniforms": torch.where(uniforms == 0.5, 1.0, uniforms)}),
        # The next token is another.
        (torch.where(output < 0, -1, (output + vocab_size // 2) % vocab_size), n),
    ):
        assert compare(case, wrong).wrong == list(range(6))
    with_lenience = Case(case.name, case.op, case.args | {"lenience": 0.9})
    assert compare(with_lenience, on_a_device(0.9, lenience=1.0)).wrong == list(range(6))
    assert not rounding_rows(with_lenience).any()


def test_wrong_lse_is_caught() -> None:
    """An lse that is off by 2e-5, a hundred times float32's rounding there, or not -inf where no token is."""
    for case in small_cases("sample"):
        tokens, lse = reference.sample(**case.args)
        if case.name in ("k3-V17", "bf16-V17"):
            assert compare(case, (tokens, lse + 2e-5)).wrong == list(range(6))
        if case.name == "target_nan-V17":
            assert compare(case, (tokens, lse.nan_to_num(neginf=0.0))).wrong == [0, 1]


def test_wrong_shapes_and_dtypes_are_caught() -> None:
    case = small_cases("verify_exact")[0]
    output, n = reference.verify_exact(**case.args)
    for wrong in ((output[:, :-1], n), (output.int(), n), (output, n.int()), (output,), (output, n, n)):
        with pytest.raises(AssertionError, match="k3-V17: expected"):
            compare(case, wrong)


def test_poison_reaches_every_allocation() -> None:
    before = torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty
    with poison_memory():
        model = torch.zeros(3, dtype=torch.float16)
        for fresh in (torch.empty(3), torch.empty_like(model), torch.empty_strided((3,), (1,)), model.new_empty(3)):
            assert fresh.isnan().all()
        assert torch.empty(2, dtype=torch.int32).tolist() == [-(2**31) + 7] * 2
        assert torch.empty(2, dtype=torch.int64).tolist() == [-(2**63) + 7] * 2
        assert torch.empty(2, dtype=torch.bool).all()
    assert before == (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)
