"""Checks of a decoding loop and of an engine: they count tokens and compare the counts with the target's
distribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from .. import reference
from ..checks import check_int, is_number
from ..sampling import SamplingParams
from .markov import MarkovModel
from .report import EngineReport, LosslessReport
from .statistics import Laws, count_texts, fitting_temperature, law_tests

NextToken = Callable[[Tensor], Tensor] | MarkovModel | Tensor
Generated = Tensor | tuple[Tensor, Tensor, Tensor]
GenerateFn = Callable[[list[list[int]], list[SamplingParams], list[int]], Sequence[Sequence[int]] | Tensor]
Progress = Callable[[int, int], None]
Call = Callable[[Tensor], Generated]

MAX_OUTCOMES = 2**20
# The most sequences that an engine's target reads at once.
MAX_TEXTS = 8192
# The fields of `SamplingParams` whose law is known here.
KNOWN = ("temperature", "top_k", "top_p", "min_p")


def check_lossless(
    step_fn: Callable[[Tensor, Tensor], Generated],
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
    progress: Progress | None = None,
) -> LosslessReport:
    """Test whether the tokens that a decoding loop emits have the target's law: the token at each position given the
    tokens before it, and all `num_tokens` tokens jointly, by Pearson's chi-square test.

    docs/testing.md says how to choose the models and how to read the numbers. A row may emit fewer tokens, followed by
    -1: the test of a position uses the rows that have a token there; the joint test uses all rows, completed with draws
    from the target.

    Args:
        step_fn: called as `step_fn(prompts, seeds)` with int64 prompts [N, P] and int64 seeds [N] in [0, 2**62), which
            differ for each trial. All its random numbers must come from the seeds, by row, or for the batch by
            `torch.Generator().manual_seed(int(seeds[0]))`. It returns integer tokens [N, L], L >= `num_tokens`: the
            generated tokens without the prompt, at least 1 per row, then any negative number. To count drafts too, it
            returns `(tokens, num_accepted, num_reached)`, the last two [N]: the drafts accepted, and the drafts
            accepted or rejected, without those after a rejection.
        target: the law to keep: a function from int64 sequences [N, t] to logits [N, V] of the next token (or
            [N, t, V], of which the last is used), such as `lambda ids: model(ids).logits` for a transformers model; a
            `MarkovModel`; or its table of logits, [V, V] or [V + 1, V] for order 1. Apply the loop's temperature and
            filters to these logits; -inf excludes a token.
        draft: the loop's draft, in the same form. It is not tested. With it the report shows the overlap sum min(p, q),
            and the bias that well-known mistakes would cause.
        vocab_size: V >= 2.
        num_tokens: how many generated tokens are tested, >= 1; V ** num_tokens <= 2**20.
        trials: how many sequences are generated, >= 100.
        prompt: [P] token ids in [0, V); may be empty. Prompts and seeds are made on its device.
        batch_size: N of a call of `step_fn`, and the most sequences that `target` and `draft` read at once.
        significance: in (0, 1), the probability that any test rejects a lossless loop.
        seed: in [0, 2**32); the same seed gives the same trials, whatever the batch size.
        progress: called as `progress(done, trials)` after each batch.

    Raises:
        TypeError: an argument, or the result of a function, has another type.
        ValueError: a number or a shape out of range, a token outside [0, V) or after a -1, logits without a law, or a
            `step_fn` that does not use its seeds.

    Examples:
        >>> import torch
        >>> from torch_specops.testing import check_lossless, markov_pair
        >>> target, draft = markov_pair()
        >>> def draft_alone(prompts, seeds):
        ...     generator = torch.Generator().manual_seed(int(seeds[0]))
        ...     return torch.multinomial(torch.softmax(draft(prompts)[:, -1], -1), 1, generator=generator)
        >>> report = check_lossless(draft_alone, target, draft, vocab_size=6, num_tokens=1)
        >>> bool(report), report.first_break
        (False, 0)
    """
    _check_numbers(vocab_size, num_tokens, trials, batch_size, significance, seed)
    start = _read_prompt(prompt, vocab_size)
    p = _conditional_laws(target, "target", start, vocab_size, num_tokens, batch_size)
    q = None if draft is None else _conditional_laws(draft, "draft", start, vocab_size, num_tokens, batch_size)

    def call(seeds: Tensor) -> Generated:
        return step_fn(start.repeat(len(seeds), 1), seeds[:, 0].to(start.device))

    # torch's CPU generator uses only the low 32 bits of its seed, so seeds must differ in those bits.
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**62, (trials, 1), generator=generator, device="cpu")
    repeated = "random numbers that come from its seeds, got the tokens of other seeds"
    tokens, beta = _sample("step_fn", call, p, seeds, batch_size, repeated, progress)
    mistakes = {}
    if q is not None:
        first, kept = p[0][0], torch.minimum(p[0][0], q[0][0])
        laws = {"accepting every draft": q[0][0], "a recovered token from p": kept + (1 - kept.sum()) * first}
        mistakes = {name: float((law - first).abs().sum()) / 2 for name, law in laws.items()}
    counts = count_texts(tokens[:, 0], p, generator)
    report = LosslessReport(law_tests(counts, p, significance, q), trials, significance, mistakes, beta)
    if report.first_break != 0:
        return report
    return replace(report, suspicion=_suspicion(counts[0][0], p[0][0], has_drafts=q is not None or beta is not None))


def _suspicion(counts: Tensor, law: Tensor, *, has_drafts: bool) -> str:
    """A likely cause, as a sentence, if the counts at position 0 break their law [V]; empty if none is known."""
    temperature = fitting_temperature(counts, law)
    if temperature is not None:
        return (
            f"position 0 has the law of the target's logits divided by {temperature:.3g}. Does the loop sample at that "
            "temperature? Then `target` must divide by it too; `filter_logits` filters and does not divide."
        )
    if has_drafts:
        return ""
    return (
        "without a draft, position 0 is one plain draw, so verification is not at fault. Does `target` return the "
        "logits that the loop samples from, filtered and divided by the temperature?"
    )


def check_engine(
    generate: GenerateFn,
    target: NextToken,
    settings: Mapping[str, SamplingParams],
    *,
    vocab_size: int,
    num_tokens: int = 3,
    trials: int = 10_000,
    prompts: Sequence[Sequence[int]] = ((1, 0, 1),),
    batch_size: int = 1000,
    significance: float = 1e-4,
    seed: int = 0,
    progress: Progress | None = None,
    same_text_as: GenerateFn | None = None,
) -> EngineReport:
    """Test whether an engine's tokens have the target's law, as `check_lossless` does, for each of its sampling
    settings. docs/testing.md has recipes.

    An engine is anything that continues prompts: vLLM, a server, your own `generate`. An engine that ignores a setting,
    or reads it from the wrong row of a batch, still writes fluent text. So every call mixes requests of all settings.

    Args:
        generate: called as `generate(prompts, params, seeds)` with lists of equal length: prompts as lists of token
            ids, a `SamplingParams` of numbers for each, and ints in [0, 2**31). It returns the new tokens of each
            request, as lists or as an integer tensor [N, L], in the same order: at least 1, and `num_tokens` unless the
            sequence ended. Further tokens are ignored, and a negative number ends a row. An engine without seeds may
            ignore them, but must not start every call from the same state.
        target: the model as in `check_lossless`, but before temperature and filters.
        settings: name -> parameters: only temperature and filters, each a number. The law follows
            `torch_specops.filter_logits`, whose filters match transformers' and vLLM's; temperature 0 is the
            argmax.
        prompts: token ids in [0, V). The i-th setting continues the i-th prompt; prompts repeat if there are fewer.
        trials: for each setting, >= 100.
        batch_size: trials of each setting in one call.
        progress: called as `progress(done, requests)` after each call.
        same_text_as: for an engine whose tokens should depend only on request and seed, as in this package with
            `verify="gumbel"`: the same engine with another draft, another number of drafts, or none. It gets the
            requests of each call in reverse order, and must return the same tokens.
        vocab_size, num_tokens, significance, seed: as in `check_lossless`; `significance` is shared by all settings.

    Raises:
        TypeError: an argument, or the result of a function, has another type.
        ValueError: a number out of range, no setting or prompt, rows that do not fit the requests, or an engine that
            repeats itself.

    Examples:
        >>> import torch
        >>> from torch_specops import SamplingParams
        >>> from torch_specops.testing import check_engine, markov_pair
        >>> target, _ = markov_pair(order=1)
        >>> def forgets_top_k(prompts, params, seeds):
        ...     logits = target(torch.tensor(prompts))[:, -1]
        ...     temperatures = torch.tensor([[each.temperature] for each in params])
        ...     generator = torch.Generator().manual_seed(seeds[0])
        ...     return torch.multinomial(torch.softmax(logits / temperatures, -1), 1, generator=generator)
        >>> settings = {"hot": SamplingParams(temperature=2.0), "top-k": SamplingParams(top_k=2)}
        >>> check_engine(forgets_top_k, target, settings, vocab_size=6, num_tokens=1).broken
        ['top-k']
    """
    _check_numbers(vocab_size, num_tokens, trials, batch_size, significance, seed)
    _check_settings(settings)
    if same_text_as is not None and not callable(same_text_as):
        raise TypeError(f"same_text_as: expected a function as generate is, or None, got {type(same_text_as)}")
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    starts = [_read_prompt(prompts[i % len(prompts)], vocab_size) for i in range(len(settings))]
    laws = [
        _conditional_laws(target, "target", start, vocab_size, num_tokens, MAX_TEXTS, params)
        for start, params in zip(starts, settings.values(), strict=True)
    ]

    def call(seeds: Tensor) -> Tensor:
        texts = [start.tolist() for _ in seeds for start in starts]
        params, own_seeds = [each for _ in seeds for each in settings.values()], seeds.flatten().tolist()
        rows = _as_rows("generate", generate(texts, params, own_seeds), num_tokens)
        if same_text_as is not None:
            others = _as_rows("same_text_as", same_text_as(texts[::-1], params[::-1], own_seeds[::-1]), num_tokens)
            size = len(own_seeds), num_tokens, vocab_size
            found, other = _read_tokens("generate", rows, *size)[0], _read_tokens("same_text_as", others, *size)[0]
            # Any negative number ends a sequence.
            differs = found.clamp(min=-1) != other.clamp(min=-1).flip(0)
            changed.append(differs.any(-1).view(seeds.shape).sum(0))
        return rows

    changed: list[Tensor] = []
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**31, (trials, len(settings)), generator=generator, device="cpu")
    repeated = "new random numbers in every call, got the tokens of the first call"
    tokens, _ = _sample("generate", call, laws[0], seeds, batch_size, repeated, progress)
    if bool((tokens[..., -1] < 0).all()):
        raise ValueError(f"generate: expected {num_tokens} tokens unless a text ended, got fewer for every request")
    share = significance / len(settings)
    reports = {
        name: LosslessReport(law_tests(count_texts(texts, law, generator), law, share), trials, share, {})
        for name, texts, law in zip(settings, tokens.unbind(1), laws, strict=True)
    }
    counts = dict(zip(settings, torch.stack(changed).sum(0).tolist(), strict=True)) if changed else None
    return EngineReport(reports, significance, counts)


def _as_rows(name: str, rows: Sequence[Sequence[int]] | Tensor, num_tokens: int) -> Tensor:
    """An engine's result as a tensor [N, >= num_tokens], with -1 after the end of each sequence."""
    if not isinstance(rows, Tensor):
        if not isinstance(rows, Sequence):
            raise TypeError(f"{name}: expected lists of tokens, or a tensor of them, got {type(rows)}")
        rows = torch.tensor([[*row, *[-1] * num_tokens][:num_tokens] for row in rows], device="cpu")
    return torch.nn.functional.pad(rows, (0, num_tokens - rows.shape[1]), value=-1) if rows.dim() == 2 else rows


