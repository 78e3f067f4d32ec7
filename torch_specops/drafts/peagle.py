"""P-EAGLE: an EAGLE-3 head that gives all drafts of a step in one forward (Amazon 2026, arXiv:2602.01469)."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checks import check_bool
from ..models.base import LanguageModel
from ..sampling import SamplingTensors
from .base import Draft
from .eagle3 import PairDraft
from .eagle3_files import read_head
from .eagle3_head import Eagle3Head


class PEagle(PairDraft):
    """Drafts K tokens in one forward of a few decoder layers over the hidden states of the target.

    Pair i is the feature of token i and the embedding of token i + 1, as in EAGLE-3. K - 1 pairs of masks come after
    the newest pair: a trained vector in place of the features, before the norms and `fc`, and the embedding of the mask
    token. Each pair attends to the pairs before it. The newest pair gives draft 1, and mask j draft j + 1; so a draft
    does not depend on K. The keys and values of masks are overwritten once the tokens in their places are known.

    Drafts depend on the text alone and not on each other. So they are the likeliest tokens by default, at any
    temperature: drawn independently, fewer are accepted. Tokens that the head lacks get the logit -inf.

    `from_pretrained` reads the speculators library's heads (`speculators_model_type: "peagle"`), and heads with
    `architectures: ["LlamaForCausalLMEagle3"]` and `ptd_token_id` or `pard_token`, as Amazon and NeMo save them.

    Args:
        head: the network, as `from_pretrained` reads it. Raises ValueError if its config has no `mask_token_id`.
        sampled: True = drafts are sampled; False = they are the likeliest tokens. The default of `verify` follows.

    Examples:
        >>> import torch, transformers, torch_specops
        >>> from torch_specops.drafts.eagle3_head import Eagle3Config, Eagle3Head
        >>> config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, eos_token_id=None)
        >>> target = transformers.GPT2LMHeadModel(config).eval()
        >>> sizes = dict(vocab_size=64, draft_vocab_size=64, target_hidden_size=32, hidden_size=32,
        ...     intermediate_size=64, num_heads=4, num_key_value_heads=2, head_dim=8)
        >>> draft = torch_specops.drafts.PEagle(Eagle3Head(Eagle3Config(**sizes, mask_token_id=63)))
        >>> output = torch_specops.generate(target, torch.tensor([[5, 6, 7]]), draft=draft, max_new_tokens=8, seed=0)
        >>> output.lengths
        tensor([11])
    """

    _read_head, _is_parallel = staticmethod(partial(read_head, is_parallel=True)), True

    def __init__(self, head: Eagle3Head, *, sampled: bool = False) -> None:
        super().__init__(head)
        check_bool("sampled", sampled)
        self.deterministic = not sampled
        self.default_draft_tokens = head.config.num_drafts or 7

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | os.PathLike[str],
        target: LanguageModel | nn.Module,
        *,
        dtype: torch.dtype | None = None,
        sampled: bool = False,
    ) -> PEagle:
        """Read a published head, in the layouts that the class names. `sampled` is as in the class; all else is as in
        `Eagle3.from_pretrained`, the errors too."""
        return cls._published(folder_or_id, target, dtype, sampled=sampled)

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        """K tokens [B, K], after processors. If sampled, with the logits [B, K, V] they were sampled from and their
        logsumexp [B, K] unless drafts share the target's noise."""
        ends, positions = lengths.unsqueeze(1), self._new_positions(lengths)
        read = self._piece(self._read_ahead, num_draft_tokens, positions.shape[1])
        logits = read(tokens, ends, positions, num_draft_tokens)
        if self.deterministic and sampling.processors is None:
            return Draft(logits.argmax(-1))

        def step(index: int, previous: Tensor, state: None, ends: Tensor, *others: Any) -> tuple[Any, ...]:
            return *self._piece(self._pick)(logits[:, index : index + 1], ends, *others), None

        return self._draw_in_turn(step, None, tokens, lengths, num_draft_tokens, sampling, seeds, logits)

    def _read_ahead(self, tokens: Tensor, ends: Tensor, positions: Tensor, num_drafts: int) -> Tensor:
        """Read the pairs at positions [B, n] and the masks after them. Returns the logits [B, K, V] of the drafts."""
        head, count, mask_hidden = self.head, num_drafts - 1, self.head.mask_hidden
        assert mask_hidden is not None
        masks = positions[:, -1:] + torch.arange(1, num_drafts, device=positions.device)
        features = self._features(ends, positions, None)
        features = torch.cat([features, mask_hidden.expand(len(tokens), count, -1)], 1)
        following = F.pad(self._following(tokens, ends, positions), (0, count), value=head.config.mask_token_id)
        output = self._read(head.fuse(features), following, torch.cat([positions, masks], 1))
        return head.target_logits(output[:, -num_drafts:])
