"""Tests whether a decoding loop is lossless: its tokens are counted and compared with the target's law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .pearson import law_tests
from .report import LawReport
from .texts import Generated, NextToken, check_numbers, conditional_laws, count_texts, read_prompt, read_tokens, repeats

StepFn = Callable[[Tensor, Tensor], Generated]


def check_law(
    step_fn: StepFn,
    target: NextToken,
    draft: NextToken | None = None,
    *,
    vocab_size: int,
    num_tokens: int = 3,
    trials: int = 40_000,
    prompt: Sequence[int] | Tensor = (1, 0, 1),
    batch_size: int = 8192,
    significance: float = 1e-4,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> LawReport:
    """Test whether the tokens that a decoding loop emits have the target's law.

    The loop continues one prompt `trials` times. At each position the tokens are compared with the target's law given
    the tokens before them, and all `num_tokens` tokens with their joint law, by Pearson's chi-square test. The report
    says at which position the law breaks first, how far the loop is off, and which bias would have been detected.

    docs/testing.md says what to run it on (tiny vocabularies, models that differ, several steps) and what the numbers
    mean. A row may emit fewer than `num_tokens` tokens, followed by -1. The test of a position uses the rows that
    emitted it; the joint test uses all rows, completed by draws from the target.

    Args:
        step_fn: called as `step_fn(prompts, seeds)` with int64 prompts [N, P] and int64 seeds [N] in [0, 2**62), which
            differ for each trial. All its random numbers must come from the seeds, by row, or for the batch by
            `torch.Generator().manual_seed(int(seeds[0]))`. It returns integer tokens [N, L], L >= `num_tokens`: the
            generated tokens without the prompt, at least one per row, then any negative number. To have drafts counted,
            it returns `(tokens, num_accepted, num_reached)`, the last two [N]: drafts accepted, and drafts accepted or
            rejected, which excludes those after a rejection.
        target: the law to keep: a function from int64 texts [N, t] to logits [N, V] of the next token (or [N, t, V], of
            which the last is used), such as `lambda ids: model(ids).logits` for a transformers model; a `MarkovModel`;
            or its table of logits, [V, V] or [V + 1, V] for order one. Apply the loop's temperature and filters to
            these logits; -inf excludes a token.
        draft: the loop's draft, in the same form. It is not tested. With it the report shows the overlap sum min(p, q),
            and how large a bias well-known mistakes would cause.
        vocab_size: V >= 2.
        num_tokens: how many generated tokens are tested, >= 1; V ** num_tokens <= 2**20.
        trials: >= 100.
        prompt: [P] token ids in [0, V); may be empty. Prompts and seeds are made on its device.
        batch_size: N of a call of `step_fn`, and the most texts that `target` and `draft` read at once.
        significance: in (0, 1), probability that a lossless loop is rejected, over all tests together.
        seed: in [0, 2**32); the same seed gives the same trials, whatever the batch size.
        progress: called as `progress(done, trials)` after each batch.

    Returns:
        A `LawReport`.

    Raises:
        TypeError: an argument, or the result of a function, has another type.
        ValueError: a number or a shape out of range, a token outside [0, V) or after a -1, logits without a law, or a
            `step_fn` that does not use its seeds.

    Example:
        >>> import torch
        >>> from torch_specops.laws import check_law, markov_pair
        >>> target, draft = markov_pair()
        >>> def draft_alone(prompts, seeds):
        ...     generator = torch.Generator().manual_seed(int(seeds[0]))
        ...     p = torch.softmax(draft(prompts)[:, -1], -1)
        ...     return torch.multinomial(p, 1, generator=generator)
        >>> report = check_law(draft_alone, target, draft, vocab_size=6, num_tokens=1)
        >>> bool(report), report.first_break
        (False, 0)
    """
    check_numbers(vocab_size, num_tokens, trials, batch_size, significance, seed)
    start = read_prompt(prompt, vocab_size)
    p = conditional_laws(target, "target", start, vocab_size, num_tokens, batch_size)
    q = None if draft is None else conditional_laws(draft, "draft", start, vocab_size, num_tokens, batch_size)
    # torch's CPU generator uses only the low 32 bits of its seed, so seeds must differ in these.
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**62, (trials,), generator=generator)
    tokens, accepted, reached = _sample(step_fn, start, vocab_size, num_tokens, seeds, batch_size, progress)
    return law_report(tokens, p, generator, significance, q, accepted / reached if reached else None)


def law_report(
    tokens: Tensor,
    p: list[Tensor],
    generator: torch.Generator,
    significance: float,
    q: list[Tensor] | None = None,
    beta: float | None = None,
) -> LawReport:
    """The report on texts [N, T]; p and q are `conditional_laws`. Missing tokens are drawn with the generator."""
    trials, num_tokens = tokens.shape
    uniforms = torch.rand(trials, num_tokens, generator=generator, dtype=torch.float64)
    counts, joint_counts = count_texts(tokens, p, uniforms)
    tests = law_tests(counts, joint_counts, p, significance)
    overlaps = [None] * num_tokens if q is None else _overlaps(p, q)
    positions = [
        replace(test, emitted=int(count.sum()) / trials, overlap=overlap)
        for test, count, overlap in zip(tests[:-1], counts, overlaps, strict=True)
    ]
    mistakes = {} if q is None else _mistakes(p[0][0], q[0][0])
    return LawReport((*positions, tests[-1]), trials, significance, mistakes, beta)


def _sample(
    step_fn: StepFn,
    prompt: Tensor,
    vocab_size: int,
    num_tokens: int,
    seeds: Tensor,
    batch_size: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[Tensor, int, int]:
    """The tokens that the loop emits for seeds [N], as [N, T]; drafts accepted, and drafts reached."""
    batches: list[Tensor] = []
    num_accepted = num_reached = 0
    for batch in seeds.split(batch_size):
        generated = step_fn(prompt.repeat(len(batch), 1), batch.to(prompt.device))
        tokens, accepted, reached = read_tokens(generated, len(batch), num_tokens, vocab_size)
        if repeats(tokens, batches):
            raise ValueError("step_fn: expected random numbers that come from its seeds, got the tokens of other seeds")
        batches.append(tokens)
        num_accepted += accepted
        num_reached += reached
        if progress is not None:
            progress(sum(len(tokens) for tokens in batches), len(seeds))
    return torch.cat(batches), num_accepted, num_reached


def _overlaps(p: list[Tensor], q: list[Tensor]) -> list[float]:
    """For each position, sum min(p, q) averaged over the target's texts before it."""
    before = torch.ones(1, dtype=torch.float64)
    overlaps = []
    for target, draft in zip(p, q, strict=True):
        overlaps.append(float((before * torch.minimum(target, draft).sum(-1)).sum()))
        before = (before.unsqueeze(-1) * target).flatten()
    return overlaps


def _mistakes(p: Tensor, q: Tensor) -> dict[str, float]:
    """The total variation from p [V] that each of two mistakes causes."""
    kept = torch.minimum(p, q)
    return {
        "accepting every draft": float((q - p).abs().sum()) / 2,
        "a recovered token from p": float((kept + (1 - kept.sum()) * p - p).abs().sum()) / 2,
    }