def _sample(
    name: str, call: Call, laws: Laws, seeds: Tensor, batch_size: int, repeated: str, progress: Progress | None
) -> tuple[Tensor, float | None]:
    """[trials, S, T] int64 tokens for seeds [trials, S], negative where none was emitted; and accepted / reached
    drafts. `repeated` ends the message of the error if a call repeats the tokens of the first call."""
    batches: list[Tensor] = []
    num_accepted = num_reached = 0
    for batch in seeds.split(batch_size):
        tokens, accepted, reached = _read_tokens(name, call(batch), batch.numel(), len(laws), laws[0].shape[1])
        tokens = tokens.view(*batch.shape, len(laws))
        # If the rows of a batch hardly differ, the law is nearly certain, and batches may be equal by chance.
        if batches and torch.equal(tokens, batches[0]) and (tokens != tokens[:1]).any(-1).double().mean() > 0.1:
            raise ValueError(f"{name}: expected {repeated}")
        batches.append(tokens)
        num_accepted += accepted
        num_reached += reached
        if progress is not None:
            progress(sum(map(len, batches)) * seeds.shape[1], seeds.numel())
    return torch.cat(batches), num_accepted / num_reached if num_reached else None


def _read_tokens(name: str, result: Generated, size: int, num_tokens: int, vocab_size: int) -> tuple[Tensor, int, int]:
    """Check a result. Returns [N, num_tokens] tokens on the CPU, drafts accepted, drafts reached."""
    tokens, *counts = result if isinstance(result, tuple) else (result,)
    for part, tensor in zip(("tokens", "num_accepted", "num_reached"), (tokens, *counts), strict=False):
        if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_complex():
            kind = getattr(tensor, "dtype", type(tensor))
            raise TypeError(f"{name}: expected {part} as an integer tensor, got {kind}")
    if len(counts) not in (0, 2):
        form = "tokens or (tokens, num_accepted, num_reached)"
        raise ValueError(f"{name}: expected {form}, got a tuple of {len(counts) + 1}")
    if tokens.dim() != 2 or tokens.shape[0] != size or tokens.shape[1] < num_tokens:
        raise ValueError(f"{name}: expected tokens [{size}, >= {num_tokens}], got {list(tokens.shape)}")
    shapes = [list(count.shape) for count in counts]
    if any(shape != [size] for shape in shapes):
        raise ValueError(f"{name}: expected num_accepted and num_reached [{size}], got {shapes}")
    tokens = tokens[:, :num_tokens].long().cpu()
    if int(tokens.max()) >= vocab_size:
        raise ValueError(f"{name}: expected tokens in [0, {vocab_size}), got {int(tokens.max())}")
    wrong = (tokens[:, 0] < 0) | ((tokens[:, 1:] >= 0) & (tokens[:, :-1] < 0)).any(1)
    if wrong.any():
        rule = "at least one token in every row, and negative numbers after the emitted tokens only"
        raise ValueError(f"{name}: expected {rule}, got {tokens[wrong][0].tolist()}")
    accepted, reached = (int(count.sum()) for count in counts) if counts else (0, 0)
    if not 0 <= accepted <= reached:
        raise ValueError(f"{name}: expected 0 <= num_accepted <= num_reached, got {accepted} and {reached} in sum")
    return tokens, accepted, reached


