"""Whether a term is the next token of speculative sampling: docs/math.md section 2, with l = 1.

A term depends on n, the number of accepted drafts, in two ways: all drafts were accepted, or the walk ended at n < K.
The term is made anew under each of the two, which resolves every way of choosing between the bonus token and the
recovered one, and then must be a draw from p_K and a draw from max(p_n - q_n, 0). What is known of a row's n holds for
that row alone, so a token that depends on another row's n is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .terms import ATOMS, CUMULATIVE, REDUCTIONS, Size, Term, Terms, base_of, is_boolean

# The plain code's guard against dividing by a residual of zero. A larger floor would change which token is drawn.
LARGEST_FLOOR = 1e-10
SOFT = frozenset({"softmax", "log_softmax", "low_softmax"})


class Refusal(Exception):
    """`depth`: how far the recognition came, so that of several attempts at one draw the most telling is reported."""

    def __init__(self, reason: str, depth: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.depth = depth


@dataclass(frozen=True)
class Match:
    """The terms of the arguments of `verify_exact`: the logits as the softmax takes them, and [B] and [B, K] terms."""

    token: Term
    count: Term
    target_logits: Term
    draft_logits: Term
    draft_rows: Size
    draft_tokens: Term
    accept_uniforms: Term
    sample_uniforms: Term


def looks_like_a_draw(token: Term, behind: Mapping[Term, Sequence[Term]]) -> bool:
    """A draw that compares two distributions, or that depends on how many drafts were accepted. `behind`: what leaves
    are made of."""
    cone: set[Term] = set()
    stack = [token]
    while stack:
        found = stack.pop().cone() - cone
        cone |= found
        stack.extend(inner for term in found for inner in behind.get(term, ()))
    if not any(_is_draw(term) for term in cone):
        return False
    soft = {term for term in cone if term.op in SOFT}
    return len(soft) >= 2 or any(term.op == "count" for term in cone)


def _is_draw(term: Term) -> bool:
    if term.op not in ("argmax", "sum"):
        return term.op == "random"
    test = term.args[0]
    if test.op in ("lt", "le"):
        return any(part.op == "cumsum" for part in test.cone())
    return term.op == "argmax" and not is_boolean(test)


def match(terms: Terms, token: Term) -> Match:
    """The arguments of the op that returns this token [B]; raises `Refusal`."""
    cone = token.cone()
    if any(term.op == "random" for term in cone):
        raise Refusal("the draw makes its own random numbers (multinomial, exponential): no uniforms to hand on", 9)
    counts = [term for term in cone if term.op == "count" and len(term.shape) == 1]
    if len(counts) != 1:
        raise Refusal("no single number of leading acceptances is found that decides the row", 1)
    (count,) = counts
    tests, (axis, num_drafts) = count.args[0], count.params
    all_accepted = terms.reduce("all", tests, axis)
    every, none = terms.const(True), terms.const(False)

    bonus = terms.rebuilt(token, {count: terms.const(num_drafts), all_accepted: every})
    terms.upper_bounds[count] = num_drafts - 1
    try:
        recovered = terms.rebuilt(token, {all_accepted: none})
        target, draft, draft_rows = _rejected(terms, recovered, count)
    finally:
        del terms.upper_bounds[count]
    _accepted(terms, bonus, target, num_drafts)
    uniforms = {_draw(terms, branch)[1] for branch in (bonus, recovered)}
    if len(uniforms) != 1:
        raise Refusal("the bonus token and the recovered token are drawn with different uniforms", 6)

    accept_uniforms, draft_tokens = _tests(terms, terms.rebuilt(tests, {}), target, draft)
    (sample_uniforms,) = uniforms
    if _mixes_rows(token, {count, all_accepted}):
        raise Refusal("the token of one row depends on how many drafts of another are accepted", 8)
    if any(part.op in SOFT for numbers in (accept_uniforms, sample_uniforms) for part in numbers.cone()):
        raise Refusal("the uniforms are computed from probabilities", 8)
    batch, rows, vocabulary = target.shape
    fits = (
        rows == num_drafts + 1
        and draft.shape[::2] == (batch, vocabulary)
        and draft_tokens.shape == accept_uniforms.shape == (batch, num_drafts)
        and sample_uniforms.shape == (batch,)
    )
    if not fits:
        raise Refusal("the shapes are not those of [B, K+1, V] target and [B, K, V] draft logits", 8)
    return Match(
        token, count, target.args[0], draft.args[0], draft_rows, draft_tokens, accept_uniforms, sample_uniforms
    )


def _mixes_rows(token: Term, known: set[Term]) -> bool:
    """Whether a row of the token depends on another row of these."""
    dependent = set(known)
    # A term is made after its arguments.
    for term in sorted(token.cone(), key=lambda term: term.index):
        if term.op in ATOMS or dependent.isdisjoint(term.args):
            continue
        dependent.add(term)
        if term.op == "broadcast" or (term.op == "view" and term.params[0][:1] != (0,)):
            return True
        if term.op in REDUCTIONS | CUMULATIVE | {"slice", "select", "cat"} and term.params[0] == 0:
            return True
    return False


def _draw(terms: Terms, token: Term) -> tuple[Term, Term]:
    """The weights [B, V] and the uniform number [B] of an inverse CDF."""
    if token.op not in ("argmax", "sum") or len(token.args[0].shape) != 2 or token.params != (1,):
        raise Refusal("the token is not drawn by inverse CDF in both cases, all accepted and one rejected", 2)
    test = token.args[0]
    if not is_boolean(test) or test.op not in ("lt", "le") or all(arg.op != "cumsum" for arg in test.args):
        raise Refusal("the token is not the first whose cumulative weight exceeds a uniform number", 2)
    # argmax wants cdf > s; a sum counts what is cdf <= s.
    cdf, threshold = test.args[::-1] if token.op == "argmax" else test.args
    if cdf.op != "cumsum" or test.op != ("lt" if token.op == "argmax" else "le"):
        raise Refusal(
            "the draw is not the first token with cdf > s: with >=, or searchsorted without right=True, s = 0 gives a "
            "token of weight zero",
            3,
        )
    if cdf.params != (1,):
        raise Refusal("the cumulative sum of the draw is not over the vocabulary", 3)
    base, sources = base_of(threshold)
    if sources != (0, None) or len(base.shape) != 1:
        raise Refusal("the draw does not use one uniform number per row", 3)
    weights = cdf.args[0]
    total = terms.reduce("sum", weights, 1)
    if base.op == "mul" and total in base.args:
        return weights, base.args[0] if base.args[1] is total else base.args[1]
    if not _is_normalised(terms, weights):
        raise Refusal("the weights of the draw are not normalised", 4)
    return weights, base


def _divided(terms: Terms, weights: Term) -> Term | None:
    """w, of w / sum(w), where the sum may have a floor against zero."""
    if weights.op != "div":
        return None
    inner, divisor = weights.args
    base, sources = base_of(divisor)
    if sources != (0, None):
        return None
    if base.op == "maximum" and base.args[1].op == "const" and 0 < base.args[1].params[0] <= LARGEST_FLOOR:
        base = base.args[0]
    return inner if base is terms.reduce("sum", inner, 1) else None


def _guarded(terms: Terms, weights: Term) -> tuple[Term, Term] | None:
    """x and y, of where(sum(w) > 0, x, y) with x proportional to w."""
    if weights.op != "where":
        return None
    condition, inner, other = weights.args
    base, sources = base_of(condition)
    if sources == (0, None) and base.op == "eq":
        base, inner, other = terms.elementwise("lt", (base.args[1], base.args[0]), base.shape), other, inner
    if sources != (0, None) or base.op != "lt" or base.args[0].op != "const" or base.args[0].params[0] != 0:
        return None
    return (inner, other) if base.args[1] is terms.reduce("sum", _core(terms, inner), 1) else None


def _core(terms: Terms, weights: Term) -> Term:
    """The weights before they were normalised or guarded against zero."""
    inner = _divided(terms, weights)
    if inner is not None:
        return _core(terms, inner)
    guarded = _guarded(terms, weights)
    return weights if guarded is None else _core(terms, guarded[0])


def _is_normalised(terms: Terms, weights: Term) -> bool:
    if _divided(terms, weights) is not None:
        return True
    guarded = _guarded(terms, weights)
    if guarded is not None:
        return all(_is_normalised(terms, part) for part in guarded)
    return weights.op in ("select", "pick") and weights.args[0].op == "softmax"


def _fallbacks(terms: Terms, weights: Term) -> list[Term]:
    """What is drawn from where a residual has no mass."""
    inner = _divided(terms, weights)
    if inner is not None:
        return _fallbacks(terms, inner)
    guarded = _guarded(terms, weights)
    return [] if guarded is None else [_core(terms, guarded[1]), *_fallbacks(terms, guarded[0])]


def _softmax_rows(rows: Term, op: str) -> Term:
    """The softmax that rows [B, V] are taken from."""
    if rows.op != op or rows.args[0].op != "softmax":
        raise Refusal("the weights are not rows of a softmax of logits", 5)
    softmax = rows.args[0]
    if len(softmax.shape) != 3 or softmax.params != (2,):
        raise Refusal("a softmax that is not over the vocabulary, or not of [B, rows, V]", 5)
    return softmax


def _rejected(terms: Terms, token: Term, count: Term) -> tuple[Term, Term, Size]:
    """After a rejection: the softmaxes of target and draft, and how many rows the draft's has."""
    weights, _ = _draw(terms, token)
    core = _core(terms, weights)
    if any(term.op == "low_softmax" for term in core.cone()):
        raise Refusal("a softmax below float32", 5)
    if core.op == "sub":
        raise Refusal("the residual is not clamped at zero", 4)
    if core.op != "maximum" or core.args[0].op != "sub" or core.args[1].params != (0,):
        raise Refusal("the weights after a rejection are not a residual max(p - q, 0)", 4)
    rows = core.args[0].args
    if any(row.op != "pick" or row.args[1] is not count for row in rows):
        raise Refusal("the residual is not that of the first rejected row", 5)
    target, draft = (_softmax_rows(row, "pick") for row in rows)
    for fallback in _fallbacks(terms, weights):
        if fallback is not rows[0]:
            raise Refusal("a residual without mass is not replaced by the target's row", 6)
    return target, draft, draft.shape[1]


