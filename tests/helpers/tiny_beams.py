"""Beam search over the tiny models: ours, and that of transformers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from tiny_models import PROMPTS, encoder_inputs, padded, perturbed, shared_tiny
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from torch_specops.beam import BeamOutput, TreeModel, beam_search
from torch_specops.drafts import EarlyExit, ModelDraft
from torch_specops.hf import language_model

LENGTH = 12
PAD = 3
# A tenth of the vocabulary ends a beam, so that beams of many lengths compete.
ENDS = (11, 24, 30, 41, 50, 58)

# A beam: its new tokens and its score.
Beam = tuple[tuple[int, ...], float]


def transformers_beams(
    model: PreTrainedModel,
    num_beams: int,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    eos: Sequence[int] = (),
    max_new_tokens: int = LENGTH,
    inputs: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> list[Beam]:
    """The beams of transformers' own search, prompt after prompt; `inputs` of one prompt."""
    input_ids, attention_mask = padded(prompts, "left")
    if inputs is None:
        options |= {"input_ids": input_ids, "attention_mask": attention_mask}
    else:
        # As in `greedy_alone`: T5's own cache has the wrong number of layers, Whisper's own `generate` forces tokens.
        options |= {**inputs, "decoder_input_ids": input_ids, "use_cache": False}
    output = GenerationMixin.generate(
        model,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    beams = []
    for row, score in zip(output.sequences[:, input_ids.shape[1] :].tolist(), output.sequences_scores, strict=True):
        ends = [index for index, token in enumerate(row) if token in eos]
        beams.append((tuple(row[: ends[0] + 1] if ends else row), float(score)))
    return beams


@functools.cache
def expected_beams(family: str, num_beams: int, eos: tuple[int, ...] = (), **options: Any) -> list[Beam]:
    """Of every one of PROMPTS."""
    model = shared_tiny(family)
    # With eager attention a padded prompt gets NaN from transformers, where Gemma 2 sees nothing but padding.
    if not model.config.is_encoder_decoder and model.config._attn_implementation == "sdpa":
        return transformers_beams(model, num_beams, eos=eos, **options)
    beams = []
    for index, prompt in enumerate(PROMPTS):
        own = encoder_inputs(family, slice(index, index + 1))
        beams += transformers_beams(model, num_beams, [prompt], eos=eos, inputs=own, **options)
    return beams


def beams_of(output: BeamOutput) -> list[Beam]:
    rows = range(len(output.lengths))
    return [(tuple(output.new_tokens(row)), float(output.scores[row])) for row in rows]


def search(
    model: PreTrainedModel | TreeModel, num_beams: int, draft: Any = None, *, side: str = "left", **options: Any
) -> BeamOutput:
    input_ids, attention_mask = padded(options.pop("prompts", PROMPTS), side)
    defaults = {"max_new_tokens": LENGTH, "num_return_sequences": num_beams, "eos_token_id": (), "pad_token_id": PAD}
    return beam_search(
        model, input_ids, num_beams=num_beams, draft=draft, attention_mask=attention_mask, **(defaults | options)
    )


def assert_same(found: Sequence[Beam], expected: Sequence[Beam], tolerance: float = 1e-6) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=tolerance)


def opposite(model: PreTrainedModel) -> PreTrainedModel:
    """A draft that wants what the model does not want at all."""
    clone = copy.deepcopy(model)
    head = nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(-model.get_output_embeddings().weight)
    clone.set_output_embeddings(head)
    return clone


# Functions of the model.
DRAFTS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "nothing": lambda model: None,
    "itself": lambda model: model,
    "perturbed": perturbed,
    "opposite": opposite,
    "early exit": lambda model: EarlyExit(1),
    "draft source": lambda model: ModelDraft(language_model(perturbed(model))),
}


def make_draft(name: str, family: str = "llama") -> Any:
    return DRAFTS[name](shared_tiny(family))