@torch.no_grad()
def _conditional_laws(
    model: NextToken,
    name: str,
    prompt: Tensor,
    vocab_size: int,
    num_tokens: int,
    most: int,
    params: SamplingParams | None = None,
) -> Laws:
    """The laws of `num_tokens` tokens after the prompt, under the sampling parameters if given; the model reads at most
    `most` sequences at once."""
    model = MarkovModel(model) if isinstance(model, Tensor) else model
    read = model.next_logits if isinstance(model, MarkovModel) else model
    laws = []
    for length in range(num_tokens):
        place = vocab_size ** torch.arange(length - 1, -1, -1, device="cpu")
        parts = []
        for chunk in torch.arange(vocab_size**length, device="cpu").split(most):
            texts = chunk.unsqueeze(-1) // place % vocab_size
            prefixes = torch.cat([prompt.expand(len(chunk), -1), texts.to(prompt.device)], 1)
            logits = read(prefixes)
            if not isinstance(logits, Tensor) or not logits.is_floating_point():
                kind = getattr(logits, "dtype", type(logits))
                advice = "(for a transformers model pass `lambda ids: model(ids).logits`)"
                raise TypeError(f"{name}: expected logits, a floating point tensor, got {kind} {advice}")
            logits = logits[:, -1] if logits.dim() == 3 else logits
            if logits.shape != (len(chunk), vocab_size):
                raise ValueError(f"{name}: expected logits [{len(chunk)}, {vocab_size}], got {list(logits.shape)}")
            logits = logits.double().cpu()
            without = logits.isnan().any(-1) | (logits.amax(-1).abs() == torch.inf)
            if without.any():
                text = prefixes[int(without.nonzero()[0])].tolist()
                raise ValueError(f"{name}: expected finite logits, or -inf but not all, got others after {text}")
            parts.append(torch.softmax(logits, -1) if params is None else _sampling_law(logits, params))
        laws.append(torch.cat(parts))
    return laws


