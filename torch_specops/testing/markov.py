"""Language models made of tables, so that their laws are known exactly."""

from __future__ import annotations

import torch
from torch import Tensor


class MarkovModel:
    """A language model whose next token depends on the last few tokens only.

    Args:
        table: floating point [.., V] logits of the next token, with one axis before the last for each token of the
            context, the oldest first: [V, V] for order 1, [V, V, V] for order 2. In a context axis of size V + 1, the
            last entry stands for a token before the beginning.

    A call maps tokens [N, t] to logits [N, t, V] of the token after each of them, like one forward of a transformer.

    Raises:
        TypeError: `table` is not a floating point tensor.
        ValueError: a table of another shape, or a sequence that is too short for a table without entries for missing
            tokens.

    Examples:
        >>> import torch
        >>> from torch_specops.testing import MarkovModel
        >>> model = MarkovModel(torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
        >>> model(torch.tensor([[1, 0]]))
        tensor([[[2., 3.],
                 [0., 1.]]])
    """

    def __init__(self, table: Tensor) -> None:
        if not isinstance(table, Tensor) or not table.is_floating_point():
            raise TypeError(f"table: expected a floating point tensor, got {getattr(table, 'dtype', type(table))}")
        *contexts, vocab_size = table.shape or [0]
        if not contexts or vocab_size < 1 or any(size - vocab_size not in (0, 1) for size in contexts):
            shape = "a shape of V or V + 1 for each context token, then V"
            raise ValueError(f"table: expected {shape}, got {list(table.shape)}")
        self.table, self.vocab_size, self.order = table, vocab_size, len(contexts)

    def __call__(self, tokens: Tensor) -> Tensor:
        return self._logits(tokens, 1)

    def next_logits(self, tokens: Tensor) -> Tensor:
        """[N, V] logits of the token after the sequences [N, t]; t may be 0."""
        return self._logits(tokens, tokens.shape[1])[:, 0]

    def _logits(self, tokens: Tensor, first: int) -> Tensor:
        """[N, t + 1 - first, V] logits of the tokens at positions first .. t."""
        missing = list(self.table.shape[: max(self.order - first, 0)])
        if self.vocab_size in missing:
            axis = f"an axis {missing.index(self.vocab_size)} of V + 1 = {self.vocab_size + 1}"
            reason = f"as a text of {first} tokens has no token there"
            raise ValueError(f"table: expected {axis}, {reason}, got {list(self.table.shape)}")
        text = torch.nn.functional.pad(tokens.long(), (self.order, 0), value=self.vocab_size)
        return self.table[text[:, first:].unfold(1, self.order, 1).unbind(-1)]


def markov_pair(vocab_size: int = 6, order: int = 2, seed: int = 0) -> tuple[MarkovModel, MarkovModel]:
    """A target and a draft that reveal mistakes: few tokens, none of them rare, a different law for each context, and
    an overlap sum min(p, q) near 0.6, so that drafts are often accepted and often rejected. With order 2, a cache that
    lags by one token changes the context; with order 1 it does not, because the newest token is always passed. With a
    large vocabulary, or two similar models, most mistakes change too little to be detected.

    Args:
        vocab_size: V >= 2; 6 to 16 is best.
        order: tokens of context, >= 1.
        seed: the seed of the random logits.

    Returns:
        Two `MarkovModel` with float32 tables [V + 1, .., V + 1, V].

    Raises:
        ValueError: a number out of range.

    Examples:
        >>> from torch_specops.testing import markov_pair
        >>> target, draft = markov_pair(vocab_size=8)
        >>> target.table.shape
        torch.Size([9, 9, 8])
    """
    for name, value, low in (("vocab_size", vocab_size, 2), ("order", order, 1)):
        if value < low:
            raise ValueError(f"{name}: expected a number >= {low}, got {value}")
    generator = torch.Generator().manual_seed(seed)
    shape = [vocab_size + 1] * order + [vocab_size]
    normal, noise = (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for _ in range(2))
    target = 1.2 * normal
    return MarkovModel(target), MarkovModel(0.5 * target + noise)
