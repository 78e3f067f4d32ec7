"""The texts of a check: the target's law over them, those that a loop returned, and their counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .markov import MarkovModel

NextToken = Callable[[Tensor], Tensor] | MarkovModel | Tensor
Generated = Tensor | tuple[Tensor, Tensor, Tensor]

MAX_OUTCOMES = 2**20


@torch.no_grad()
def conditional_laws(
    model: NextToken,
    name: str,
    prompt: Tensor,
    vocab_size: int,
    num_tokens: int,
    batch_size: int,
    law: Callable[[Tensor], Tensor] = lambda logits: torch.softmax(logits, -1),
) -> list[Tensor]:
    """For each position t, the laws [V ** t, V] float64 of the next token after each text of t tokens; `law` computes
    them from the model's logits [N, V] float64."""
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
            parts.append(law(logits))
        laws.append(torch.cat(parts))
    return laws


def read_tokens(
    generated: Generated, size: int, num_tokens: int, vocab_size: int, name: str = "step_fn"
) -> tuple[Tensor, int, int]:
    """[N, num_tokens] int64 on the CPU with -1 where nothing was emitted, drafts accepted, drafts reached."""
    tokens, *counts = generated if isinstance(generated, tuple) else (generated,)
    for what, tensor in zip(("tokens", "num_accepted", "num_reached"), (tokens, *counts), strict=False):
        if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.is_complex():
            raise TypeError(
                f"{name}: expected {what} as an integer tensor, got {getattr(tensor, 'dtype', type(tensor))}"
            )
    if len(counts) not in (0, 2):
        raise ValueError(
            f"{name}: expected tokens or (tokens, num_accepted, num_reached), got a tuple of {len(counts) + 1}"
        )
    if tokens.dim() != 2 or tokens.shape[0] != size or tokens.shape[1] < num_tokens:
        raise ValueError(f"{name}: expected tokens [{size}, >= {num_tokens}], got {list(tokens.shape)}")
    if any(count.shape != (size,) for count in counts):
        raise ValueError(
            f"{name}: expected num_accepted and num_reached [{size}], got {[list(count.shape) for count in counts]}"
        )
    tokens = tokens[:, :num_tokens].long().cpu()
    emitted = tokens >= 0
    if int(tokens.max()) >= vocab_size:
        raise ValueError(f"{name}: expected tokens in [0, {vocab_size}), got {int(tokens.max())}")
    wrong = ~emitted[:, 0] | (emitted[:, 1:] & ~emitted[:, :-1]).any(1)
    if wrong.any():
        raise ValueError(
            f"{name}: expected at least one token in every row, and negative numbers after the emitted tokens only, "
            f"got {tokens[wrong][0].tolist()}"
        )
    accepted, reached = (int(count.sum()) for count in counts) if counts else (0, 0)
    if not 0 <= accepted <= reached:
        raise ValueError(f"{name}: expected 0 <= num_accepted <= num_reached, got {accepted} and {reached} in sum")
    return tokens, accepted, reached


def repeats(tokens: Tensor, before: list[Tensor]) -> bool:
    """Whether a batch of tokens equals the first batch, although rows differ. (If they hardly do, the law is nearly
    certain, and batches may be equal by chance.)"""
    return (
        bool(before) and torch.equal(tokens, before[0]) and bool((tokens != tokens[:1]).any(-1).double().mean() > 0.1)
    )


def count_texts(tokens: Tensor, laws: list[Tensor], uniforms: Tensor) -> tuple[list[Tensor], Tensor]:
    """Counts: for each position t, [V ** t, V] of the tokens emitted there, by the text before them; and [V ** T] of
    the texts, whose missing tokens are drawn from the target. A text y_0 y_1 .. is indexed as a number in base V."""
    index = torch.zeros(len(tokens), dtype=torch.int64)
    counts = []
    for token, law, numbers in zip(tokens.unbind(1), laws, uniforms.unbind(1), strict=True):
        missing = token < 0
        cumulative = law[index[missing]].cumsum(-1)
        drawn = (cumulative <= numbers[missing].unsqueeze(-1) * cumulative[:, -1:]).sum(-1)
        index = index * law.shape[1] + token.masked_scatter(missing, drawn)
        counts.append(torch.bincount(index[~missing], minlength=law.numel()).view_as(law))
    return counts, torch.bincount(index, minlength=laws[-1].numel())


def read_prompt(prompt: Sequence[int] | Tensor, vocab_size: int) -> Tensor:
    tokens = prompt if isinstance(prompt, Tensor) else torch.tensor(list(prompt), dtype=torch.int64)
    if tokens.dim() != 1 or tokens.is_floating_point():
        raise ValueError(f"prompt: expected integers [P], got {tokens.dtype} {list(tokens.shape)}")
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(f"prompt: expected tokens in [0, {vocab_size}), got {tokens.tolist()}")
    return tokens.long()


def check_numbers(
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
