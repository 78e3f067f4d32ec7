"""MTP: the multi-token-prediction layers that ship inside a checkpoint (DeepSeek-AI 2024, arXiv:2412.19437)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..models.base import LanguageModel, feature_model
from ..models.conversion import as_language_model
from ..sampling import SamplingTensors
from .base import Draft, stacked
from .feature import FeatureDraft, check_target


class MTP(FeatureDraft):
    """Drafts with layers that were trained with the target, and share its embeddings and its head.

    Pair i of layer k is a hidden state at position i (the target's after its last norm for k = 0, otherwise layer k -
    1's) and the embedding of token i + 1 + k; from it the layer predicts token i + 2 + k. In a step, every layer reads
    the new pairs of the sequence, and rereads the last pairs of the previous step, which contained drafts. Drafts
    beyond the number of layers come from the last layer, which then reads its own output. K is the number of layers by
    default.

    Args:
        head: the layers, as `from_pretrained` reads them.

    Examples:
        >>> import pathlib, torch, transformers, torch_specops
        >>> folder = pathlib.Path(torch_specops.__file__).parent / "data" / "austen_bytes" / "target"
        >>> target = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        >>> draft = torch_specops.drafts.MTP.from_pretrained(target)
        >>> prompt = torch.tensor([list(b"It is a truth universally ")])
        >>> greedy = torch_specops.SamplingParams(temperature=0.0)
        >>> options = dict(draft=draft, num_draft_tokens=4, max_new_tokens=16, sampling=greedy)
        >>> output = torch_specops.generate(target, prompt, **options)
        >>> bytes(output.new_tokens(0)), output.stats.num_accepted > 8
        (b'to be a great de', True)
    """

    _cache: Any = None
    _of_calls: ClassVar[Sequence[str]] = ("_cache",)

    def __init__(self, head: Any) -> None:
        super().__init__(head)
        self.vocab_size: int = head.vocab_size
        self.default_draft_tokens = len(head.layers)
        self.num_reread = len(head.layers) - 1

    @classmethod
    def from_pretrained(
        cls,
        target: LanguageModel | nn.Module,
        folder_or_id: str | os.PathLike[str] | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> MTP:
        """Read the MTP layers in the target's checkpoint, which loading the model leaves out.

        The layers are found by name: as in DeepSeek-V3, Kimi K2 and GLM-4.5 (`model.layers.L`, L = the number of the
        target's layers), in Qwen3-Next, Qwen3.5 and Mellum (`mtp`), or in MiMo (`model.mtp_layers`).

        Args:
            target: a transformers model; the layers are loaded to its device.
            folder_or_id: a folder with *.safetensors, or the id of a repository on the Hugging Face hub, of which the
                newest revision is read; None = where the target came from. Only these weights are read.
            dtype: of the layers; None = the target's.

        Raises:
            TypeError: a target that is not of transformers.
            ValueError: no such folder, or no MTP weights in it; a weight that is missing, unknown, quantised or of
                another shape, by name; another number of layers than the config says, if it says one.
        """
        # transformers takes seconds to import.
        from ..hf.mtp import read_mtp_head

        model = as_language_model("target", target)
        draft = cls(read_mtp_head(model, folder_or_id, dtype))
        draft.bind(model)
        return draft

    def bind(self, target: LanguageModel) -> None:
        model = feature_model(target)
        check_target(self.head.sizes(target))
        super().bind(target)
        self.feature_layers = (model.num_layers,)

    def _start_caches(self, batch: int, capacity: int) -> None:
        self._cache = self._cache or self.head.new_cache()
        self._cache.start(batch, capacity, torch.empty(0, device=self.device))
        self._caches = self._cache.layers
        first = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        # Read one token to allocate the caches. Later reads overwrite its entries.
        self._read_text(first, first + 1, first)

    def propose(
        self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, sampling: SamplingTensors, seeds: Tensor
    ) -> Draft:
        numbers = self._numbers(seeds, lengths, num_draft_tokens, sampling)
        text, ends = pad(tokens, (0, num_draft_tokens)), lengths.unsqueeze(1)
        positions, depth = self._new_positions(lengths), len(self.head.layers)
        hidden: Any = None
        found = []
        for index, own in enumerate(numbers):
            if index >= depth:
                # Run the last layer again, over the pair of the last draft.
                hidden, positions = hidden[:, -1:].contiguous(), positions[:, -1:] + 1
            read_and_draw = self._piece(self._read_and_draw, positions.shape[1], index)
            *drawn, hidden, text = read_and_draw(index, hidden, text, ends + index, positions, own, sampling)
            found.append(drawn)
        # If K is smaller than the number of layers, the other layers have to read the new pairs too.
        for index in range(num_draft_tokens, depth):
            read = self._piece(self._read, positions.shape[1], index)
            _, hidden = read(index, hidden, text, ends + num_draft_tokens, positions)
        return stacked(found)

    def _read_and_draw(
        self, index: int, hidden: Any, text: Tensor, ends: Tensor, positions: Tensor, numbers: Tensor, sampling: Any
    ) -> tuple[Any, ...]:
        """Draft `index` as `SamplingTensors.draw` returns it, the hidden states [B, n, H] for the next draft, and
        `text` with this draft."""
        last = len(self.head.layers) - 1
        raw, hidden = self._read(min(index, last), hidden, text, ends, positions)
        logits = self._target.head(hidden[:, -1:].to(self._target.dtype))
        token, *rest = sampling.draw(logits, numbers, text, ends)
        # The token is -1 in a row without a finite logit. Later drafts are not verified, so any token may be read
        # instead.
        text = text.scatter(1, ends, token.clamp(min=0).unsqueeze(1))
        return token, *rest, raw if index >= last and self.head.layout.repeats_raw else hidden, text

    def _read_text(self, tokens: Tensor, ends: Tensor, positions: Tensor, rows: Tensor | None = None) -> None:
        """Some tokens of the last pairs are not known yet; every step reads these pairs again."""
        hidden = None
        for layer in range(len(self.head.layers)):
            _, hidden = self._read(layer, hidden, tokens, ends, positions, rows)

    def _read(
        self, layer: int, hidden: Any, tokens: Tensor, ends: Tensor, positions: Tensor, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The output of a layer [A, n, H] at pairs [A, n], before and after its norm. `hidden` = None reads the
        target's features."""
        if hidden is None:
            hidden = self._features(ends, positions, rows)
        following = tokens.gather(1, torch.minimum(positions + layer + 1, ends - 1))
        width = self._width(positions, self._cache.capacity)
        return self.head.read(self._target, self._cache, layer, hidden, following, positions, width, rows)
