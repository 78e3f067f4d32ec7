"""Early exit: the target's own first layers, weights shared, as a draft."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_loops import GREEDY, decode, expected_rows, limited, new_tokens
from tiny_models import PROMPTS, encoder_inputs, padded, raised, shared_tiny, tiny
from transformers import PreTrainedModel

import torch_specops
from torch_specops.drafts.early_exit import EarlyExit
from torch_specops.hf import language_model

# One of each kind: where the layers stand, windows of their own, an encoder.
KINDS = ["llama", "gemma3", "gpt2", "whisper", "t5"]
# In a config of encoder and decoder, the decoder's number has a name of its own.
LAYERS_FIELD = {"whisper": "decoder_layers", "t5": "num_decoder_layers", "gpt2": "n_layer"}


def three_layers(family: str) -> PreTrainedModel:
    fields: dict[str, object] = {LAYERS_FIELD.get(family, "num_hidden_layers"): 3}
    if family == "gemma3":
        fields["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    return tiny(family, **fields)


@pytest.mark.parametrize("family", KINDS)
def test_all_layers_accept_every_draft(family: str) -> None:
    """The draft is then the target: p = q, unless its cache, its config or a layer is another one."""
    target = three_layers(family)
    drafts = (EarlyExit(3), EarlyExit(1), None)
    whole, fewer, plain = (decode(draft, 3, family=family, target=target, max_new_tokens=12) for draft in drafts)
    assert whole.stats.acceptance_rate == 1.0 and whole.stats.num_steps == 3
    assert fewer.stats.acceptance_rate is not None and fewer.stats.acceptance_rate < 1.0, "the tokens are no test"
    assert torch.equal(whole.sequences, plain.sequences) and torch.equal(fewer.sequences, plain.sequences)


@pytest.mark.parametrize(("family", "num_layers"), [("llama", 1), ("llama", 2), ("gemma3", 2), ("gpt2", 1)])
def test_early_exit_is_the_first_layers(family: str, num_layers: int) -> None:
    """Compared with a model whose layers are truly cut. No weight is copied."""
    target = three_layers(family)
    cut = copy.deepcopy(target)
    decoder = cut.get_decoder()
    name = "h" if family == "gpt2" else "layers"
    setattr(decoder, name, getattr(decoder, name)[:num_layers])
    decoder.config.num_hidden_layers = num_layers
    tokens = torch.tensor([[4, 9, 33, 17, 9, 2, 58, 5, 9]])
    model = language_model(target).first_layers(num_layers)
    model.start(1, 16)
    with torch.inference_mode():
        logits = model.forward(tokens, torch.arange(9).unsqueeze(0))
        torch.testing.assert_close(logits, cut(tokens, use_cache=False).logits.float(), rtol=1e-5, atol=1e-5)
    own = {parameter.data_ptr() for parameter in target.parameters()}
    assert {parameter.data_ptr() for parameter in model.prepared.parameters()} < own
    assert len(model.key_values) == num_layers


def test_early_exit_of_a_deep_whisper() -> None:
    # More decoder layers than the config class has by default, and another number than the encoder's.
    output = decode(EarlyExit(5), 3, family="whisper", target=tiny("whisper", decoder_layers=6), max_new_tokens=12)
    assert output.lengths.tolist() == [len(prompt) + 12 for prompt in PROMPTS]


def test_decoders_take_turns_with_one_source() -> None:
    """It drafts for each target with that target's layers."""
    exits, loops = EarlyExit(1), []
    for family, rows in (("whisper", 3), ("t5", 2)):
        decoder = torch_specops.SpeculativeDecoder(shared_tiny(family), exits, sampling=GREEDY, schedule="constant")
        loops.append((decoder, family, rows))
    other_vocabulary = torch_specops.SpeculativeDecoder(tiny("llama", vocab=32), exits)
    for _ in range(2):
        assert other_vocabulary.generate([[5, 6]], max_new_tokens=3).lengths.tolist() == [5]
        for decoder, family, rows in loops:
            ids, mask = padded(PROMPTS[:rows], "left")
            inputs = encoder_inputs(family, slice(0, rows))
            output = decoder.generate(ids, attention_mask=mask, inputs=inputs, max_new_tokens=9, eos_token_id=())
            assert new_tokens(output) == limited(expected_rows(family=family)[:rows], [9] * rows)


def test_bad_numbers_of_layers() -> None:
    cases = [(number, ValueError, f"num_layers: expected a number >= 1, got {number}") for number in (0, -1)]
    cases += [(other, TypeError, "num_layers: expected an int") for other in (1.0, True, "2")]
    assert raised(EarlyExit, cases) == []
    for family in ("llama", "whisper", "t5"):
        with pytest.raises(ValueError, match="num_layers: expected 1 to 3, got 4"):
            torch_specops.SpeculativeDecoder(three_layers(family), draft=EarlyExit(4))
    with pytest.raises(RuntimeError, match="before bind was called"):
        EarlyExit(1).start(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([2]), 8)
