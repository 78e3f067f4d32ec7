"""The network of DFlash (Chen et al. 2026, arXiv:2602.06036), DFlash2 and DSpark (DeepSeek-AI 2026) drafters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .dflash2 import CandidateSelector, ConvolvedLayer
from .layers import Attention, DecoderLayer, LayerConfig, Norm, rope_frequencies, rotation, spread_logits
from .markov import ConfidenceHead, MarkovHead


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayerConfig):
    """The sizes of a drafter, and the options in which drafters differ.

    Args:
        block_size: the tokens of a block: the newest token and the masks after it.
        first_place: the place in the block that gives the first draft: 0 = the newest token's, 1 = the first mask's.
        mask_token_id: the target's token that stands for a mask.
        feature_layers: the target's layers whose inputs are the features.
        sees: for each layer, how many tokens before and after itself a token attends to, up to the block's end; None =
            all.
        window_of_block: the tokens before are counted from the block's first token, for every token of the block.
        reads_last_norm: the feature of layer L of L is the state after the last norm; False = before it, which no
            target keeps.
        vocab_size, num_target_layers: the target's; None = not known.
        draft_vocab_size: the tokens that the drafter has logits for; None = all of the target's.
        markov_rank, markov_kind: of the `MarkovHead`; 0 = the drafter has none.
        has_confidence, confidence_reads_markov: the drafter has a `ConfidenceHead`, and it reads the embedding of the
            Markov head.
        conv_taps, conv_group_size: of the `DynamicConvolution` around every sublayer; 0 = the drafter has none.
        selector_rank, selector_top_k: of the `CandidateSelector`; 0 = the drafter has none.
        num_drafts: K by default; None = the most.
        embedding_scale: multiplies the target's embeddings.
        output_multiplier, softcap: the logits are softcap * tanh(output_multiplier * head / softcap); None = no cap.
    """

    block_size: int
    mask_token_id: int
    feature_layers: tuple[int, ...]
    sees: tuple[tuple[int | None, int | None], ...]
    first_place: int = 1
    window_of_block: bool = False
    reads_last_norm: bool = True
    vocab_size: int | None = None
    num_target_layers: int | None = None
    draft_vocab_size: int | None = None
    markov_rank: int = 0
    markov_kind: str = "vanilla"
    has_confidence: bool = False
    confidence_reads_markov: bool = False
    conv_taps: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    num_drafts: int | None = None
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None

    @property
    def most_drafts(self) -> int:
        return self.block_size - self.first_place


class DFlashHead(nn.Module):
    """Reads features of the sequence and embeddings of a block. Parameters are named as in published drafters.

    Args:
        has_embedding, has_head: the drafter has embeddings, a head; False = it uses the target's.

    Attributes:
        draft_of_target: [V] int64, the index of each target token's logit in the drafter, -1 = none; None = the
            drafter has all tokens in the target's order.
    """

    frequencies: Tensor
    draft_of_target: Tensor | None
    confidence_head: Any

    def __init__(self, config: DFlashConfig, has_embedding: bool = False, has_head: bool = False) -> None:
        super().__init__()
        self.config = config
        hidden, eps, rank = config.hidden_size, config.norm_eps, config.markov_rank
        self.fc = nn.Linear(len(config.feature_layers) * hidden, hidden, bias=False)
        self.hidden_norm = Norm(hidden, eps)
        taps, group_size = config.conv_taps, config.conv_group_size
        self.layers = nn.ModuleList(
            ConvolvedLayer(config, taps, group_size) if taps > 0 else DecoderLayer(config, hidden) for _ in config.sees
        )
        self.norm = Norm(hidden, eps)
        # Without these parts, a drafter need not know the vocabulary.
        vocab_size = config.vocab_size or 0
        draft_vocab_size = config.draft_vocab_size or vocab_size
        self.embed_tokens = nn.Embedding(vocab_size, hidden) if has_embedding else None
        self.lm_head = nn.Linear(hidden, draft_vocab_size, bias=False) if has_head else None
        self.markov_head = None
        if rank > 0:
            self.markov_head = MarkovHead(config.markov_kind, vocab_size, draft_vocab_size, hidden, rank)
        self.candidate_selector = None
        if config.selector_rank > 0:
            sizes = config.selector_rank, config.selector_top_k
            self.candidate_selector = CandidateSelector(vocab_size, hidden, *sizes)
        width = hidden + (rank if config.confidence_reads_markov else 0)
        self.confidence_head = ConfidenceHead(width) if config.has_confidence else None
        self.register_buffer("draft_of_target", None, persistent=False)
        self.register_buffer("frequencies", rope_frequencies(config), persistent=False)

    def context(self, features: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [B, heads, n, D] for each layer, of positions [B, n] with features [B, n, F * H]."""
        read = self.hidden_norm(self.fc(features))
        cos, sin = rotation(positions, self.frequencies, read)
        attentions: Any = [layer.self_attn for layer in self.layers]
        return (attention.keys_values(read, cos, sin) for attention in attentions)

    def forward(self, embedded: Tensor, positions: Tensor, attentions: Sequence[Attention]) -> Tensor:
        """The input [B, n, H] of the head, from embeddings [B, n, H] of a block at positions [B, n]."""
        hidden, (cos, sin) = embedded, rotation(positions, self.frequencies, embedded)
        layers: Any = self.layers
        for layer, attention in zip(layers, attentions, strict=True):
            hidden = layer.add(hidden, layer.input_layernorm(hidden), cos, sin, attention)
        return self.norm(hidden)

    @property
    def is_conditional(self) -> bool:
        """True = the logits of a draft depend on the drafts before it."""
        return self.markov_head is not None or self.candidate_selector is not None

    def target_logits(self, logits: Tensor) -> Tensor:
        """The logits [.., V] of the target's tokens, -inf for tokens that the drafter lacks, from the drafter's [..,
        D]."""
        return logits if self.draft_of_target is None else spread_logits(logits, self.draft_of_target)

    def confidence_of(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """The probability [B] float32 that the target accepts the draft after tokens `previous` [B], at a place with
        hidden states [B, H]. The drafter must have a confidence head."""
        markov = self.markov_head
        if markov is not None and self.config.confidence_reads_markov:
            hidden = torch.cat([hidden, markov.markov_w1(previous)], -1)
        return self.confidence_head(hidden)
