"""DFlash drafters in the loop: what they draft is what a plain computation over the whole text gives, and what
transformers' own generator drafts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from chains import expect_laws
from report import Report
from tiny_dflash import BLOCK, SLIDING, ZLAB, Recorder, new_head, new_muse, trained_drafter
from tiny_laws import FEWER_TRIALS, V, first_tokens, model_laws, p_values, tiny_transformer
from tiny_loops import GREEDY, Given, new_tokens
from tiny_models import PROMPTS, TracedFeatures, greedy_alone, padded, shared_tiny, tiny
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torch_specops import Request, SamplingParams, SpeculativeDecoder, compilation
from torch_specops.compilation import compile_piece
from torch_specops.drafts import DFlash, Draft
from torch_specops.drafts.dflash_head import DFlashHead
from torch_specops.hf import regions
from torch_specops.models.base import static_tensors_of

INPUT_IDS, MASKS = padded(PROMPTS, "left")
MIXED = SamplingParams(temperature=[0.0, 1.0, 0.7])
FACTORS = {"input_embedding_scale": 1.7, "output_multiplier": 0.4, "final_logit_softcapping": 3.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": SLIDING | {"attention_bias": True},
    "sliding on both sides": SLIDING | {"is_causal": False},
    "causal, with factors": {"is_causal": True, "dflash_config": ZLAB["dflash_config"] | FACTORS},
}


@pytest.mark.parametrize(
    ("variant", "counts", "compiled"),
    [
        ("trained", [BLOCK - 1], False),
        ("trained", [3], True),
        # Fewer drafts after more, and steps without any.
        ("trained", [3, 1, 8, 0, 0, 2, 0, 1], False),
        ("trained", [2, 1, 2, 0, 0, 2, 0, 1], True),
        *((variant, [4], False) for variant in VARIANTS),
    ],
)
def test_logits_are_those_of_a_plain_computation(
    variant: str, counts: list[int], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's, in every step, so that no step sees the block of another one."""
    monkeypatch.setattr(compilation, "compile_piece", lambda function, **options: function)
    fields, target = VARIANTS.get(variant, {}), shared_tiny("llama")
    draft = Recorder(trained_drafter() if variant == "trained" else new_head(**fields))
    decoder = SpeculativeDecoder(target, draft, schedule=Given(counts), sampling=MIXED, compile=compiled)
    # The second batch begins with what the first one left.
    for limits in ((21, 9, 15), (6, 12, 4)):
        output = decoder.generate(INPUT_IDS, attention_mask=MASKS, max_new_tokens=limits, seed=4)
        assert output.stats.num_accepted > 0 or variant != "trained"
        assert draft.largest_difference(ZLAB | fields, target, output.lengths.tolist()) < 1e-4


def test_logits_of_rows_that_are_filled_again() -> None:
    target, draft = shared_tiny("llama"), Recorder(trained_drafter())
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=4, schedule="constant", sampling=GREEDY, compile=False)
    prompts = [[*PROMPTS[index % 3], *range(2, 2 + index)] for index in range(6)]
    requests = [Request(prompt, 5 + 3 * index) for index, prompt in enumerate(prompts)]
    for completion in decoder.generate_many(requests, batch_size=2, max_length=40):
        index = completion.index
        assert completion.new_tokens.tolist() == greedy_alone(target, prompts[index], 5 + 3 * index)
    # A row that has ended keeps its text until another one comes.
    assert draft.largest_difference(ZLAB, target, [99, 99]) < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("window", [None, 3])