def _sampling_law(logits: Tensor, params: SamplingParams) -> Tensor:
    """[N, V] float64, the distribution that these parameters sample from, given logits [N, V]."""
    temperature, *filters = (float(getattr(params, name)) for name in KNOWN)
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return torch.softmax(reference.filter_logits(logits, temperature, *filters) / temperature, -1)


def _check_settings(settings: Mapping[str, SamplingParams]) -> None:
    if not isinstance(settings, Mapping) or not settings:
        raise ValueError(f"settings: expected a name and a SamplingParams at least once, got {settings!r}")
    for name, params in settings.items():
        if not isinstance(params, SamplingParams):
            raise TypeError(f"settings: expected a SamplingParams for {name!r}, got {type(params)}")
        for field in fields(params):
            value = getattr(params, field.name)
            if field.name in KNOWN and not is_number(value):
                raise TypeError(f"settings: expected a number as {field.name} of {name!r}, got {type(value)}")
            if field.name not in KNOWN and (isinstance(value, Tensor) or value != field.default):
                raise ValueError(f"settings: the laws of {', '.join(KNOWN)} are known, got {field.name} in {name!r}")


def _read_prompt(prompt: Sequence[int] | Tensor, vocab_size: int) -> Tensor:
    tokens = prompt if isinstance(prompt, Tensor) else torch.tensor(list(prompt), dtype=torch.int64, device="cpu")
    if tokens.dim() != 1 or tokens.is_floating_point():
        raise ValueError(f"prompt: expected integers [P], got {tokens.dtype} {list(tokens.shape)}")
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(f"prompt: expected tokens in [0, {vocab_size}), got {tokens.tolist()}")
    return tokens.long()


def _check_numbers(
    vocab_size: int, num_tokens: int, trials: int, batch_size: int, significance: float, seed: int
) -> None:
    check_int("vocab_size", vocab_size, 2, MAX_OUTCOMES)
    check_int("num_tokens", num_tokens, 1, 20)
    check_int("trials", trials, 100)
    check_int("batch_size", batch_size, 1)
    check_int("seed", seed, 0, 2**32 - 1)
    if not 0 < significance < 1:
        raise ValueError(f"significance: expected a number in (0, 1), got {significance}")
    if vocab_size**num_tokens > MAX_OUTCOMES:
        numbers = f"vocab_size ** num_tokens <= {MAX_OUTCOMES}, got {vocab_size} ** {num_tokens}"
        advice = "over so many outcomes a test sees nothing: take tiny models of 6 to 16 tokens"
        raise ValueError(f"vocab_size: expected {numbers}; {advice}")