def _accepted(terms: Terms, token: Term, target: Term, num_drafts: Size) -> None:
    """After K acceptances: a draw from the target's last row, whose mass is 1 whatever it is guarded by."""
    weights, _ = _draw(terms, token)
    core = _core(terms, weights)
    if core.op != "select" or core.params != (1, num_drafts):
        raise Refusal("after K acceptances the token is not drawn from the target's last row", 5)
    last = _softmax_rows(core, "select")
    if last is not target:
        raise Refusal("the bonus token and the residual are not of one target: residual q - p?", 6)


Powers = dict[Term, int]


def _factors(terms: Terms, term: Term, log: bool, sign: int, powers: Powers, ceiling: bool = False) -> None:
    """The term, or with `log` its exponential, as a product of powers. `ceiling`: it may be held to at most 1, which
    changes nothing in u < r, as u < 1."""
    split = {"add": 1, "sub": -1} if log else {"mul": 1, "div": -1}
    one = 0 if log else 1
    if term.op in split:
        _factors(terms, term.args[0], log, sign, powers)
        _factors(terms, term.args[1], log, sign * split[term.op], powers)
    elif term.op == ("log" if log else "exp"):
        _factors(terms, term.args[0], not log, sign, powers, ceiling)
    elif ceiling and term.op == "minimum" and term.args[1].params == (one,):
        _factors(terms, term.args[0], log, sign, powers, ceiling)
    elif term.op == "const" and term.params[0] == one:
        return
    else:
        if log:
            term = _exponential(terms, term)
        powers[term] = powers.get(term, 0) + sign


