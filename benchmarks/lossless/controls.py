"""One step of Algorithm 1 (Leviathan et al. 2023) in plain PyTorch, right and wrong on purpose: what the test sees."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from engines import Row, law_of, tiny_pair
from torch import Tensor

from torch_specops import SamplingParams, filter_logits

MISTAKES = {
    "right": "right",
    "no-q": "wrong on purpose: accepts where u < p, without q",
    "no-residual": "wrong on purpose: after a rejection it draws from p",
    "raw-q": "wrong on purpose: q from before temperature and filters",
}


class Control:
    def __init__(self, mistake: str) -> None:
        self._target, self._draft = tiny_pair()
        self.law = law_of(self._target)
        self._mistake = mistake
        self.steps = self.tokens = 0

    def __call__(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], seeds: Sequence[int], length: int
    ) -> list[list[int]]:
        kinds: dict[tuple[tuple[int, ...], SamplingParams], list[int]] = {}
        for row, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            kinds.setdefault((tuple(prompt), each), []).append(row)
        texts: list[list[int]] = [[] for _ in prompts]
        for (prompt, each), rows in kinds.items():
            generator = torch.Generator().manual_seed(seeds[rows[0]])
            new = self._step(torch.tensor(prompt).expand(len(rows), -1), each, length - 1, generator)
            self.steps += len(rows)
            self.tokens += int((new >= 0).sum())
            for row, tokens in zip(rows, new.tolist(), strict=True):
                texts[row] = tokens
        return texts

    @torch.no_grad()
    def _step(self, text: Tensor, params: SamplingParams, num_drafts: int, generator: torch.Generator) -> Tensor:
        """One to num_drafts + 1 new tokens of each row, then -1."""
        rows, start = torch.arange(len(text)), text.shape[1]
        laws = []
        for _ in range(num_drafts):
            logits = self._draft(text).logits[:, -1:]
            law = probabilities(logits, params)[:, 0]
            text = torch.cat([text, torch.multinomial(law, 1, generator=generator)], 1)
            laws.append(torch.softmax(logits[:, 0], -1) if self._mistake == "raw-q" else law)
        p = probabilities(self._target(text).logits[:, start - 1 :], params)
        tokens = torch.full((len(text), num_drafts + 1), -1)
        num_accepted = torch.zeros(len(text), dtype=torch.int64)
        weights = p[:, -1].clone()
        for i, (x, q) in enumerate(zip(text[:, start:].unbind(1), laws, strict=True)):
            reached = num_accepted == i
            bound = 1.0 if self._mistake == "no-q" else q[rows, x]
            accepted = reached & (torch.rand(len(text), generator=generator) * bound < p[rows, i, x])
            tokens[accepted, i] = x[accepted]
            num_accepted += accepted
            residual = (p[:, i] - q).clamp(min=0)
            # Only a wrong rule rejects where nothing is left.
            is_empty = residual.sum(-1, keepdim=True) <= 0
            recovered = p[:, i] if self._mistake == "no-residual" else torch.where(is_empty, p[:, i], residual)
            rejected = reached & ~accepted
            weights[rejected] = recovered[rejected]
        tokens[rows, num_accepted] = torch.multinomial(weights, 1, generator=generator).squeeze(1)
        return tokens


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """[N, t, V] probabilities that the parameters sample from."""
    filters = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
    kept = filter_logits(logits.flatten(0, 1), **filters).view(logits.shape)
    return torch.softmax(kept / params.temperature, -1)


ROWS = {
    f"control-{name}": Row("", f"a step in plain PyTorch, {way}", partial(Control, name), 10_000, greedy=False)
    for name, way in MISTAKES.items()
}
