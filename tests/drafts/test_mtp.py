"""MTP layers of a checkpoint in the loop: what they draft is what a plain computation over the whole text gives, and
what transformers drafts with them; no weight is left out without a word; and nothing but speed depends on them."""

from __future__ import annotations

import importlib.util
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import expect_caught, expect_laws
from marks import slow
from report import Report
from tiny_laws import FEWER_TRIALS, V, first_tokens, model_laws, p_values
from tiny_loops import GREEDY, Given, Recording, new_tokens, streamed
from tiny_models import padded
from tiny_mtp import TinyMtp, is_known, tiny_mtp, tiny_step3p7
from tiny_requests import texts_alone
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.generation.candidate_generator import MTPCandidateGenerator

import torch_specops
from torch_specops import Request, SamplingParams, SpeculativeDecoder, compilation
from torch_specops.compilation import compile_piece
from torch_specops.decode import GenerationOutput
from torch_specops.decode.kept import _kept
from torch_specops.drafts import MTP, Draft
from torch_specops.hf import custom_generate
from torch_specops.hf.door import generate as door

# So few tokens that some drafts of random layers are accepted.
TOKENS = 8
PROMPTS = ([1, 3, 5, 2, 3, 5, 4], [1], [1, 6, 4, 7])
INPUT_IDS, MASK = padded(PROMPTS, "left")
MIXED = SamplingParams(temperature=[0.0, 1.0, 0.7])


class Recorder(Recording, MTP):
    pass


def check_drafts(tiny: TinyMtp, draft: Recorder, ends: list[int]) -> int:
    """Compare all that was drafted within texts of these lengths; the number of drafts."""
    # The states of hybrids are float32 inside transformers.
    tolerance = 1e-3 if "linear_attention" in getattr(tiny.model.config, "layer_types", []) else 1e-4
    checked = 0
    for tokens, lengths, proposed in draft.seen:
        assert proposed.logits is not None and proposed.lse is not None
        for row, length in enumerate(lengths.tolist()):
            if 2 <= length < ends[row]:
                expected = tiny.plain_logits(tokens[row, :length], proposed.tokens[row])
                torch.testing.assert_close(proposed.logits[row], expected, rtol=tolerance, atol=tolerance)
                checked += len(expected)
    return checked


def decoded(
    tiny: TinyMtp, draft: Any, compile: bool = False, new: int | tuple[int, ...] = (18, 8, 13), **options: Any
) -> GenerationOutput:
    decoder = SpeculativeDecoder(tiny.model, draft, compile=compile, **({"sampling": MIXED} | options))
    return decoder.generate(INPUT_IDS, attention_mask=MASK, max_new_tokens=new, seed=4)


PAUSES = [3, 1, 5, 0, 0, 2, 0, 1]