def _exponential(terms: Terms, term: Term) -> Term:
    """exp of a log-softmax at tokens is the softmax at the tokens."""
    if term.op == "at" and term.args[0].op in ("log_softmax", "slice"):
        rows = term.args[0]
        inner = rows.args[0] if rows.op == "slice" else rows
        if inner.op == "log_softmax":
            soft = terms.softmax("softmax", inner.args[0], inner.params[0])
            return terms.at(terms.slice(soft, *rows.params) if rows.op == "slice" else soft, term.args[1])
    return terms.elementwise("exp", (term,), term.shape)


def _tests(terms: Terms, tests: Term, target: Term, draft: Term) -> tuple[Term, Term]:
    """The uniforms and the draft tokens of u < p(x) / q(x), however it is written."""
    if tests.op == "le":
        raise Refusal("a draft is accepted on <=: at u = 0 also one of target probability zero", 7)
    if tests.op != "lt" or len(tests.shape) != 2:
        raise Refusal("the acceptance is not one comparison u < p / q per draft", 7)
    left, right = tests.args
    for log in (False, True):
        powers: Powers = {}
        _factors(terms, right, log, 1, powers, ceiling=True)
        _factors(terms, left, log, -1, powers)
        found = _uniforms(terms, {term: power for term, power in powers.items() if power}, target, draft)
        if found is not None:
            return found
    raise Refusal("the acceptance is not u < p(x) / q(x) at the draft tokens", 7)


def _uniforms(terms: Terms, powers: Powers, target: Term, draft: Term) -> tuple[Term, Term] | None:
    tokens = {term.args[1] for term in powers if term.op == "at"}
    if len(powers) != 3 or len(tokens) != 1:
        return None
    (x,) = tokens
    p, q = (terms.at(terms.slice(rows, 1, 0, x.shape[1]), x) for rows in (target, draft))
    if powers.get(p) == -1 and powers.get(q) == 1:
        raise Refusal("the acceptance compares with q(x) / p(x)", 7)
    uniforms = [term for term in powers if term not in (p, q)]
    if powers.get(p) != 1 or powers.get(q) != -1 or len(uniforms) != 1 or powers[uniforms[0]] != -1:
        return None
    return uniforms[0], x
