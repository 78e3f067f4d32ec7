"""Whether a decoding loop is lossless: its tokens are counted and compared with the target's law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .judgement import judge
from .markov import MarkovModel
from .report import LawReport

NextToken = Callable[[Tensor], Tensor] | MarkovModel | Tensor
Generated = Tensor | tuple[Tensor, Tensor, Tensor]
StepFn = Callable[[Tensor, Tensor], Generated]

MAX_OUTCOMES = 2**20


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
    says at which position the law breaks first, how far the loop is off, and which bias would have been seen.

    docs/testing.md says what to run it on (tiny vocabularies, models that differ, several steps) and what the numbers
    mean. A row may emit fewer than `num_tokens` tokens, followed by -1. The test of a position takes the rows that
    emitted it; the joint test takes all rows, completed by draws from the target.

    Args:
        step_fn: called as `step_fn(prompts, seeds)` with int64 prompts [N, P] and int64 seeds [N] in [0, 2**62), which
            differ for each trial. All its random numbers must come from the seeds, by row, or for the batch by
            `torch.Generator().manual_seed(int(seeds[0]))`. It returns integer tokens [N, L], L >= `num_tokens`: the
            generated ones without the prompt, at least one per row, then any negative number. To have drafts counted it
            returns `(tokens, num_accepted, num_reached)`, the last two [N]: drafts accepted, and drafts accepted or
            rejected, which leaves out those after a rejection.
        target: the law to keep: a function from int64 texts [N, t] to logits [N, V] of the next token (or [N, t, V], of
            which the last is read), for a transformers model `lambda ids: model(ids).logits`; a `MarkovModel`; or its
            table of logits, [V, V] or [V + 1, V] for order one. Apply the loop's temperature and filters to these
            logits; -inf excludes a token.
        draft: the loop's draft, in the same form. It is not tested: the report shows the overlap sum min(p, q), and how
            large a bias well-known mistakes would give.
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
        TypeError: an argument, or what a function returns, has another type.
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
    _check_numbers(vocab_size, num_tokens, trials, batch_size, significance, seed)
    start = _prompt(prompt, vocab_size)
    p = _conditional_laws(target, "target", start, vocab_size, num_tokens, batch_size)
    q = None if draft is None else _conditional_laws(draft, "draft", start, vocab_size, num_tokens, batch_size)
    # torch's CPU generator knows the low 32 bits of its seed alone: seeds that count up in the high ones would repeat.
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**62, (trials,), generator=generator)
    tokens, accepted, reached = _sample(step_fn, start, vocab_size, num_tokens, seeds, batch_size, progress)
    uniforms = torch.rand(trials, num_tokens, generator=generator, dtype=torch.float64)
    counts, joint_counts = _count(tokens, p, uniforms)
    tests = judge(counts, joint_counts, p, significance)
    overlaps = [None] * num_tokens if q is None else _overlaps(p, q)
    positions = [
        replace(test, emitted=int(count.sum()) / trials, overlap=overlap)
        for test, count, overlap in zip(tests[:-1], counts, overlaps, strict=True)
    ]
    return LawReport(
        (*positions, tests[-1]),
        trials,
        significance,
        {} if q is None else _mistakes(p[0][0], q[0][0]),
        accepted / reached if reached else None,
    )


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
        tokens, accepted, reached = _read(generated, len(batch), num_tokens, vocab_size)
        # A loop on a law almost without chance may repeat itself; one whose rows differ does not.
        if batches and torch.equal(tokens, batches[0]) and (tokens != tokens[:1]).any(1).double().mean() > 0.1:
            raise ValueError("step_fn: expected random numbers that come from its seeds, got the tokens of other seeds")
        batches.append(tokens)
        num_accepted += accepted
        num_reached += reached
        if progress is not None:
            progress(sum(len(tokens) for tokens in batches), len(seeds))
    return torch.cat(batches), num_accepted, num_reached


def _count(tokens: Tensor, laws: list[Tensor], uniforms: Tensor) -> tuple[list[Tensor], Tensor]:
    """For each position t, [V ** t, V] the tokens emitted there by the text before them; [V ** T] the texts, whose
    missing tokens are drawn from the target. A text y_0 y_1 .. has the index of that number in base V."""
    index = torch.zeros(len(tokens), dtype=torch.int64)
    counts = []
    for token, law, numbers in zip(tokens.unbind(1), laws, uniforms.unbind(1), strict=True):
        missing = token < 0
        cumulative = law[index[missing]].cumsum(-1)
        drawn = (cumulative <= numbers[missing].unsqueeze(-1) * cumulative[:, -1:]).sum(-1)
        index = index * law.shape[1] + token.masked_scatter(missing, drawn)
        counts.append(torch.bincount(index[~missing], minlength=law.numel()).view_as(law))
    return counts, torch.bincount(index, minlength=laws[-1].numel())


def _read(generated: Generated, size: int, num_tokens: int, vocab_size: int) -> tuple[Tensor, int, int]:
    """[N, num_tokens] int64 on the CPU with -1 where nothing was emitted, drafts accepted, drafts reached."""
    tokens, *counts = generated if isinstance(generated, tuple) else (generated,)
    for name, tensor in zip(("tokens", "num_accepted", "num_reached"), (tokens, *counts), strict=False):
        if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_complex():
            raise TypeError(
                f"step_fn: expected {name} as an integer tensor, got {getattr(tensor, 'dtype', type(tensor))}"
            )
    if len(counts) not in (0, 2):
        raise ValueError(
            f"step_fn: expected tokens or (tokens, num_accepted, num_reached), got a tuple of {len(counts) + 1}"
        )
    if tokens.dim() != 2 or tokens.shape[0] != size or tokens.shape[1] < num_tokens:
        raise ValueError(f"step_fn: expected tokens [{size}, >= {num_tokens}], got {list(tokens.shape)}")
    if any(count.shape != (size,) for count in counts):
        raise ValueError(
            f"step_fn: expected num_accepted and num_reached [{size}], got {[list(count.shape) for count in counts]}"
        )
    tokens = tokens[:, :num_tokens].long().cpu()
    emitted = tokens >= 0
    if int(tokens.max()) >= vocab_size:
        raise ValueError(f"step_fn: expected tokens in [0, {vocab_size}), got {int(tokens.max())}")
    wrong = ~emitted[:, 0] | (emitted[:, 1:] & ~emitted[:, :-1]).any(1)
    if wrong.any():
        raise ValueError(
            "step_fn: expected at least one token in every row, and negative numbers after the emitted tokens only, "
            f"got {tokens[wrong][0].tolist()}"
        )
    accepted, reached = (int(count.sum()) for count in counts) if counts else (0, 0)
    if not 0 <= accepted <= reached:
        raise ValueError(f"step_fn: expected 0 <= num_accepted <= num_reached, got {accepted} and {reached} in sum")
    return tokens, accepted, reached


@torch.no_grad()
def _conditional_laws(
    model: NextToken, name: str, prompt: Tensor, vocab_size: int, num_tokens: int, batch_size: int
) -> list[Tensor]:
    """For each position t the laws [V ** t, V] of the next token after each text of t tokens, float64."""
    model = MarkovModel(model) if isinstance(model, Tensor) else model
    read = model.next_logits if isinstance(model, MarkovModel) else model
    laws = []
    for length in range(num_tokens):
        parts = []
        for chunk in torch.arange(vocab_size**length).split(batch_size):
            place = vocab_size ** torch.arange(length - 1, -1, -1)
            texts = chunk.unsqueeze(-1) // place % vocab_size
            prefixes = torch.cat([prompt.expand(len(chunk), -1), texts.to(prompt.device)], 1)
            logits = read(prefixes)
            if not isinstance(logits, Tensor) or not logits.is_floating_point():
                raise TypeError(
                    f"{name}: expected logits, a floating point tensor, got {getattr(logits, 'dtype', type(logits))} "
                    "(for a transformers model pass `lambda ids: model(ids).logits`)"
                )
            logits = logits[:, -1] if logits.dim() == 3 else logits
            if logits.shape != (len(chunk), vocab_size):
                raise ValueError(f"{name}: expected logits [{len(chunk)}, {vocab_size}], got {list(logits.shape)}")
            logits = logits.double().cpu()
            without = logits.isnan().any(-1) | (logits.amax(-1).abs() == torch.inf)
            if without.any():
                text = prefixes[int(without.nonzero()[0])].tolist()
                raise ValueError(f"{name}: expected finite logits, or -inf but not all, got others after {text}")
            parts.append(torch.softmax(logits, -1))
        laws.append(torch.cat(parts))
    return laws


def _overlaps(p: list[Tensor], q: list[Tensor]) -> list[float]:
    """For each position sum min(p, q), averaged over the target's texts before it."""
    before = torch.ones(1, dtype=torch.float64)
    overlaps = []
    for target, draft in zip(p, q, strict=True):
        overlaps.append(float((before * torch.minimum(target, draft).sum(-1)).sum()))
        before = (before.unsqueeze(-1) * target).flatten()
    return overlaps


