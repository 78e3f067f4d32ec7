"""P-EAGLE heads, and EAGLE-3 heads of several layers and of DeepSpec, in the loop: what they draft is what a plain
computation over the whole text gives, and nothing but speed depends on it. Laws, wrong files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import expect_caught, expect_laws
from report import Report
from tiny_checkpoints import check_refilled_rows, with_layers
from tiny_eagle3 import (
    AMAZON,
    DEEPSPEC,
    IDS,
    METHOD,
    PEAGLE,
    SLIDING,
    SPECULATORS,
    is_parallel,
    new_weights,
    plain_drafts,
    saved,
)
from tiny_eagle3 import new_head as new_eagle3_head
from tiny_laws import FEWER_TRIALS, V, first_tokens, model_laws, p_values, tiny_transformer
from tiny_loops import GREEDY, Given, Recording, decode, expected_rows, new_tokens
from tiny_models import PROMPTS, VOCAB, TracedFeatures, padded, raised, shared_tiny
from torch._dynamo.testing import CompileCounterWithBackend

from torch_specops import SamplingParams, SpeculativeDecoder, compilation
from torch_specops.compilation import compile_piece
from torch_specops.drafts import DFlash, Draft, Eagle3, PEagle
from torch_specops.drafts.eagle3_files import read_config
from torch_specops.drafts.eagle3_head import Eagle3Head
from torch_specops.drafts.layers import SUPPORTED, UNSCALED

INPUT_IDS, ATTENDED = padded(PROMPTS, "left")
MIXED = SamplingParams(temperature=[0.0, 1.0, 0.7])


VARIANTS: dict[str, dict[str, Any]] = {
    "EAGLE-3.1, three layers": with_layers(SPECULATORS, **SLIDING) | {"fc_norm": True, "norm_output": True},
    "EAGLE-3, DeepSpec": DEEPSPEC,
    "P-EAGLE, three layers": with_layers(PEAGLE, **SLIDING) | {"norm_before_residual": True, "norm_output": True},
    "P-EAGLE, Amazon": AMAZON,
}


class OneByOne(Recording, Eagle3):
    pass


class AtOnce(Recording, PEagle):
    pass


def recorder(raw: dict[str, Any], folder: Path, sampled: bool = True) -> Any:
    target = shared_tiny("llama")
    if not is_parallel(raw):
        return OneByOne.from_pretrained(saved(raw, folder / "head"), target)
    return AtOnce.from_pretrained(saved(raw, folder / "head"), target, sampled=sampled)


def check_drafts(raw: dict[str, Any], draft: Any, ends: list[int]) -> None:
    """Compare all that was drafted within texts of these lengths."""
    weights, checked = new_weights(raw), 0
    for tokens, lengths, proposed in draft.seen:
        for row, length in enumerate(lengths.tolist()):
            if not 2 <= length < ends[row]:
                continue
            expected = plain_drafts(raw, weights, shared_tiny("llama"), tokens[row, :length], proposed.tokens[row])
            torch.testing.assert_close(proposed.logits[row], expected, rtol=1e-4, atol=1e-4)
            checked += 1
    assert checked > 10


@pytest.mark.parametrize(
    ("variant", "counts", "compiled"),
    [
        ("EAGLE-3.1, three layers", [3, 1, 0, 2], False),
        ("EAGLE-3, DeepSpec", [3], False),
        # Fewer drafts after more, and steps without any.
        ("P-EAGLE, three layers", [4, 1, 5, 0, 0, 2, 0, 1], False),
        ("P-EAGLE, three layers", [2, 1, 2, 0, 0, 2, 0, 1], True),
        ("P-EAGLE, Amazon", [3], False),
    ],
)
def test_drafts_are_those_of_a_plain_computation(
    variant: str, counts: list[int], compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "compile_piece", lambda function, **options: function)
    raw, draft = VARIANTS[variant], recorder(VARIANTS[variant], tmp_path)
    decoder = SpeculativeDecoder(
        shared_tiny("llama"), draft, schedule=Given(counts), sampling=MIXED, verify="exact", compile=compiled
    )
    # The second batch begins with what the first one left.
    for limits in ((17, 9, 13), (12, 15, 4)):
        output = decoder.generate(INPUT_IDS, attention_mask=ATTENDED, max_new_tokens=limits, seed=4)
        assert new_tokens(output)[0] == expected_rows(17)[0][: limits[0]]
        check_drafts(raw, draft, output.lengths.tolist())


@pytest.mark.parametrize("variant", ["EAGLE-3.1, three layers", "P-EAGLE, three layers"])
def test_rows_that_are_filled_again(variant: str, tmp_path: Path) -> None:
    raw, target = VARIANTS[variant], shared_tiny("llama")
    draft = recorder(raw, tmp_path)
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=4, sampling=GREEDY, verify="exact", compile=False)
    check_refilled_rows(decoder, target)
    # A row that has ended keeps its text until another one comes.
    check_drafts(raw, draft, [99, 99])


def test_likeliest_drafts_follow_the_penalties(tmp_path: Path) -> None:
    raw, target = VARIANTS["P-EAGLE, Amazon"], shared_tiny("llama")
    draft = recorder(raw, tmp_path, sampled=False)
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.3)
    assert draft.deterministic and draft.default_draft_tokens == 7
    assert new_tokens(decode(draft, 4, sampling=sampling)) == new_tokens(decode(None, 0, sampling=sampling))
    for tokens, lengths, proposed in draft.seen:
        assert proposed.logits is None
        text, drafts = tokens[0, : lengths[0]], proposed.tokens[0]
        logits = plain_drafts(raw, new_weights(raw), target, text, drafts)
        for index, found in enumerate(logits.clone()):
            used = torch.cat([text, drafts[:index]]).unique()
            found[used] = torch.where(found[used] > 0, found[used] / 1.3, found[used] * 1.3)
            assert int(found.argmax()) == int(drafts[index])


@pytest.mark.parametrize(
    ("variant", "sampled", "verify"),
    [
        ("EAGLE-3.1, three layers", True, "gumbel"),
        ("P-EAGLE, three layers", True, "gumbel"),
        ("P-EAGLE, three layers", False, None),
    ],
)
def test_the_text_is_that_of_no_draft(variant: str, sampled: bool, verify: str | None, tmp_path: Path) -> None:
    """With drafts that share the target's noise, or are not sampled."""
    draft, found = recorder(VARIANTS[variant], tmp_path, sampled=sampled), []
    for source, schedule in ((None, None), (draft, Given([4, 2]))):
        options: dict[str, Any] = {"sampling": SamplingParams(temperature=[0.5, 1.0, 0.7]), "verify": verify}
        decoder = SpeculativeDecoder(shared_tiny("llama"), source, schedule=schedule, **options)
        output = decoder.generate(INPUT_IDS, attention_mask=ATTENDED, max_new_tokens=20, seed=3)
        found.append(new_tokens(output))
    assert found[0] == found[1] and output.stats.num_accepted > 0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("sampled", "num_graphs"),
    [
        # The forward, the verification; and a draft, the uniforms.
        (False, 2),
        pytest.param(True, 4, marks=pytest.mark.slow),
    ],
)
def test_compiled_steps_give_the_eager_tokens(
    sampled: bool, num_graphs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a second batch compiles nothing."""
    backend = CompileCounterWithBackend("eager")
    monkeypatch.setattr(compilation, "compile_piece", partial(compile_piece, backend=backend))
    found = []
    for compile in (False, True):
        draft = recorder(VARIANTS["P-EAGLE, Amazon"], tmp_path, sampled=sampled)
        options: dict[str, Any] = {"sampling": MIXED, "schedule": "constant", "compile": compile}
        decoder = SpeculativeDecoder(TracedFeatures(), draft, num_draft_tokens=4, **options)
        for seed in (1, 2):
            output = decoder.generate(INPUT_IDS, attention_mask=ATTENDED, max_new_tokens=12, seed=seed)
            found.append((output.sequences.tolist(), output.stats.accepted_at))
            assert backend.frame_count == (num_graphs if compile else 0)
    assert found[:2] == found[2:] and sum(found[0][1]) > 0


# The law.


def small_head() -> Eagle3Head:
    """Of a model with V tokens; it lacks two of them."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "target_hidden_size"), 8)
    sizes |= {"num_heads": 1, "num_key_value_heads": 1, "vocab_size": V, "draft_vocab_size": V - 2}
    head = new_eagle3_head(2, **sizes, feature_layers=(0,), windows=(None, None), mask_token_id=V - 1).float()
    head.draft_of_target = torch.tensor([0, -1, 1, 2, -1, 3])
    return head


class AlwaysTheFirst(PEagle):
    """Reports for every draft the logits of the first one."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert draft.logits is not None
        return Draft(draft.tokens, draft.logits[:, :1].expand_as(draft.logits).contiguous())


def test_sampled_text_has_the_law_of_the_target(report: Report) -> None:
    model = tiny_transformer()
    tokens = first_tokens(model, PEagle(small_head(), sampled=True), 3, 0.8, FEWER_TRIALS)
    expect_laws(report, "loop, P-EAGLE", p_values(tokens, model_laws(model, 0.8)))


def test_the_law_test_catches_wrong_logits(report: Report) -> None:
    model = tiny_transformer()
    tokens = first_tokens(model, AlwaysTheFirst(small_head(), sampled=True), 3, 0.8, FEWER_TRIALS)
    expect_caught(report, "loop, P-EAGLE, the first draft's logits", p_values(tokens, model_laws(model, 0.8)))


# Files.


def test_what_the_config_decides() -> None:
    for raw, count, windows in (
        (VARIANTS["EAGLE-3.1, three layers"], 3, (7, None, 7)),
        (DEEPSPEC, 7, (None,)),
        (PEAGLE, 3, (None, None, None)),
        (AMAZON, None, (None, None)),
    ):
        config = read_config(raw, is_parallel(raw))
        assert (config.num_drafts, config.windows) == (count, windows)
        assert config.mask_token_id == (VOCAB - 1 if is_parallel(raw) else None)
    config = read_config(DEEPSPEC)
    assert config.feature_layers == (1,) and config.normalises_queries and not config.norm_before_feedback
    of_classes: list[tuple[Any, type[Exception], str]] = [
        (
            (PEagle, new_eagle3_head()),
            ValueError,
            "head: expected a P-EAGLE head, with a mask_token_id, got an EAGLE-3",
        ),
        ((Eagle3, new_eagle3_head(mask_token_id=9)), ValueError, "head: expected an EAGLE-3 head, got a P-EAGLE head"),
        ((DFlash, new_eagle3_head()), TypeError, "head: expected DFlashHead, got .*Eagle3Head"),
        *(
            ((kind, "head"), TypeError, rf"head: expected .*Head, got .*str'>; {kind.__name__}.from_pretrained\(folder")
            for kind in (DFlash, Eagle3, PEagle)
        ),
    ]
    assert raised(lambda case: case[0](case[1]), of_classes) == []
    # As NeMo writes it.
    nemo = AMAZON | {"parallel_drafting": True, "pard_token": VOCAB - 1, "ptd_token_id": None}
    assert read_config(nemo, True) == read_config(AMAZON | {"pard_token": VOCAB - 1}, True)


def test_configs_that_are_not_known() -> None:
    def method(**fields: Any) -> dict[str, Any]:
        return SPECULATORS | {"speculators_config": {"proposal_methods": [METHOD | fields]}}

    expected, rope = "config: expected ", {"sliding_attention": {"rope_theta": 9.0}}
    eagle = AMAZON | {"ptd_token_id": None}
    cases: list[tuple[Any, type[Exception], str]] = [
        ((raw, parallel), ValueError, message)
        for raw, parallel, message in [
            # Other heads.
            (PEAGLE, False, expected + r"architectures \['Llama.* 'eagle3', .* 'peagle' and None; drafts.PEagle reads"),
            (AMAZON, False, expected + ".* with ptd_token_id, None and None; drafts.PEagle reads it"),
            (
                SPECULATORS,
                True,
                expected + ".* with ptd_token_id or .* 'peagle', .* 'eagle3' and None; drafts.Eagle3 reads",
            ),
            (eagle, True, expected + r".*\['LlamaForCausalLMEagle3'\], None and None; drafts.Eagle3 reads it"),
            (DEEPSPEC, True, expected + r".* got \['Qwen3Eagle3Model'\], None .*; drafts.Eagle3 reads it"),
            (DEEPSPEC | {"architectures": ["Qwen3DSparkModel"]}, False, expected + ".*; drafts.DFlash reads it"),
            (DEEPSPEC | {"architectures": ["Gemma4Eagle3Model"]}, False, expected + r".*\['Gemma4Eagle3Model'\]"),
            (
                SPECULATORS | {"speculators_model_type": "mtp"},
                True,
                expected + ".*'mtp'.*; stitch .* and use drafts.MTP",
            ),
            (DEEPSPEC | {"model_type": "gemma4"}, False, expected + "model_type 'qwen3', got 'gemma4'"),
            (with_layers(PEAGLE, model_type="gpt_oss"), True, expected + "model_type 'llama' or .* got 'gpt_oss'"),
            (DEEPSPEC | {"num_hidden_layers": 2}, False, expected + "num_hidden_layers 1, got 2"),
            # Fields that change what is computed.
            *((PEAGLE | {name: 9}, True, expected + f"{name} .*, got 9") for name in SUPPORTED),
            *((DEEPSPEC | {name: 9}, False, expected + f"{name} .*, got 9") for name in (*SUPPORTED, *UNSCALED)),
            (eagle | {"is_neox_style": False}, False, expected + "is_neox_style None or True, got False"),
            (eagle | {"quantization_config": {"bits": 4}}, False, expected + "quantization_config None, got"),
            (with_layers(PEAGLE, rope_parameters=rope), True, "config: rope_parameters has sliding_attention"),
            (eagle | {"parallel_drafting": True}, False, expected + "parallel_drafting None or False, got True"),
            # Rules that change the text.
            (method(accept_tolerance=0.1), False, expected + "accept_tolerance None or 0, got 0.1"),
            (method(verifier_accept_k=5), False, expected + "verifier_accept_k None or 0 or 1, got 5"),
            # Missing, wrong, contradicting.
            (PEAGLE | {"mask_token_id": None}, True, expected + "an int >= 0 as mask_token_id, got None"),
            (AMAZON | {"ptd_token_id": VOCAB}, True, expected + "ptd_token_id < 60, the tokens, got 60"),
            (AMAZON | {"pard_token": 3}, True, expected + "pard_token None or 59, got 3"),
            (AMAZON | {"mask_token_id": 3}, True, expected + "mask_token_id None or 59, got 3"),
            (SPECULATORS | {"mask_token_id": 3}, False, expected + "mask_token_id None, got 3"),
            (
                with_layers(PEAGLE, mask_token_id=3),
                True,
                "config: mask_token_id is 59, and 3 in transformer_layer_conf",
            ),
            (PEAGLE | {"num_attention_heads": 2}, True, "config: num_attention_heads is 4, and 2 in the top level"),
            (DEEPSPEC | {IDS: [0]}, False, expected + rf"{IDS} None or \[1\], got \[0\]"),
            (DEEPSPEC | {"target_layer_ids": None}, False, expected + "a list of layers as target_layer_ids, got None"),
            (DEEPSPEC | {"eagle_config": {}}, False, expected + "eagle_config None, got {}"),
            (method(speculative_tokens=0), False, expected + "an int >= 1 as speculative_tokens, got 0"),
            (with_layers(SPECULATORS, layer_types=["full_attention"]), False, expected + "layer_types of length 3"),
        ]
    ]
    assert raised(lambda case: read_config(*case), cases) == []


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    def read(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
        raw, changes = case
        weights = {name: weight for name, weight in (new_weights(raw) | changes).items() if weight is not None}
        kind: Any = PEagle if is_parallel(raw) else Eagle3
        kind.from_pretrained(saved(raw, tmp_path, weights), shared_tiny("llama"))

    norm, small = "layers.2.input_layernorm.weight", torch.zeros(2)
    other = "draft: it is for another target: "
    cases: list[tuple[Any, type[Exception], str]] = [
        (case, ValueError, "(?s)" + message)
        for case, message in [
            ((PEAGLE, {"mask_hidden": None}), '.*Missing .*"mask_hidden"'),
            ((AMAZON, {"mask_hidden": small}), ".*size mismatch for mask_hidden"),
            ((PEAGLE, {"mask_hidden": torch.zeros(64, 1, 1)}), ".*size mismatch for mask_hidden"),
            ((SPECULATORS, {"mask_hidden": small}), '.*Unexpected .*"mask_hidden"'),
            ((SPECULATORS, {norm: None}), f'.*Missing .*"{norm}"'),
            ((PEAGLE, {"layers.3.mlp.up_proj.weight": small}), '.*Unexpected .*"layers.3.mlp.up_proj.weight"'),
            ((AMAZON, {"layers.0.hidden_norm.weight": small}), ".* midlayer.hidden_norm.weight under two names"),
            ((PEAGLE, {"d2t": None}), "draft: the head has 24 of 60 tokens and lacks the weights d2t"),
            ((with_layers(PEAGLE, num_target_layers=3), {}), other + "num_target_layers 3, the target has 2"),
            ((DEEPSPEC | {"num_target_layers": 3}, {}), other + "num_target_layers 3, the target has 2"),
            ((PEAGLE | {IDS: [0, 2]}, {}), other + r"it reads layers \[0, 2\], the target has layers 0 to 1"),
        ]
    ]
    assert raised(read, cases) == []
