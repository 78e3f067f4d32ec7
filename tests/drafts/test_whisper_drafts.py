"""A draft reads the encoder's output that its target has: the encoder runs once, and the text stays the target's."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_loops import GREEDY, decode, expected_rows, new_tokens
from tiny_models import encoder_inputs, raised, shared_tiny, tiny
from transformers import GenerationMixin, PreTrainedModel, WhisperConfig, WhisperForCausalLM

import torch_specops
from torch_specops import Request, SpeculativeDecoder
from torch_specops.drafts import EarlyExit, HierarchicalDraft, PromptLookup
from torch_specops.hf import custom_generate, language_model


def decoder_of(target: PreTrainedModel, num_layers: int = 2) -> PreTrainedModel:
    """The target's decoder, or its first layers, as a model of its own; not the same weights' memory."""
    config = WhisperConfig(**(target.config.to_dict() | {"decoder_layers": num_layers}))
    draft = WhisperForCausalLM(config).double().eval()
    kept = {name: value for name, value in target.state_dict().items() if name in draft.state_dict()}
    draft.load_state_dict(kept)
    return draft


def counting(family: str) -> tuple[PreTrainedModel, list[int]]:
    """A copy of the tiny model, and the batch sizes that its encoder reads."""
    target, calls = copy.deepcopy(shared_tiny(family)), list[int]()
    target.get_encoder().register_forward_hook(lambda module, given, output: calls.append(len(output[0])))
    return target, calls


def test_a_decoder_without_an_encoder_drafts_for_whisper() -> None:
    """Ragged prompts, each with its own sound. With all layers it is the target: every draft is accepted."""
    target, calls = counting("whisper")
    rates = []
    for num_layers in (2, 1):
        output = decode(decoder_of(target, num_layers), 3, family="whisper", target=target)
        assert new_tokens(output) == expected_rows(family="whisper") and calls.pop() == 3 and calls == []
        rates.append(output.stats.acceptance_rate)
    assert rates[0] == 1.0 and rates[1] is not None and rates[1] < 1.0
    # Over a lookup of its own.
    over = HierarchicalDraft(decoder_of(target), PromptLookup(min_ngram=1))
    output = decode(over, 3, family="whisper", target=target)
    assert new_tokens(output) == expected_rows(family="whisper") and output.stats.acceptance_rate == 1.0


def test_requests_of_a_session_with_such_a_draft() -> None:
    target, calls = counting("whisper")
    inputs = [encoder_inputs("whisper", slice(row, row + 1)) for row in (0, 1, 2, 1, 0)]
    requests = [Request([1], 12, eos_token_id=(), inputs=each) for each in inputs]
    decoder = SpeculativeDecoder(target, decoder_of(target), num_draft_tokens=3, sampling=GREEDY)
    plain = SpeculativeDecoder(shared_tiny("whisper"), None, sampling=GREEDY)
    for completion in decoder.generate_many(requests, batch_size=2):
        alone = plain.generate(torch.tensor([[1]]), inputs=requests[completion.index].inputs, max_new_tokens=12)
        assert completion.new_tokens.tolist() == alone.new_tokens(0)
    assert decoder.stats.acceptance_rate == 1.0 and sum(calls) <= len(requests) + 2


@pytest.mark.parametrize("family", ["whisper", "t5"])
def test_the_encoder_runs_once(family: str) -> None:
    target, calls = counting(family)
    another = tiny(family, seed=3)
    for draft, expected in ((EarlyExit(1), 1), (target, 1), (another, 1), (None, 1)):
        for _ in range(2):
            output = decode(draft, 3, family=family, target=target, max_new_tokens=8)
            assert new_tokens(output) == expected_rows(8, family)
            assert len(calls) == expected, draft
            calls.clear()
    # Two decoders with one draft: what the other's target has read is not what this one reads.
    draft = language_model(target)
    first, second = (SpeculativeDecoder(target, draft, num_draft_tokens=3, sampling=GREEDY) for _ in range(2))
    inputs = [encoder_inputs(family, slice(row, row + 1)) for row in range(3)]
    for decoder, row in ((first, 0), (second, 2), (first, 1)):
        output = decoder.generate(torch.tensor([[1]]), inputs=inputs[row], max_new_tokens=9)
        alone = torch_specops.generate(
            target, torch.tensor([[1]]), inputs=inputs[row], sampling=GREEDY, max_new_tokens=9
        )
        assert torch.equal(output.sequences, alone.sequences) and output.stats.acceptance_rate == 1.0


def test_through_generate_as_an_assistant() -> None:
    """transformers' own name for it; the features or the encoder's output."""
    target, calls = counting("whisper")
    inputs = encoder_inputs("whisper")
    assert inputs is not None
    with torch.no_grad():
        encoded = target.get_encoder()(inputs["input_features"])
    calls.clear()
    ids = torch.tensor([[1, 9], [1, 9], [1, 30]])
    options = {"decoder_input_ids": ids, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = GenerationMixin.generate(shared_tiny("whisper"), **inputs, **options, use_cache=False)
    ours = {"custom_generate": custom_generate, "assistant_model": decoder_of(target), "num_draft_tokens": 3}
    for given, count in ((inputs, 1), ({"encoder_outputs": encoded}, 0)):
        assert torch.equal(GenerationMixin.generate(target, **given, **options, **ours), expected)
        assert len(calls) == count
        calls.clear()


def test_what_does_not_fit_is_refused() -> None:
    target = shared_tiny("whisper")
    wider = tiny("whisper", d_model=64)
    message = "draft: expected a decoder of encoder states of width 32, got 64"
    assert raised(lambda draft: SpeculativeDecoder(target, draft), [(decoder_of(wider), ValueError, message)]) == []
    # T5's encoder is none that it could read.
    with pytest.raises(ValueError, match="inputs: a decoder-only model reads tokens alone"):
        decode(decoder_of(target), 2, family="t5")
