"""Language models that are tables of logits, so that their distributions are known exactly."""

from __future__ import annotations

import torch
from torch import Tensor


class MarkovModel:
    """A language model whose next token depends only on the last few tokens.

    Args:
        table: floating point [.., V], the logits of the next token. Before the last axis there is one axis for each
            token of the context, the oldest first: [V, V] for order 1, [V, V, V] for order 2. An axis of the context
            may have size V + 1; its last entry is used if the sequence has no token there yet.

    A call maps tokens [N, t] to logits [N, t, V] of the next token after each of them, like a forward of a transformer.

    Raises:
        TypeError: `table` is not a floating point tensor.
        ValueError: the table has another shape, or a sequence is shorter than the context and the table has no entry
            for missing tokens.

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
        """The logits [N, V] of the next token after sequences [N, t]; t may be 0."""
        return self._logits(tokens, tokens.shape[1])[:, 0]

    def _logits(self, tokens: Tensor, first: int) -> Tensor:
        """The logits [N, t + 1 - first, V] of the tokens at positions first .. t."""
        missing = list(self.table.shape[: max(self.order - first, 0)])
        if self.vocab_size in missing:
            axis = f"an axis {missing.index(self.vocab_size)} of V + 1 = {self.vocab_size + 1}"
            reason = f"as a text of {first} tokens has no token there"
            raise ValueError(f"table: expected {axis}, {reason}, got {list(self.table.shape)}")
        text = torch.nn.functional.pad(tokens.long(), (self.order, 0), value=self.vocab_size)
        return self.table[text[:, first:].unfold(1, self.order, 1).unbind(-1)]


def markov_pair(vocab_size: int = 6, order: int = 2, seed: int = 0) -> tuple[MarkovModel, MarkovModel]:
    """Create a target and a draft with which mistakes in a loop are easy to detect.

    There are few tokens and none is rare, each context has a different distribution, and the overlap sum min(p, q) is
    about 0.6, so that many drafts are accepted and many are rejected. With order 2, a KV cache that lacks the newest
    token changes the context. With order 1 such a cache does not change the context, because the newest token is always
    passed to the model. With a large vocabulary or two similar models, most mistakes change the distribution too little
    to be detected.

    Args:
        vocab_size: V >= 2; 6 to 16 works best.
        order: the number of tokens in the context, >= 1.
        seed: the seed of the random logits.

    Returns:
        Two `MarkovModel` with float32 tables [V + 1, .., V + 1, V].

    Raises:
        ValueError: a number is out of range.

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