@pytest.mark.parametrize(
    ("kind", "depth", "counts", "compiled"),
    [
        slow("deepseek_v3", 2, PAUSES, False),
        slow("glm4_moe", 1, [1], True),
        ("glm4_moe", 3, PAUSES, False),
        slow("mellum", 1, [3], False),
        ("qwen2", 3, PAUSES, True),
        slow("qwen3_next", 1, [2], False),
        ("qwen3_5_text", 2, PAUSES, False),
        slow("qwen3_5_moe_text", 1, [1, 0], False),
    ],
)
def test_drafts_are_those_of_a_plain_computation(
    kind: str, depth: int, counts: list[int], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's, in every step, from nothing but its text: K below, at and above the number of layers, and after
    steps without drafts."""
    monkeypatch.setattr(compilation, "compile_piece", lambda function, **options: function)
    tiny = tiny_mtp(kind, depth, vocab=TOKENS)
    if kind == "mellum" and not is_known(kind):
        with pytest.raises(ValueError, match="the config of mellum does not say what its MTP layers attend to"):
            MTP.from_pretrained(tiny.model)
        return
    draft = Recorder.from_pretrained(tiny.model)
    # The second batch begins with what the first one left.
    for _ in range(2):
        output = decoded(tiny, draft, compiled, schedule=Given(counts))
        assert output.stats.num_accepted > 0
        assert check_drafts(tiny, draft, output.lengths.tolist()) > 20
        # No draft reads what is left, whatever it is.
        for layer in draft._caches:
            layer.keys.fill_(torch.nan)


def test_drafts_of_refilled_rows() -> None:
    tiny = tiny_mtp("glm4_moe", 3, vocab=TOKENS)
    draft = Recorder.from_pretrained(tiny.model)
    decoder = SpeculativeDecoder(tiny.model, draft, compile=False, sampling=GREEDY)
    assert decoder.schedule.buckets == (3,)
    requests = [Request(torch.tensor([*PROMPTS[i % 3], 1 + i]), 5 + 3 * i) for i in range(6)]
    for done in decoder.generate_many(requests, batch_size=2, max_length=40):
        prompt = torch.tensor([[*PROMPTS[done.index % 3], 1 + done.index]])
        expected = tiny.model.generate(prompt, do_sample=False, max_new_tokens=5 + 3 * done.index)
        assert torch.equal(done.tokens, expected[0])
    assert check_drafts(tiny, draft, [30, 30]) > 20


def test_streams_and_sessions_give_the_texts_of_generate() -> None:
    """Of requests that begin, end and are cancelled while others go on."""
    tiny = tiny_mtp("qwen2", 2, vocab=TOKENS)
    decoder = SpeculativeDecoder(tiny.model, MTP.from_pretrained(tiny.model), num_draft_tokens=3, compile=False)
    limits, temperatures = [14, 3, 20, 9, 6], [0.0, 1.0, 0.7, 1.0, 0.0]
    requests = [
        Request([*PROMPTS[row % 3], row], limits[row], SamplingParams(temperature=temperatures[row]), seed=[row])
        for row in range(5)
    ]
    expected = texts_alone(decoder, requests)
    ids, mask = padded([request.input_ids for request in requests], "left")
    batch: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": limits, "seed": list(range(5))}
    steps = list(decoder.stream(ids, sampling=SamplingParams(temperature=temperatures), **batch))
    assert streamed(steps, 5) == expected
    with decoder.session(2, max_length=40) as session:
        first = [session.submit(request) for request in requests[:3]]
        session.step()
        first[0].cancel()
        later = [session.submit(request) for request in (*requests[3:], requests[0])]
        while not all(handle.done for handle in (*first, *later)):
            session.step()
    cancelled, *found = [handle.result().new_tokens.tolist() for handle in (*first, *later)]
    assert 0 < len(cancelled) < limits[0] and cancelled == expected[0][: len(cancelled)]
    assert found == [*expected[1:], expected[0]]
    assert session.stats.num_accepted > 0


@pytest.mark.parametrize(
    ("kind", "depth"), [("deepseek_v3", 2), slow("glm4_moe", 1), ("glm4_moe", 3), ("mellum", 1), ("step3p7", 2)]
)
def test_drafts_are_those_of_transformers(
    kind: str, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ragged batch, and each of its rows alone with `use_mtp` of transformers."""
    if not is_known(kind):
        pytest.skip("before transformers had MTP of this family")
    model = tiny_step3p7(tmp_path, TOKENS) if kind == "step3p7" else tiny_mtp(kind, depth, vocab=TOKENS).model
    theirs = {}
    get_candidates = MTPCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: Tensor, *arguments: Any, **named: Any) -> Any:
        candidates, logits = get_candidates(self, input_ids, *arguments, **named)
        if logits is not None:
            theirs[tuple(input_ids[0].tolist())] = candidates[0, input_ids.shape[1] :], logits[0]
        return candidates, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
    # transformers reads no prompt that is shorter than there are layers.
    prompts = [[*prompt, *[2] * (depth - len(prompt))] for prompt in PROMPTS]
    expected = []
    for prompt in prompts:
        alone = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20, use_mtp=True)
        expected.append(alone[0, len(prompt) :].tolist())
    input_ids, mask = padded(prompts, "left")
    draft = Recorder.from_pretrained(model)
    decoder = SpeculativeDecoder(model, draft, compile=False, sampling=GREEDY)
    output = decoder.generate(input_ids, attention_mask=mask, max_new_tokens=20)
    assert new_tokens(output) == expected
    found = 0
    for tokens, lengths, proposed in draft.seen:
        assert proposed.logits is not None
        for row, length in enumerate(lengths.tolist()):
            own = theirs.get(tuple(tokens[row, :length].tolist()))
            if own is None or length > output.lengths[row]:
                continue
            # At the end of a text ours drafts fewer.
            count = proposed.tokens.shape[1]
            assert torch.equal(proposed.tokens[row], own[0][:count])
            torch.testing.assert_close(proposed.logits[row], own[1][:count].float(), rtol=1e-4, atol=1e-4)
            found += 1
    assert found > 20


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("one_graph", "depth"), [(False, 1), slow(True, 2)])
def test_compiled_steps_give_the_eager_tokens(one_graph: bool, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a second batch compiles nothing."""
    backend = CompileCounterWithBackend("eager")
    monkeypatch.setattr(compilation, "compile_piece", partial(compile_piece, backend=backend))
    tiny, found, counts = tiny_mtp("qwen2", depth, vocab=TOKENS), [], []
    for compile in (False, True, True):
        if not (compile and found[1:]):
            options: dict[str, Any] = {"num_draft_tokens": depth + 1, "sampling": MIXED, "one_graph": one_graph}
            decoder = SpeculativeDecoder(tiny.model, MTP.from_pretrained(tiny.model), compile=compile, **options)
        output = decoder.generate(INPUT_IDS, attention_mask=MASK, max_new_tokens=15, seed=5)
        found.append((output.sequences.tolist(), output.stats.accepted_at))
        counts.append(backend.frame_count)
    assert found[0] == found[1] == found[2]
    assert counts[0] == 0 < counts[1] == counts[2]


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_5_text"])
def test_bfloat16(kind: str) -> None:
    """Logits are close to those of float64. Texts in 16 bits nearly tie."""
    tiny = TinyMtp(kind, 1, vocab=TOKENS, dtype=torch.bfloat16)
    draft = Recorder.from_pretrained(tiny.model)
    assert draft.head.layers[0].eh_proj.weight.dtype == torch.bfloat16
    # As in the target's own layers.
    assert kind != "glm4_moe" or draft.head.layers[0].block.mlp.gate.e_score_correction_bias.dtype == torch.float32
    decoded(tiny, draft, new=3, sampling=GREEDY)
    check_rounded(kind, 1, draft)
    # Layers may be wider than their target.
    assert MTP.from_pretrained(tiny.model, dtype=torch.float32).head.layers[0].eh_proj.weight.dtype == torch.float32


def check_rounded(kind: str, depth: int, draft: Recorder) -> None:
    """The first drafts of a draft that computed in bfloat16, beside those of float64."""
    wide = tiny_mtp(kind, depth, vocab=TOKENS)
    exact = Recorder.from_pretrained(wide.model)
    decoded(wide, exact, new=3, sampling=GREEDY)
    own, expected = draft.seen[0][2].logits, exact.seen[0][2].logits
    assert own is not None and expected is not None and own.dtype == torch.bfloat16
    # Later drafts may follow others.
    torch.testing.assert_close(own[:, 0].float(), expected[:, 0], rtol=0.1, atol=0.1 * float(expected.std()))


def test_other_attention_and_autocast() -> None:
    tiny = TinyMtp("qwen2", 2, vocab=TOKENS)
    tiny.model.set_attn_implementation("eager")
    draft = Recorder.from_pretrained(tiny.model)
    assert check_drafts(tiny, draft, decoded(tiny, draft).lengths.tolist()) > 20
    tiny = TinyMtp("qwen2", 2, vocab=TOKENS, dtype=torch.float32)
    draft = Recorder.from_pretrained(tiny.model)
    with torch.autocast("cpu", torch.bfloat16):
        decoded(tiny, draft, new=3, sampling=GREEDY)
    check_rounded("qwen2", 2, draft)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_a_quantised_target() -> None:
    from torch_specops.drafts import quantised_copy

    tiny = TinyMtp("qwen2", 1, vocab=TOKENS, dtype=torch.float32)
    tiny.model = quantised_copy(tiny.model, "int8")
    output = decoded(tiny, MTP.from_pretrained(tiny.model), sampling=GREEDY)
    assert new_tokens(output) == new_tokens(decoded(tiny, None, sampling=GREEDY))


# The law.


class OfOtherDepth(MTP):
    """Its first two drafts have each other's logits."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert draft.logits is not None and draft.lse is not None
        return Draft(draft.tokens, draft.logits.flip(1), draft.lse.flip(1))


def test_sampled_text_has_the_law_of_the_target(report: Report) -> None:
    tiny = tiny_mtp("qwen2", 1, vocab=V)
    laws = model_laws(tiny.model, 0.8)
    for draft, expect, trials in ((MTP, expect_laws, FEWER_TRIALS), (OfOtherDepth, expect_caught, FEWER_TRIALS // 2)):
        tokens = first_tokens(tiny.model, draft.from_pretrained(tiny.model), 2, 0.8, trials)
        expect(report, f"loop, {draft.__name__}", p_values(tokens, laws))


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.filterwarnings("ignore:max_new_tokens.*text may be poor:UserWarning")
def test_a_target_whose_angles_change_with_the_text() -> None:
    """Its own are not disturbed, and a row's drafts do not depend on its neighbours."""
    tiny = TinyMtp("qwen2", 2, vocab=TOKENS, rope_parameters=DYNAMIC, max_position_embeddings=16)
    greedy = new_tokens(decoded(tiny, MTP.from_pretrained(tiny.model), sampling=GREEDY))
    for prompt, row in zip(PROMPTS, greedy, strict=True):
        expected = tiny.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=len(row))
        assert row == expected[0, len(prompt) :].tolist()
    tiny = TinyMtp("qwen2", 2, vocab=TOKENS, rope_parameters=LONGROPE, max_position_embeddings=64)
    decoder = SpeculativeDecoder(tiny.model, MTP.from_pretrained(tiny.model), compile=False)
    output = decoder.generate(INPUT_IDS, attention_mask=MASK, max_new_tokens=(30, 12, 21), seed=4)
    for prompt, row, seed in zip(PROMPTS, new_tokens(output), output.stats.seeds, strict=True):
        alone = decoder.generate(torch.tensor([prompt]), max_new_tokens=len(row), seed=[seed])
        assert new_tokens(alone) == [row]


def test_a_pickled_draft_leaves_its_target_behind() -> None:
    tiny = tiny_mtp("qwen2", 1, vocab=TOKENS)
    draft = MTP.from_pretrained(tiny.model)
    expected = new_tokens(decoded(tiny, draft, sampling=GREEDY))
    copied = pickle.loads(pickle.dumps(draft))
    assert not hasattr(copied, "_target") and hasattr(draft, "_target")
    assert new_tokens(decoded(tiny, copied, sampling=GREEDY)) == expected


# transformers' own generate.


def test_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any batch, with layers that are read once per model."""
    for kind in ("glm4_moe", "qwen3_5_text"):
        tiny, num_reads = tiny_mtp(kind, 2, vocab=TOKENS), []
        read = door.read_mtp_head
        monkeypatch.setattr(door, "read_mtp_head", lambda *given, read=read, n=num_reads: n.append(1) or read(*given))
        options: dict[str, Any] = {"attention_mask": MASK, "do_sample": False, "max_new_tokens": 12}
        expected = tiny.model.generate(INPUT_IDS, **options)
        options |= {"custom_generate": custom_generate, "use_mtp": True, "return_dict_in_generate": True}
        for _ in range(2):
            output = tiny.model.generate(INPUT_IDS, **options)
            assert torch.equal(output.sequences, expected)
            assert output.stats.num_proposed > 0 and len(output.stats.accepted_at) == 2
        # A compiled decoder is kept for the next call.
        monkeypatch.setattr(compilation, "compile_piece", lambda function, **options: function)
        kept = []
        for _ in range(2):
            assert torch.equal(tiny.model.generate(INPUT_IDS, **options, compile=True).sequences, expected)
            kept.append(_kept[tiny.model].decoder)
        assert kept[0] is kept[1] and len(num_reads) == 1
    with pytest.raises(ValueError, match="use_mtp: expected None beside draft_model, got True"):
        tiny.model.generate(INPUT_IDS, **options, draft_model=torch_specops.drafts.PromptLookup())
    several = options | {"do_sample": True, "num_return_sequences": 2, "seed": 3, "return_dict_in_generate": False}
    # transformers refuses the two together.
    texts = tiny_mtp("glm4_moe", 2, vocab=TOKENS).model.generate(INPUT_IDS, **several)
    assert texts.shape[0] == 6 and torch.equal(texts[::2, : INPUT_IDS.shape[1]], INPUT_IDS)


class OfUser(MTP):
    pass


def test_mtp_decoder_of_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "compile_piece", lambda function, **options: function)
    tiny = tiny_mtp("qwen2", 2, vocab=TOKENS)
    call: dict[str, Any] = {"attention_mask": MASK, "do_sample": False, "max_new_tokens": 6, "compile": True}
    first = OfUser.from_pretrained(tiny.model)
    second, kept = OfUser(first.head), []
    for draft in (first, second, first, MTP(first.head), MTP(first.head)):
        tiny.model.generate(INPUT_IDS, **call, custom_generate=custom_generate, draft_model=draft)
        kept.append(_kept[tiny.model].decoder)
    assert [decoder.draft for decoder in kept[:3]] == [first, second, first]
    # Drafts of our own class over the same layers are the same.
    assert type(kept[3].draft) is MTP and kept[3] is kept[4]
