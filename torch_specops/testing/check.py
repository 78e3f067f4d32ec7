"""Test a decoding loop or an engine: count the tokens that it emits, and compare the counts with the target's
distribution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from .. import reference
from ..checks import check_int, is_number
from ..progress import progress_bar
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
# In `check_engine`, the target reads at most this many sequences at once.
MAX_TEXTS = 8192
# The fields of `SamplingParams` that `_sampling_law` can apply.
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
    progress: Progress | bool | None = None,
) -> LosslessReport:
    """Test whether the tokens that a decoding loop emits have the target's distribution. Pearson's chi-square test is
    applied to the token at each position, given the tokens before it, and to all `num_tokens` tokens jointly.

    docs/testing.md says how to choose the models and how to read the numbers. A row may emit fewer tokens, followed by
    -1. The test of a position uses only rows that have a token there. The joint test uses all rows; missing tokens are
    drawn from the target.

    Args:
        step_fn: called as `step_fn(prompts, seeds)` with int64 prompts [N, P] and int64 seeds [N] in [0, 2**62), which
            differ for each trial. All its random numbers must come from the seeds: each row's from its seed, or all
            numbers of the batch from `torch.Generator().manual_seed(int(seeds[0]))`. `step_fn` returns integer tokens
            [N, L], L >= `num_tokens`: the generated tokens without the prompt, at least 1 per row, then any negative
            number. To count drafts too, it returns `(tokens, num_accepted, num_reached)`. num_accepted [N] counts
            accepted drafts, and num_reached [N] counts accepted and rejected drafts, without the drafts after a
            rejection.
        target: the model that defines the distribution to test against. It is a function from int64 sequences [N, t] to
            logits [N, V] of the next token (or [N, t, V], of which the last is used), such as `lambda ids:
            model(ids).logits` for a transformers model; a `MarkovModel`; or its table of logits, [V, V] or [V + 1, V]
            for order 1. Apply the loop's temperature and filters to these logits; -inf excludes a token.
        draft: the draft of the loop, in one of the same forms. It is not tested. If it is given, the report shows the
            overlap sum min(p, q), and the bias that well-known mistakes would cause.
        vocab_size: V >= 2.
        num_tokens: how many generated tokens are tested, >= 1; V ** num_tokens <= 2**20.
        trials: how many sequences are generated, >= 100.
        prompt: [P] token ids in [0, V); may be empty. Prompts and seeds are created on its device.
        batch_size: the number N of sequences in a call of `step_fn`. `target` and `draft` read at most this many
            sequences at once.
        significance: in (0, 1), an upper bound of the probability that any test rejects a lossless loop.
        seed: in [0, 2**32); the same seed gives the same trials, whatever the batch size.
        progress: called as `progress(done, trials)` after each batch; True shows a progress bar (tqdm).

    Raises:
        TypeError: an argument or the result of a function has the wrong type.
        ValueError: a number or a shape is out of range, a token is outside [0, V) or comes after a -1, a row of logits
            has no distribution, or `step_fn` does not use its seeds.

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

    # Seeds must differ in their low 32 bits, as random numbers do, because torch's CPU generator uses only these bits.
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
    """A sentence about the likely cause, if the counts at position 0 do not fit their distribution `law` [V]; empty if
    no cause is known."""
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
    progress: Progress | bool | None = None,
    same_text_as: GenerateFn | None = None,
) -> EngineReport:
    """Test whether an engine's tokens have the target's distribution, as `check_lossless` does, at each of several
    sampling settings. docs/testing.md has recipes.

    An engine is anything that continues prompts: vLLM, a server, or a `generate` function. An engine that ignores a
    setting, or reads it from the wrong row of a batch, still writes fluent text. Every call therefore mixes requests of
    all settings.

    Args:
        generate: called as `generate(prompts, params, seeds)` with lists of equal length: prompts as lists of token
            ids, a `SamplingParams` of numbers for each prompt, and seeds in [0, 2**31). It returns the new tokens of
            each request in the same order, as lists or as an integer tensor [N, L]. A request must have at least 1
            token, and `num_tokens` tokens unless its sequence ended. Further tokens are ignored, and a negative number
            ends a row. An engine without seeds may ignore them, but must not start every call from the same random
            state.
        target: the model, as in `check_lossless`, but its logits must be those before temperature and filters.
        settings: name -> sampling parameters. Only temperature and filters may be set, each to a number. The filters
            are defined as in `torch_specops.filter_logits`, which matches transformers and vLLM; temperature 0 is the
            argmax.
        prompts: lists of token ids in [0, V). The i-th setting continues the i-th prompt. If there are fewer prompts
            than settings, prompts are repeated.
        trials: the number of sequences for each setting, >= 100.
        batch_size: the number of trials of each setting in one call.
        progress: called as `progress(done, requests)` after each call; True shows a progress bar (tqdm).
        same_text_as: the same engine with another draft, another number of drafts, or no draft. Use it for an engine
            whose tokens should depend only on request and seed, as in this package with `verify="gumbel"`. This
            second engine gets the requests of each call in reverse order, and must return the same tokens.
        vocab_size, num_tokens, significance, seed: as in `check_lossless`. `significance` holds for all settings
            together.

    Raises:
        TypeError: an argument or the result of a function has the wrong type.
        ValueError: a number is out of range, there is no setting or no prompt, the returned rows do not fit the
            requests, or a call of the engine repeats the tokens of the first call.

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
            # Compare negative numbers as equal, because any of them ends a sequence.
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
    """Convert the result of an engine to a tensor [N, >= num_tokens], with -1 after the end of each sequence."""
    if not isinstance(rows, Tensor):
        if not isinstance(rows, Sequence):
            raise TypeError(f"{name}: expected lists of tokens, or a tensor of them, got {type(rows)}")
        rows = torch.tensor([[*row, *[-1] * num_tokens][:num_tokens] for row in rows], device="cpu")
    return torch.nn.functional.pad(rows, (0, num_tokens - rows.shape[1]), value=-1) if rows.dim() == 2 else rows


def _sample(
    name: str, call: Call, laws: Laws, seeds: Tensor, batch_size: int, repeated: str, progress: Progress | bool | None
) -> tuple[Tensor, float | None]:
    """Call the loop or engine for all seeds [trials, S]. Returns the tokens [trials, S, T] int64, negative where none
    was emitted, and the number of accepted drafts divided by reached drafts. If a call repeats the tokens of the first
    call, an error is raised, and `repeated` is the end of its message."""
    batches: list[Tensor] = []
    num_accepted = num_reached = 0
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"progress: expected a function, a bool or None, got {type(progress)}")
    with progress_bar(progress is True, seeds.numel(), " trials") as bar:
        for batch in seeds.split(batch_size):
            tokens, accepted, reached = _read_tokens(name, call(batch), batch.numel(), len(laws), laws[0].shape[1])
            tokens = tokens.view(*batch.shape, len(laws))
            # Raise only if the rows of a batch differ enough. If they hardly differ, one outcome is nearly certain, and
            # two batches may be equal by chance.
            if batches and torch.equal(tokens, batches[0]) and (tokens != tokens[:1]).any(-1).double().mean() > 0.1:
                raise ValueError(f"{name}: expected {repeated}")
            batches.append(tokens)
            num_accepted += accepted
            num_reached += reached
            if bar is not None:
                bar.update(batch.numel())
            elif callable(progress):
                progress(sum(map(len, batches)) * seeds.shape[1], seeds.numel())
    return torch.cat(batches), num_accepted / num_reached if num_reached else None


def _read_tokens(name: str, result: Generated, size: int, num_tokens: int, vocab_size: int) -> tuple[Tensor, int, int]:
    """Check a result. Returns the tokens [N, num_tokens] on the CPU, and the numbers of accepted and of reached
    drafts."""
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
    """The distributions of `num_tokens` tokens after the prompt, with the sampling parameters applied if they are
    given. The model reads at most `most` sequences at once."""
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
    """[N, V] float64, the distribution that an engine with these parameters samples from, given logits [N, V]."""
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
