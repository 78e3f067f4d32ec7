"""Tests whether an engine is lossless at each of its settings, with requests of all settings in the same calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial

import torch
from torch import Tensor

from .. import reference
from ..sampling import SamplingParams
from .check import law_report
from .report import EngineReport
from .texts import NextToken, check_numbers, conditional_laws, read_prompt, read_tokens, repeats

# The most texts that the target reads at once.
MAX_TEXTS = 8192
# The fields of `SamplingParams` whose law is known here.
KNOWN = ("temperature", "top_k", "top_p", "min_p")

Prompts = list[list[int]]
GenerateFn = Callable[[Prompts, list[SamplingParams], list[int]], Sequence[Sequence[int]] | Tensor]


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
    progress: Callable[[int, int], None] | None = None,
) -> EngineReport:
    """Test whether the tokens that an engine returns have the target's law, for each of its sampling settings.

    An engine is anything that continues prompts: vLLM, a server, your own `generate`. It serves requests of different
    settings in the same batch, and if it reads a setting from the wrong row, or forgets it, the text is still fluent.
    So every call has requests of all settings, in turn. The texts of each setting are tested as `check_law` tests those
    of a loop: each token given those before it, and all tokens jointly. docs/testing.md has recipes.

    Args:
        generate: called as `generate(prompts, params, seeds)` with lists of equal length: prompts as lists of token
            ids, a `SamplingParams` of numbers for each, and ints in [0, 2**31). It returns the new tokens of each
            request, as lists or as an integer tensor [N, L], in the same order: at least one, and `num_tokens` unless
            the text ended. More are ignored, and a negative number ends a row. An engine without seeds may ignore them,
            but must not start every call from the same state.
        target: the model whose law is kept, before temperature and filters: a function from int64 texts [N, t] to
            logits [N, V] of the next token (or [N, t, V]), such as `lambda ids: model(ids).logits` for a transformers
            model; a `MarkovModel`, or its table.
        settings: name -> parameters: only temperature and filters, each one number. The law is that of
            `torch_specops.filter_logits`, whose filters are those of transformers and of vLLM; temperature 0 is the
            argmax.
        vocab_size: V >= 2.
        num_tokens: how many new tokens are tested, >= 1; V ** num_tokens <= 2**20.
        trials: for each setting, >= 100.
        prompts: token ids in [0, V). The first setting continues the first prompt, the next one the next, and so on
            from the beginning.
        batch_size: trials of each setting in one call.
        significance: in (0, 1), probability that a lossless engine is rejected, over all settings together.
        seed: in [0, 2**32); the same seed gives the same requests.
        progress: called as `progress(done, requests)` after each call.

    Returns:
        An `EngineReport`: which settings break, and how small a bias would have been detected in each.

    Raises:
        TypeError: an argument, or the result of a function, has another type.
        ValueError: a number out of range, no setting or prompt, rows that do not fit the requests, or an engine that
            repeats itself.

    Example:
        >>> import torch
        >>> from torch_specops import SamplingParams
        >>> from torch_specops.laws import check_engine, markov_pair
        >>> target, _ = markov_pair(order=1)
        >>> def forgets_top_k(prompts, params, seeds):
        ...     logits = target(torch.tensor(prompts))[:, -1]
        ...     temperatures = torch.tensor([each.temperature for each in params])
        ...     weights = torch.softmax(logits / temperatures.unsqueeze(-1), -1)
        ...     return torch.multinomial(weights, 1, generator=torch.Generator().manual_seed(seeds[0]))
        >>> settings = {"hot": SamplingParams(temperature=2.0), "top-k": SamplingParams(top_k=2)}
        >>> check_engine(forgets_top_k, target, settings, vocab_size=6, num_tokens=1).broken
        ['top-k']
    """
    check_numbers(vocab_size, num_tokens, trials, batch_size, significance, seed)
    _check_settings(settings)
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    starts = [read_prompt(prompts[i % len(prompts)], vocab_size) for i in range(len(settings))]
    laws = [
        conditional_laws(
            target, "target", start, vocab_size, num_tokens, MAX_TEXTS, partial(sampling_law, params=params)
        )
        for start, params in zip(starts, settings.values(), strict=True)
    ]
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**31, (trials, len(settings)), generator=generator)
    texts = [start.tolist() for start in starts]
    batches: list[Tensor] = []
    for batch in seeds.split(batch_size):
        rows = generate(
            [list(text) for _ in batch for text in texts],
            [params for _ in batch for params in settings.values()],
            batch.flatten().tolist(),
        )
        tokens, _, _ = read_tokens(_as_tensor(rows, num_tokens), batch.numel(), num_tokens, vocab_size, "generate")
        # [trials of the batch, settings, T]
        tokens = tokens.view(*batch.shape, num_tokens)
        if repeats(tokens, batches):
            raise ValueError("generate: expected new random numbers in every call, got the tokens of the first call")
        batches.append(tokens)
        if progress is not None:
            progress(sum(map(len, batches)) * len(settings), seeds.numel())
    every = torch.cat(batches)
    if bool((every[..., -1] < 0).all()):
        raise ValueError(f"generate: expected {num_tokens} tokens unless a text ended, got fewer for every request")
    reports = {
        name: law_report(tokens, law, generator, significance / len(settings))
        for name, tokens, law in zip(settings, every.unbind(1), laws, strict=True)
    }
    return EngineReport(reports, significance)


def sampling_law(logits: Tensor, params: SamplingParams) -> Tensor:
    """[N, V] float64, the distribution that these parameters sample from, given logits [N, V]."""
    temperature, top_k, top_p, min_p = (float(getattr(params, name)) for name in KNOWN)
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    kept = reference.filter_logits(logits.double(), temperature, top_k, top_p, min_p)
    return torch.softmax(kept / temperature, -1)


def _as_tensor(rows: Sequence[Sequence[int]] | Tensor, num_tokens: int) -> Tensor:
    """Rows of tokens of any lengths as [N, >= num_tokens], -1 after the end of a row."""
    if isinstance(rows, Tensor):
        missing = num_tokens - rows.shape[1] if rows.dim() == 2 else 0
        return torch.nn.functional.pad(rows, (0, max(missing, 0)), value=-1)
    lists = [list(row) for row in rows]
    width = max([num_tokens, *map(len, lists)])
    return torch.tensor([row + [-1] * (width - len(row)) for row in lists])


def _check_settings(settings: Mapping[str, SamplingParams]) -> None:
    if not isinstance(settings, Mapping) or not settings:
        raise ValueError(f"settings: expected a name and a SamplingParams at least once, got {settings!r}")
    for name, params in settings.items():
        if not isinstance(params, SamplingParams):
            raise TypeError(f"settings: expected a SamplingParams for {name!r}, got {type(params)}")
        for field in fields(params):
            value = getattr(params, field.name)
            if field.name in KNOWN and not isinstance(value, (int, float)):
                raise TypeError(f"settings: expected a number as {field.name} of {name!r}, got {type(value)}")
            if field.name not in KNOWN and (isinstance(value, Tensor) or value != field.default):
                raise ValueError(f"settings: the laws of {', '.join(KNOWN)} are known, got {field.name} in {name!r}")
