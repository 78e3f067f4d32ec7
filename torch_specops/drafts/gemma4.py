"""Gemma 4 assistants, which read the keys and values of their target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import checks
from ..models.base import LanguageModel, Part, feature_model
from ..sampling import SamplingTensors
from .base import Draft
from .feature import check_target
from .model import SampledDraft


class Gemma4Assistant(SampledDraft):
    """Drafts with the assistant that was published for a Gemma 4 target.

    The assistant's layers attend to keys and values in the target's cache. For the first draft it reads the embedding
    of the newest token and the target's last hidden state before it; for a later one, the draft before and the state
    that gave it. A draft costs a forward of these few layers over one token, and the assistant keeps nothing between
    steps. All queries of a step have the position of the newest token.

    With ordered embeddings, tokens of unlikely centroids get the logit -inf and are not proposed. Verification uses
    these logits, so the target's distribution is kept. K is the `num_assistant_tokens` of the assistant's generation
    config by default, or 4. A text of one token gets no drafts.

    Args:
        model: `Gemma4AssistantForCausalLM` or `Gemma4UnifiedAssistantForCausalLM`, as transformers loads them (all
            releases but 5.23, which raises). Its weights are shared.

    Raises:
        TypeError: another model; a `num_assistant_tokens` that is not an int; in `bind`, a target that is not of
            transformers.
        ValueError: an attention implementation other than "sdpa" and "eager"; weights on several devices; a
            `num_assistant_tokens` below 1; a `num_centroids` or `token_ordering` that does not fit the vocabulary; in
            `bind`, an assistant for another target. The message names it.

    Examples:
        >>> import torch_specops
        >>> from transformers import AutoModelForCausalLM
        >>> target = AutoModelForCausalLM.from_pretrained("google/gemma-4-E4B-it")  # doctest: +SKIP
        >>> model = AutoModelForCausalLM.from_pretrained("google/gemma-4-E4B-it-assistant")  # doctest: +SKIP
        >>> draft = torch_specops.drafts.Gemma4Assistant(model)  # doctest: +SKIP
        >>> output = torch_specops.generate(target, [[2, 818, 5279]], draft=draft)  # doctest: +SKIP
    """

    # `bind` sets both before every `start`.
    _target: Any
    _sources: Mapping[str, int]
    _of_calls: ClassVar[Sequence[str]] = ("_target", "_sources")

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # transformers takes seconds to import.
        from ..hf.gemma4_assistant import Gemma4AssistantModel

        self.model = Gemma4AssistantModel(model)
        config = self.model.model.generation_config
        count = getattr(config, "num_assistant_tokens", None)
        self.default_draft_tokens = 4 if count is None else checks.check_int("num_assistant_tokens", count, 1)

    @property
    def inside(self) -> Sequence[Part]:  # type: ignore[override]
        return (self.model,)

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return self.model.vocab_size

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.model.device

    def bind(self, target: LanguageModel) -> None:
        model = feature_model(target)
        check_target(self.model.sizes(model))
        self._target, self._sources = model, self.model.sources(model)
        self.feature_layers = (model.num_layers,)

    def static_tensors(self) -> Sequence[Tensor]:
        return self.model.static_tensors()

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        """K tokens [B, K] with the logits [B, K, V] they were sampled from and their logsumexp [B, K], unless drafts
        share the target's noise."""
        places = lengths.unsqueeze(1) - 1
        index = (places - 1).clamp(min=0).unsqueeze(2).expand(-1, -1, self._target.hidden_size)
        hidden = self._target.features.gather(1, index).to(self.model.dtype)
        width = max(int(lengths.max()) - 1, 1) if self._is_eager_cpu(lengths) else None

        def step(index: int, *others: Any) -> tuple[Any, ...]:
            return self._piece(self._read_and_draw)(places, width, *others)

        draft = self._draw_in_turn(step, hidden, tokens, lengths, num_draft_tokens, sampling, seeds)
        return replace(draft, tokens=torch.where(places > 0, draft.tokens, -1))

    def _read_and_draw(
        self,
        places: Tensor,
        width: int | None,
        previous: Tensor,
        hidden: Tensor,
        ends: Tensor,
        numbers: Tensor,
        sampling: SamplingTensors,
        text: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """A draft, as `_draw_in_turn` says."""
        logits, hidden = self.model.read_shared(self._target, self._sources, previous, hidden, places, width)
        return *sampling.draw(logits, numbers, text, ends), hidden