def _mistakes(p: Tensor, q: Tensor) -> dict[str, float]:
    """Total variation of p [V] from what two mistakes make of it."""
    kept = torch.minimum(p, q)
    return {
        "accepting every draft": float((q - p).abs().sum()) / 2,
        "a recovered token from p": float((kept + (1 - kept.sum()) * p - p).abs().sum()) / 2,
    }


def _prompt(prompt: Sequence[int] | Tensor, vocab_size: int) -> Tensor:
    tokens = prompt if isinstance(prompt, Tensor) else torch.tensor(list(prompt), dtype=torch.int64)
    if tokens.dim() != 1 or tokens.is_floating_point():
        raise ValueError(f"prompt: expected integers [P], got {tokens.dtype} {list(tokens.shape)}")
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(f"prompt: expected tokens in [0, {vocab_size}), got {tokens.tolist()}")
    return tokens.long()


def _check_numbers(
    vocab_size: int, num_tokens: int, trials: int, batch_size: int, significance: float, seed: int
) -> None:
    for name, value, low, high in (
        ("vocab_size", vocab_size, 2, MAX_OUTCOMES),
        ("num_tokens", num_tokens, 1, 20),
        ("trials", trials, 100, 2**62),
        ("batch_size", batch_size, 1, 2**62),
        ("seed", seed, 0, 2**32 - 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int, got {type(value)}")
        if not low <= value <= high:
            raise ValueError(f"{name}: expected a number in [{low}, {high}], got {value}")
    if not 0 < significance < 1:
        raise ValueError(f"significance: expected a number in (0, 1), got {significance}")
    if vocab_size**num_tokens > MAX_OUTCOMES:
        raise ValueError(
            f"vocab_size: expected vocab_size ** num_tokens <= {MAX_OUTCOMES}, got {vocab_size} ** {num_tokens}; over "
            "so many outcomes a test sees nothing: take tiny models of 6 to 16 tokens"
        )