def test_drafts_are_those_of_transformers(family: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its generator drafts for one text at a time."""
    kinds = {} if window is None else {"layer_types": ["sliding_attention"] * 2, "sliding_window": window}
    target, muse = shared_tiny(family), new_muse(**kinds)
    generator: Any = transformers.generation.DFlashTokenCandidateGenerator
    own, theirs = generator.get_candidates, {}

    def get_candidates(self: Any, input_ids: Tensor, *rest: Any, **named: Any) -> Any:
        tokens, logits = own(self, input_ids, *rest, **named)
        if logits is not None:
            theirs[tuple(input_ids[0].tolist())] = logits[0]
        return tokens, logits

    monkeypatch.setattr(generator, "get_candidates", get_candidates)
    draft = Recorder(DFlash.from_pretrained(muse, target).head)
    output = SpeculativeDecoder(target, draft, schedule="constant", sampling=GREEDY, compile=False).generate(
        INPUT_IDS, attention_mask=MASKS, max_new_tokens=20
    )
    for prompt, tokens in zip(PROMPTS, new_tokens(output), strict=True):
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "speculation_type": "dflash"}
        ids = torch.tensor([prompt])
        text = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=muse, **options)
        assert text[0, len(prompt) :].tolist() == tokens
    differences = []
    for tokens, ends, logits in draft.seen:
        for row, end in enumerate(ends):
            expected = theirs.get(tuple(tokens[row, :end].tolist()))
            if expected is not None:
                # A row without room for the block gets fewer.
                expected = expected[: logits.shape[1]]
                assert logits[row].argmax(-1).tolist() == expected.argmax(-1).tolist()
                differences.append(float((logits[row] - expected).abs().max()))
    assert len(differences) > 40 and max(differences) < 1e-4


def test_number_of_drafts() -> None:
    draft = DFlash(trained_drafter())
    decoder = SpeculativeDecoder(shared_tiny("llama"), draft, schedule="constant", sampling=GREEDY)
    assert decoder.schedule.buckets == (BLOCK - 1,)
    with pytest.raises(ValueError, match="num_draft_tokens: this draft has at most 8 tokens per step, got 9"):
        SpeculativeDecoder(shared_tiny("llama"), draft, num_draft_tokens=BLOCK)


def test_text_ends_at_the_capacity() -> None:
    """Where the block reaches beyond it."""
    target, draft = shared_tiny("llama"), Recorder(trained_drafter())
    decoder = SpeculativeDecoder(
        target, draft, num_draft_tokens=1, schedule="constant", sampling=GREEDY, max_length=20, compile=False
    )
    output = decoder.generate(INPUT_IDS, attention_mask=MASKS, max_new_tokens=13)
    assert new_tokens(output)[0] == greedy_alone(target, PROMPTS[0], 13)
    assert draft.largest_difference(ZLAB, target, output.lengths.tolist()) < 1e-4


def test_drafts_follow_processors() -> None:
    """Each after the text with the drafts before it: a repetition penalty changes which token is the likeliest."""
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.3)
    target = shared_tiny("llama")
    proposals: list[Tensor] = []

    class Kept(Recorder):
        def propose(self, *arguments: Any) -> Draft:
            draft = super().propose(*arguments)
            proposals.append(draft.tokens)
            return draft

    draft = Kept(trained_drafter())
    decoder = SpeculativeDecoder(
        target, draft, num_draft_tokens=3, schedule="constant", sampling=sampling, compile=False
    )
    output = decoder.generate(INPUT_IDS, attention_mask=MASKS, max_new_tokens=12)
    plain = SpeculativeDecoder(target, None, sampling=sampling).generate(
        INPUT_IDS, attention_mask=MASKS, max_new_tokens=12
    )
    assert new_tokens(output) == new_tokens(plain)
    changed = 0
    for (tokens, ends, logits), found in zip(draft.seen, proposals, strict=True):
        for row, end in enumerate(ends):
            text = tokens[row, :end].tolist()
            for place in range(logits.shape[1]):
                scores = logits[row, place].clone()
                used = torch.tensor(sorted(set(text)))
                scores[used] = torch.where(scores[used] > 0, scores[used] / 1.3, scores[used] * 1.3)
                changed += int(scores.argmax()) != int(logits[row, place].argmax())
                text.append(int(scores.argmax()))
            assert found[row].tolist() == text[end:]
    assert changed > 0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("one_graph", "num_graphs"),
    [
        # The block, the verification.
        (False, 2),
        pytest.param(
            True,
            1,
            marks=[pytest.mark.slow, pytest.mark.skipif(not regions.ARE_AVAILABLE, reason="before torch 2.13")],
        ),
    ],
)
def test_compiled_steps_give_the_eager_tokens(
    one_graph: bool, num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a second batch compiles nothing."""
    monkeypatch.setattr(regions, "MIN_WEIGHTS", 0 if one_graph else 2**40)
    backend = CompileCounterWithBackend("eager")
    monkeypatch.setattr(compilation, "compile_piece", partial(compile_piece, backend=backend))
    found = []
    for compile in (False, True):
        options: dict[str, Any] = {"sampling": MIXED, "compile": compile, "one_graph": one_graph}
        draft = DFlash(trained_drafter())
        decoder = SpeculativeDecoder(TracedFeatures(), draft, num_draft_tokens=3, schedule="constant", **options)
        for seed in (1, 2):
            output = decoder.generate(INPUT_IDS, attention_mask=MASKS, max_new_tokens=20, seed=seed)
            found.append((output.sequences.tolist(), output.stats.accepted_at))
            assert backend.frame_count == (num_graphs if compile else 0)
    assert found[:2] == found[2:] and sum(found[0][1]) > 0


def test_bfloat16() -> None:
    target = tiny("llama").bfloat16()
    head = new_head(**SLIDING)
    draft = DFlash(DFlashHead(head.config).bfloat16())
    draft.head.load_state_dict(head.state_dict())
    decoder = SpeculativeDecoder(target, draft, schedule="constant", sampling=MIXED)
    output = decoder.generate(INPUT_IDS, attention_mask=MASKS, max_new_tokens=9, seed=1)
    assert draft._caches[0].keys.dtype == torch.bfloat16 and output.lengths.tolist() == [16, 10, 13]


def test_what_a_cuda_graph_reads_stays_in_its_place() -> None:
    draft = DFlash(trained_drafter())
    decoder = SpeculativeDecoder(shared_tiny("llama"), draft, schedule="constant", sampling=GREEDY, max_length=40)
    places = []
    for _ in range(2):
        decoder.generate(INPUT_IDS, attention_mask=MASKS, max_new_tokens=5)
        tensors = static_tensors_of(decoder.target, draft)
        assert tensors is not None
        places.append([tensor.data_ptr() for tensor in tensors])
        own = [draft.head.fc.weight, *(each for cache in draft._caches for each in (cache.keys, cache.values))]
        assert len(own) == 5 and {tensor.data_ptr() for tensor in own} <= set(places[-1])
    assert places[0] == places[1]


def test_sampled_text_has_the_law_of_the_target(report: Report) -> None:
    model = tiny_transformer()
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 8) | {"vocab_size": V, "num_target_layers": None}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    inner = {"block_size": 3, "mask_token_id": V - 1, "target_layer_ids": [0]}
    draft = DFlash(new_head(**sizes, dflash_config=inner).float())
    tokens = first_tokens(model, draft, 2, 0.8, FEWER_TRIALS)
    expect_laws(report, "loop, DFlash", p_values(tokens, model_laws(model, 0.8)))
