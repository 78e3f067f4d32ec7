"""Assistants of Gemma 4 targets: the network of `drafts.Gemma4Assistant`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models import LanguageModel
from ..models.base import RowState
from ..ops.attention import spans_of, spans_serve
from ..ops.kv_cache import Window
from .architecture import Reading, layers_of, unwrapped
from .models import TransformersModel

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


def is_gemma4_assistant(model: object) -> TypeGuard[nn.Module]:
    original = getattr(model, "_orig_mod", model)
    return isinstance(original, PreTrainedModel) and original.config.model_type in MODEL_TYPES


def _reading(adapter: TransformersModel) -> Reading:
    return Reading(adapter._config._attn_implementation == "sdpa", adapter.max_length, adapter.limited_by)


class Gemma4AssistantModel(TransformersModel):
    """An assistant, whose layers attend to keys and values of the target. It has none itself, so `read_shared` replaces
    `forward`; it follows changes of the user's model like every `TransformersModel`.

    Raises:
        TypeError, ValueError: as in `drafts.Gemma4Assistant`.
    """

    def __init__(self, model: PreTrainedModel | nn.Module) -> None:
        if not is_gemma4_assistant(model):
            raise TypeError(
                "model: expected a Gemma 4 assistant of transformers, as AutoModelForCausalLM loads it (5.23 cannot), "
                f"got {type(model)}"
            )
        super().__init__(unwrapped(model), check=_reading)
        embedder: Any = self.model.masked_embedding
        if embedder is None:
            return
        count, most = embedder.num_centroids, embedder.centroid_intermediate_top_k
        if self.vocab_size % count > 0 or most > count:
            raise ValueError(
                f"model: expected num_centroids that divides {self.vocab_size} tokens and is at least "
                f"centroid_intermediate_top_k = {most}, got {count}"
            )
        # transformers fills it with zeros if the checkpoint lacks it.
        tokens = torch.arange(self.vocab_size, device=self.device)
        if not torch.equal(embedder.token_ordering.sort().values, tokens):
            raise ValueError(f"model: expected each of {self.vocab_size} tokens once in token_ordering")

    def _understand(self) -> None:
        super()._understand()
        # The query is one position after the newest key, and transformers counts the window from this key.
        self._windows = {kind: window and Window(window.size + 1) for kind, window in self._windows.items()}

    def _row_states(self) -> list[RowState]:
        return []

    def sources(self, target: LanguageModel) -> dict[str, int]:
        """For each kind of attention layer, the last layer of the target that has keys; {} = another family. Raises
        TypeError for a target that is not of transformers."""
        if not isinstance(target, TransformersModel):
            raise TypeError(f"target: expected a transformers model, whose keys are read, got {type(target).__name__}")
        config = target.model.config.get_text_config(decoder=True)
        if config.model_type != self._config.model_type:
            return {}
        with_keys = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
        return {kind: index for index, kind in enumerate(with_keys)}

    def sizes(self, target: Any) -> dict[str, tuple[Any, Any]]:
        """The properties that assistant and target must share: the assistant's value and the target's."""
        sources, model = self.sources(target), target.model
        config = model.config.get_text_config(decoder=True)
        sizes = {
            "model_type": (self._config.model_type, config.model_type),
            "vocab_size": (self.vocab_size, target.vocab_size),
            "backbone_hidden_size": (self.model.config.backbone_hidden_size, target.hidden_size),
        }
        for layer, kind in zip(layers_of(self.model), self._config.layer_types, strict=True):
            read = _keys_of(layers_of(model)[sources[kind]], config) if kind in sources else None
            sizes[f"key heads and their size in {kind}"] = _keys_of(layer, self._config), read
        return sizes

    def read_shared(
        self,
        target: TransformersModel,
        sources: Mapping[str, int],
        tokens: Tensor,
        hidden: Tensor,
        places: Tensor,
        width: int | None,
    ) -> tuple[Tensor, Tensor]:
        """The logits [B, 1, V] of the token after `tokens` [B, 1], and the hidden state [B, 1, H] for the next call.

        Args:
            hidden: [B, 1, H], the target's state before the first draft, later the state of the previous call.
            places: [B, 1], for all drafts the position of the newest token of the text, which the target has not read.
            width: the number of slots to read; None = all.
        """
        model, caches = self.prepared, target.key_values
        states = {kind: caches[sources[kind]].read(width) for kind in self._config.layer_types}
        # A text of one token has no key yet; its drafts are dropped.
        newest = (places - 1).clamp(min=0)
        _, _, width, _ = next(iter(states.values()))[0].shape
        if self.supports_spans and spans_serve(newest, width, self.dtype):
            seen = self._for_layers(lambda window: spans_of(newest, window).unsqueeze(1))
        else:
            seen = self._mask(newest, torch.arange(width, device=newest.device).unsqueeze(0))
        output = model.model(
            inputs_embeds=model.pre_projection(torch.cat([target.embed(tokens).to(hidden.dtype), hidden], -1)),
            attention_mask=seen,
            position_ids=places,
            shared_kv_states={kind: tuple(each.to(hidden.dtype) for each in both) for kind, both in states.items()},
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(output) if model.masked_embedding is None else self._of_centroids(output)
        return logits.float() if logits.dtype == torch.float64 else logits, model.post_projection(output)

    def _of_centroids(self, hidden: Tensor) -> Tensor:
        """Logits [B, 1, V] of the tokens of the likeliest centroids; -inf elsewhere."""
        embedder: Any = self.prepared.masked_embedding
        chosen = embedder.centroids(hidden).topk(embedder.centroid_intermediate_top_k, -1).indices
        tokens = embedder.token_ordering.view(embedder.num_centroids, -1)[chosen].flatten(2)
        logits = (self.prepared.lm_head.weight[tokens] @ hidden.unsqueeze(-1)).squeeze(-1)
        everywhere = logits.new_full((*hidden.shape[:2], self.vocab_size), -torch.inf)
        return everywhere.scatter(2, tokens, logits)


def _keys_of(layer: Any, config: Any) -> tuple[int, int]:
    """The number of key heads of a layer, and their size."""
    return config.num_attention_heads // layer.self_attn.num_key_value_groups, layer.self_attn.head_dim
