"""Drafters of speculators, DeepSpec and SpecForge, and DFlash2 drafters, in the loop: what they draft is what a plain
computation over the whole text gives, draft after draft, and nothing but speed depends on it. Laws, wrong files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chains import expect_caught, expect_laws
from report import Report
from tiny_checkpoints import check_refilled_rows, with_layers
from tiny_dspark import (
    BLOCK,
    DEEPSPEC,
    DFLASH,
    DFLASH2,
    DSPARK,
    KEPT,
    MASK,
    METHOD,
    PARTS,
    ZLAB2,
    new_weights,
    plain_drafts,
    saved,
)
from tiny_laws import FEWER_TRIALS, V, first_tokens, model_laws, p_values, tiny_transformer
from tiny_loops import GREEDY, Given, Recording, decode, expected_rows, new_tokens
from tiny_models import PROMPTS, VOCAB, TracedFeatures, padded, raised, shared_tiny
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from torch_specops import SamplingParams, SpeculativeDecoder, compilation
from torch_specops.compilation import compile_piece
from torch_specops.drafts import DFlash, Draft
from torch_specops.drafts.dflash_files import read_drafter, read_drafter_config
from torch_specops.drafts.dflash_head import DFlashHead
from torch_specops.drafts.layers import SUPPORTED, UNSCALED

INPUT_IDS, ATTENDED = padded(PROMPTS, "left")
MIXED = SamplingParams(temperature=[0.0, 1.0, 0.7])
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "rnn": with_layers(DSPARK, **SLIDING) | {"markov_head_type": "rnn", "draft_vocab_size": KEPT},
    "rnn, from the masks": DSPARK | {"markov_head_type": "rnn", "sample_from_anchor": False},
    "gated": DSPARK | {"markov_head_type": "gated", "confidence_head_with_markov": False},
    "DeepSpec": DEEPSPEC,
    "DFlash": with_layers(DFLASH, **SLIDING) | {"draft_vocab_size": KEPT},
    "DFlash, not causal": with_layers(DFLASH, **SLIDING) | {"sliding_window_non_causal": True},
    "DFlash2": with_layers(DFLASH2, **SLIDING),
    "DFlash2, z-lab": ZLAB2 | SLIDING,
}
OTHER_PARTS = ("markov_rank", "enable_confidence_head", "conv_kernel_size", "selector_rank")


class Recorder(Recording, DFlash):
    pass


def recorder(raw: dict[str, Any], tmp_path: Path, **options: Any) -> Recorder:
    return Recorder.from_pretrained(saved(raw, tmp_path / "drafter"), shared_tiny("llama"), **options)


def check_drafts(raw: dict[str, Any], draft: Recorder, ends: list[int]) -> None:
    """Compare all that was drafted within texts of these lengths."""
    weights, checked = new_weights(raw), 0
    for tokens, lengths, proposed in draft.seen:
        assert proposed.logits is not None and proposed.lse is not None
        for row, length in enumerate(lengths.tolist()):
            if not 2 <= length < ends[row]:
                continue
            drafts = proposed.tokens[row]
            logits, confidences = plain_drafts(raw, weights, shared_tiny("llama"), tokens[row, :length], drafts)
            count = int((drafts >= 0).cumprod(0).sum())
            below = (confidences < draft.confidence).nonzero()
            assert count == (int(below[0]) if len(below) > 0 else len(drafts))
            torch.testing.assert_close(proposed.logits[row, :count].double(), logits[:count], rtol=1e-4, atol=1e-4)
            checked += count
    assert checked > 30


@pytest.mark.parametrize(
    ("variant", "confidence", "counts", "compiled"),
    [
        ("rnn", 0.4, [BLOCK], False),
        # Fewer drafts after more, and steps without any.
        ("rnn, from the masks", 0.0, [3, 1, 4, 0, 0, 2, 0, 1], True),
        ("gated", 0.5, [3], False),
        ("DeepSpec", 0.0, [5, 0, 2], False),
        ("DFlash", 0.0, [4], False),
        ("DFlash, not causal", 0.0, [4], False),
        ("DFlash2", 0.0, [3, 1, 4, 0, 0, 2, 0, 1], True),
        ("DFlash2, z-lab", 0.0, [4, 0, 2], False),
    ],
)
def test_drafts_are_those_of_a_plain_computation(
    variant: str, confidence: float, counts: list[int], compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "compile_piece", lambda function, **options: function)
    raw, target = VARIANTS[variant], shared_tiny("llama")
    draft = recorder(raw, tmp_path, sampled=True, confidence=confidence)
    decoder = SpeculativeDecoder(
        target, draft, schedule=Given(counts), sampling=MIXED, verify="exact", compile=compiled
    )
    num_accepted = 0
    # The second batch begins with what the first one left.
    for limits in ((21, 9, 15), (12, 21, 4)):
        output = decoder.generate(INPUT_IDS, attention_mask=ATTENDED, max_new_tokens=limits, seed=4)
        assert new_tokens(output)[0] == expected_rows(21)[0][: limits[0]]
        with torch.inference_mode():
            check_drafts(raw, draft, output.lengths.tolist())
        num_accepted += output.stats.num_accepted
    assert num_accepted > 0


@pytest.mark.parametrize(("variant", "confidence"), [("rnn", 0.4), ("DFlash2, z-lab", 0.0)])
def test_rows_that_are_filled_again(variant: str, confidence: float, tmp_path: Path) -> None:
    raw, target = VARIANTS[variant], shared_tiny("llama")
    draft = recorder(raw, tmp_path, confidence=confidence)
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=4, sampling=GREEDY, verify="exact", compile=False)
    check_refilled_rows(decoder, target, max_length=40)
    with torch.inference_mode():
        # A row that has ended keeps its text until another one comes.
        check_drafts(raw, draft, [99, 99])


@pytest.mark.parametrize(("variant", "confidence"), [("rnn", 0.3), ("DFlash", 0.0)])
def test_the_likeliest_drafts_follow_each_other(variant: str, confidence: float, tmp_path: Path) -> None:
    """Each is the likeliest token after the drafts before it and their penalties, until the confidence is too low."""
    raw, target = VARIANTS[variant], shared_tiny("llama")
    weights = new_weights(raw)
    for penalty in (1.0, 1.3):
        draft = recorder(raw, tmp_path, sampled=False, confidence=confidence)
        sampling = SamplingParams(temperature=0.0, repetition_penalty=penalty)
        assert draft.deterministic
        output = decode(draft, 4, sampling=sampling)
        assert new_tokens(output) == new_tokens(decode(None, 0, sampling=sampling))
        for tokens, lengths, proposed in draft.seen:
            assert proposed.logits is None
            text, drafts = tokens[0, : lengths[0]], proposed.tokens[0]
            count = int((drafts >= 0).cumprod(0).sum())
            with torch.no_grad():
                logits, _ = plain_drafts(raw, weights, target, text, drafts)
            for index in range(count):
                used = torch.cat([text, drafts[:index]]).unique()
                found = logits[index]
                found[used] = torch.where(found[used] > 0, found[used] / penalty, found[used] * penalty)
                assert int(found.argmax()) == int(drafts[index])


def test_what_the_drafter_decides(tmp_path: Path) -> None:
    """How many drafts a step has, and whether they are sampled."""
    target = shared_tiny("llama")
    two = {"proposal_methods": [{"proposal_type": "x"}, METHOD], "default_proposal_method": "greedy"}
    cases: list[tuple[dict[str, Any], int, int, bool]] = [
        (DFLASH, 3, 4, True),
        (DSPARK, 3, 5, False),
        (DSPARK | {"speculators_config": two}, 3, 5, False),
        (DSPARK | {"speculators_config": None, "sample_from_anchor": False}, 4, 4, False),
        (DEEPSPEC, 5, 5, False),
        (DEEPSPEC | {"markov_rank": 0, "enable_confidence_head": False}, 5, 5, True),
        (DFLASH2, 3, 4, False),
        (DFLASH2 | {"sample_from_anchor": True}, 3, 5, False),
        (ZLAB2, 4, 4, False),
    ]
    for raw, default, most, deterministic in cases:
        draft = DFlash.from_pretrained(saved(raw, tmp_path), target)
        found = draft.default_draft_tokens, draft.max_draft_tokens, draft.deterministic
        assert found == (default, most, deterministic)
        assert DFlash(draft.head, sampled=True).deterministic is False
        assert DFlash(draft.head, sampled=False).deterministic is True


@pytest.mark.parametrize(
    ("variant", "sampled", "confidence"), [("gated", True, 0.3), ("gated", False, 0.3), ("DFlash2", None, 0.0)]
)
def test_the_text_is_that_of_no_draft(variant: str, sampled: bool | None, confidence: float, tmp_path: Path) -> None:
    """With drafts that share the target's noise, or are not sampled."""
    draft, found = recorder(VARIANTS[variant], tmp_path, sampled=sampled, confidence=confidence), []
    verify = None if draft.deterministic else "gumbel"
    for source, schedule in ((None, None), (draft, Given([4, 2]))):
        options: dict[str, Any] = {"sampling": SamplingParams(temperature=[0.5, 1.0, 0.7]), "verify": verify}
        decoder = SpeculativeDecoder(shared_tiny("llama"), source, schedule=schedule, **options)
        output = decoder.generate(INPUT_IDS, attention_mask=ATTENDED, max_new_tokens=30, seed=3)
        found.append(new_tokens(output))
    assert found[0] == found[1] and output.stats.num_accepted > 0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("variant", "confidence"), [("rnn", 0.3), pytest.param("DFlash2", 0.0, marks=pytest.mark.slow)]
)
def test_compiled_steps_give_the_eager_tokens(
    variant: str, confidence: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a second batch compiles nothing: one graph each for the block, a draft, the uniforms, the verification."""
    backend = CompileCounterWithBackend("eager")
    monkeypatch.setattr(compilation, "compile_piece", partial(compile_piece, backend=backend))
    found = []
    for compile in (False, True):
        draft = recorder(VARIANTS[variant], tmp_path, confidence=confidence)
        options: dict[str, Any] = {"sampling": MIXED, "schedule": "constant", "compile": compile}
        decoder = SpeculativeDecoder(TracedFeatures(), draft, num_draft_tokens=4, **options)
        for seed in (1, 2):
            output = decoder.generate(INPUT_IDS, attention_mask=ATTENDED, max_new_tokens=20, seed=seed)
            found.append((output.sequences.tolist(), output.stats.accepted_at))
            assert backend.frame_count == (4 if compile else 0)
    assert found[:2] == found[2:] and sum(found[0][1]) > 0


# The law.


def small_head(kind: str) -> DFlashHead:
    """Of a model with V tokens; a Markov head lacks two of them."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": 1, "vocab_size": V}
    selects = kind == "DFlash2"
    parts = {"conv_kernel_size": 2, "selector_top_k": 3} if selects else {"markov_head_type": kind}
    of_block = {"aux_hidden_state_layer_ids": [0], "mask_token_id": V - 1, "block_size": 3 + selects}
    raw = with_layers(DFLASH2 if selects else DSPARK, **sizes) | of_block | parts
    raw["draft_vocab_size"] = V if selects else V - 2
    torch.manual_seed(2)
    head = DFlashHead(read_drafter_config(raw), has_head=True).requires_grad_(False)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), 0.7)
    head.draft_of_target = None if selects else torch.tensor([0, -1, 1, 2, -1, 3])
    return head


class Unconditional(DFlash):
    """Reports the logits of the block, without what the drafts before add or leave."""

    def propose(self, tokens: Tensor, lengths: Tensor, num_draft_tokens: int, *others: Any) -> Draft:
        draft = super().propose(tokens, lengths, num_draft_tokens, *others)
        ends = lengths.unsqueeze(1)
        logits, *_ = self._read_block(tokens, ends, (ends - 2).clamp(min=0), num_draft_tokens)
        return Draft(draft.tokens, self.head.target_logits(logits))


class Confident(DFlash):
    """Drops a draft that was improbable, which depends on the draft itself."""

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        assert draft.logits is not None
        chosen = draft.logits.softmax(-1).gather(2, draft.tokens.clamp(min=0).unsqueeze(2)).squeeze(2)
        return Draft(torch.where(chosen > 0.3, draft.tokens, -1), draft.logits, draft.lse)


@pytest.mark.parametrize(("kind", "confidence"), [("rnn", 0.5), ("gated", 0.0), ("DFlash2", 0.0)])
def test_sampled_text_has_the_law_of_the_target(kind: str, confidence: float, report: Report) -> None:
    model = tiny_transformer()
    draft = DFlash(small_head(kind), confidence=confidence)
    tokens = first_tokens(model, draft, 3, 0.8, FEWER_TRIALS)
    expect_laws(report, f"loop, block, {kind}", p_values(tokens, model_laws(model, 0.8)))


@pytest.mark.parametrize(("wrong", "kind"), [(Unconditional, "rnn"), (Confident, "rnn"), (Unconditional, "DFlash2")])
def test_the_law_test_catches_wrong_drafts(wrong: type[DFlash], kind: str, report: Report) -> None:
    model = tiny_transformer()
    tokens = first_tokens(model, wrong(small_head(kind)), 3, 0.8, FEWER_TRIALS)
    expect_caught(report, f"loop, block, {kind}, {wrong.__name__}", p_values(tokens, model_laws(model, 0.8)))


# Files.


def test_configs_that_are_not_known() -> None:
    def method(**fields: Any) -> dict[str, Any]:
        return DSPARK | {"speculators_config": {"proposal_methods": [METHOD | fields]}}

    def inside(**fields: Any) -> dict[str, Any]:
        return DEEPSPEC | {"architectures": ["DSparkDraftModel"], "dflash_config": fields}

    def with_inner(**fields: Any) -> dict[str, Any]:
        return ZLAB2 | {"dflash_config": ZLAB2["dflash_config"] | fields}

    def plain(inner: Any = None, **fields: Any) -> dict[str, Any]:
        return with_layers(DFLASH, **(inner or {})) | fields

    def methods(*counts: int) -> dict[str, Any]:
        return {"speculators_config": {"proposal_methods": [METHOD | {"speculative_tokens": k} for k in counts]}}

    ids, expected = "aux_hidden_state_layer_ids", "config: expected "
    rope = {"sliding_attention": {"rope_theta": 9.0}, "full_attention": {"rope_theta": 9.0}}
    off = SLIDING | {"use_sliding_window": False}
    cases: list[tuple[Any, type[Exception], str]] = [
        (raw, ValueError, message)
        for raw, message in [
            # Other drafters.
            (DSPARK | {"speculators_model_type": "xpress"}, expected + ".*'xpress'.* compute otherwise, and are not"),
            (DSPARK | {"speculators_model_type": "mtp"}, expected + ".*'mtp' .*stitch .* and use drafts.MTP"),
            (
                DEEPSPEC | {"architectures": ["Gemma4DSparkModel"]},
                expected + r"architectures .*\['Gemma4DSparkModel'\].*; DeepSpec's drafters for Gemma 4 are not read",
            ),
            (DEEPSPEC | {"model_type": "gemma4"}, expected + "model_type 'qwen3' or .*, got 'gemma4'"),
            (with_layers(DSPARK, model_type="gpt_oss"), expected + "model_type 'qwen3' or 'llama', got 'gpt_oss'"),
            (inside(projector_type="domino"), expected + "projector_type None or 'dspark', got 'domino'"),
            (inside(gru_hidden_dim=8), "config: dflash_config has gru_hidden_dim; known are attention_mode"),
            # Fields that change what is computed.
            (DEEPSPEC | {"hc_mult": 4}, expected + "hc_mult None or 0, got 4"),
            *((DFLASH2 | {name: 9}, expected + f"{name} .*, got 9") for name in SUPPORTED),
            *((ZLAB2 | {name: 9}, expected + f"{name} .*, got 9") for name in SUPPORTED),
            (DFLASH2 | {"draft_vocab_size": KEPT}, expected + "draft_vocab_size None or 60, got 24"),
            (DFLASH2 | {"conv_group_size": 5}, expected + "hidden_size % conv_group_size 0, got 2"),
            (DFLASH2 | {"selector_top_k": 61}, expected + "selector_top_k <= 60, the tokens, got 61"),
            *((DFLASH2 | {name: None}, expected + f"an int >= 1 as {name}, got None") for name in PARTS),
            (with_inner(selector_rank=None), expected + "an int >= 1 as selector_rank, got None"),
            (with_inner(markov_rank=4), "config: dflash_config has markov_rank; known are block_size, conv_group_size"),
            (with_inner(projector_type="dflash"), expected + "projector_type None or 'dflash2', got 'dflash'"),
            (ZLAB2 | {"model_type": "llama"}, expected + "model_type 'qwen3' or .*, got 'llama'"),
            (DSPARK | {"modality_head_rank": 128}, expected + "modality_head_rank None or 0, got 128"),
            (DEEPSPEC | {"dspark_draft_topk": 64}, expected + "dspark_draft_topk None or 0, got 64"),
            (DEEPSPEC | {"attention_sink_bias": True}, expected + "attention_sink_bias None or False, got True"),
            (DEEPSPEC | {"use_swa": True}, expected + "use_swa None or False, got True"),
            (DEEPSPEC | {"is_neox_style": False}, expected + "is_neox_style None or True, got False"),
            (DEEPSPEC | {"logit_scale": 0.5}, expected + "logit_scale None or 1, got 0.5"),
            (DEEPSPEC | {"quantization_config": {"bits": 4}}, expected + "quantization_config None, got"),
            (
                with_layers(DSPARK, rope_parameters=rope),
                "config: rope_parameters has full_attention, sliding_attention",
            ),
            (with_layers(DSPARK, **off), expected + "use_sliding_window None or True, got False"),
            (
                with_layers(DSPARK, **SLIDING) | {"sliding_window_non_causal": 1.5},
                expected + "sliding_window_non_causal",
            ),
            (DSPARK | {"target_hidden_size": 64}, expected + "target_hidden_size None or 32, got 64"),
            *((plain({name: 9}), expected + f"{name} None.*, got 9") for name in (*SUPPORTED, *UNSCALED, *OTHER_PARTS)),
            *((plain(**{name: 9}), expected + f"{name} None.*, got 9") for name in (*UNSCALED, *OTHER_PARTS)),
            (plain(projector_type="domino"), expected + "projector_type None or 'dflash', got 'domino'"),
            (plain(is_causal=True), expected + "is_causal None or False, got True"),
            (plain(SLIDING, is_causal=False), expected + "is_causal None, got False"),
            (plain(dflash_config={"foo": 1}), expected + "dflash_config None, got {'foo': 1}"),
            # Rules that change the text.
            (method(accept_tolerance=0.1), expected + "accept_tolerance None or 0, got 0.1"),
            (method(verifier_accept_k=5), expected + "verifier_accept_k None or 0 or 1, got 5"),
            (method(min_p=0.1), "config: proposal_methods has min_p; known are accept_tolerance"),
            # Missing, wrong, contradicting.
            (
                DSPARK | {"transformer_layer_config": [1]},
                expected + r"an object as transformer_layer_config, got \[1\]",
            ),
            (with_layers(DSPARK, vocab_size=None), expected + "an int >= 1 as vocab_size, got None"),
            (DSPARK | {ids: None}, expected + f"a list of layers as {ids}, got None"),
            (DSPARK | {"block_size": 1}, expected + "an int >= 2 as block_size, got 1"),
            (DSPARK | {"mask_token_id": None}, expected + "an int >= 0 as mask_token_id, got None"),
            (DSPARK | {"draft_vocab_size": None}, expected + "an int >= 1 as draft_vocab_size, got None"),
            (DSPARK | {"markov_rank": None}, expected + "an int >= 0 as markov_rank, got None"),
            (DSPARK | {"markov_head_type": "lstm"}, expected + "markov_head_type None or 'vanilla' or .* got 'lstm'"),
            (DSPARK | {"markov_rank": 0}, "config: confidence_head_with_markov is True, and markov_rank is 0"),
            (DSPARK | {"sample_from_anchor": "no"}, expected + "sample_from_anchor None or True or False, got 'no'"),
            (DEEPSPEC | {"sample_from_anchor": False}, expected + "sample_from_anchor None or True, got False"),
            (inside(markov_rank=9), "config: markov_rank is 4, and 9 in dflash_config"),
            *(
                (plain({name: 3}), f"config: {name} is .*, and 3 in transformer_layer_config")
                for name in ("block_size", "mask_token_id", ids, "draft_vocab_size")
            ),
            *(
                (plain(**{name: 64}), f"config: {name} is .*, and 64 in the top")
                for name in ("hidden_size", "head_dim")
            ),
            (plain({"target_hidden_size": 9}), expected + "target_hidden_size None or 32, got 9"),
            (plain({f"eagle_{ids}": [1, 1]}), expected + rf"eagle_{ids} None or \[0, 1\], got \[1, 1\]"),
            (plain(target_layer_ids=[7]), expected + r"target_layer_ids None or \[-1, 0\], got \[7\]"),
            (plain({"layer_types": 3}), expected + "a list of str as layer_types, got 3"),
            (plain(speculators_config=[1]), expected + r"an object as speculators_config, got \[1\]"),
            (
                plain(speculators_config={"proposal_methods": METHOD}),
                expected + "a list of objects as proposal_methods",
            ),
            (plain(**methods(3, 2)), expected + "default_proposal_method to choose one speculative_tokens, got {2, 3}"),
            (method(speculative_tokens=6), expected + "speculative_tokens <= 5, the drafts of a block, got 6"),
            (
                DSPARK | {"speculators_config": {"algorithm": "dflash"}},
                expected + "algorithm in .* 'dspark', got 'dflash'",
            ),
            (
                DSPARK | {"speculators_config": {"default_proposal_method": "x", "proposal_methods": [METHOD]}},
                expected + "default_proposal_method None or 'greedy', got 'x'",
            ),
        ]
    ]
    assert raised(read_drafter_config, cases) == []


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    pruned = DSPARK | {"draft_vocab_size": KEPT}

    def read(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
        raw, changes = case
        weights = {name: weight for name, weight in (new_weights(raw) | changes).items() if weight is not None}
        read_drafter(saved(raw, tmp_path, weights), torch.device("cpu"), torch.float32)

    selector = "candidate_selector"
    small, rnn = torch.zeros(2), {"markov_head_type": "rnn"}
    cases: list[tuple[Any, type[Exception], str]] = [
        (case, ValueError, "(?s)draft: " + message)
        for case, message in [
            ((pruned, {"lm_head.weight": None}), "the head has 24 of 60 tokens and lacks the weight lm_head.weight"),
            ((pruned, {"d2t": None}), "the head has 24 of 60 tokens and lacks the weights d2t"),
            ((pruned, {"t2d": torch.ones(VOCAB, dtype=torch.bool)}), "t2d marks other tokens than d2t leads to"),
            ((DSPARK, {"d2t": torch.ones(VOCAB, dtype=torch.int64)}), "expected d2t to lead to 60 different tokens"),
            ((DSPARK, {"confidence_head.proj.bias": None}), 'the weights .*Missing .*"confidence_head.proj.bias"'),
            ((DSPARK, {"markov_head.gate_proj.bias": small}), '.*Unexpected .*"markov_head.gate_proj.bias"'),
            ((DSPARK | rnn, {"markov_head.joint_proj.weight": None}), '.*Missing .*"markov_head.joint_proj.weight"'),
            ((DSPARK, {"markov_head.markov_w1.weight": small}), ".*size mismatch for markov_head.markov_w1.weight"),
            ((DFLASH, {"markov_head.markov_w1.weight": small}), '.*Unexpected .*"markov_head.markov_w1.weight"'),
            ((DFLASH2, {f"{selector}.successor_codebook": None}), f'.*Missing .*"{selector}.successor_codebook"'),
            ((DFLASH2, {f"{selector}.hidden_projection.bias": small}), f'.*Unexpected .*"{selector}.hidden_projection'),
            ((ZLAB2, {"layers.1.mlp_conv.base_kernel": small}), ".*size mismatch for layers.1.mlp_conv.base_kernel"),
            ((DFLASH, {"layers.0.mlp_conv.base_kernel": small}), '.*Unexpected .*"layers.0.mlp_conv.base_kernel"'),
            ((DSPARK, {"mask_embedding": small}), '.*Unexpected .*"mask_embedding"'),
            ((DEEPSPEC, {"embed_tokens.weight": small}), ".*size mismatch for embed_tokens.weight"),
            (
                (DEEPSPEC, {"lm_head.weight": torch.zeros(2, 2, dtype=torch.int8)}),
                "lm_head.weight .* quantised weights",
            ),
        ]
    ]
    assert raised(read, cases) == []
    # Training alone needs these.
    read((pruned, {"verifier_norm.weight": small, "verifier_lm_head.weight": small.clone()}))


def test_drafters_that_do_not_fit(tmp_path: Path) -> None:
    target, other = shared_tiny("llama"), "draft: it is for another target: "
    last = DSPARK | {"aux_hidden_state_layer_ids": [0, 2]}
    deepspec = DEEPSPEC | {"enable_confidence_head": False}

    def read(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
        DFlash.from_pretrained(saved(case[0], tmp_path), target, **case[1])

    cases: list[tuple[Any, type[Exception], str]] = [
        # The library's features of the last layer are those before the last norm.
        ((last, {}), ValueError, other + r"it reads layers \[0, 2\], the target has layers 0 to 1"),
        ((DEEPSPEC | {"num_target_layers": 3}, {}), ValueError, other + "num_target_layers 3, the target has 2"),
        ((with_layers(DSPARK, num_target_layers=3), {}), ValueError, other + "num_target_layers 3, the target has 2"),
        ((DSPARK, {"sampled": 3}), TypeError, "sampled: expected a bool, got <class 'int'>"),
        ((DSPARK, {"dtype": "float32"}), TypeError, "dtype: expected a torch.dtype or None, got <class 'str'>"),
        ((DSPARK, {"dtype": torch.int32}), ValueError, "dtype: expected float64, .*, got torch.int32"),
        ((DSPARK | {"mask_token_id": VOCAB}, {}), ValueError, "draft: mask_token_id 60 is none of the target's tokens"),
        ((DSPARK, {"confidence": 1.0}), ValueError, r"confidence: expected a number in \[0, 1\), got 1.0"),
        ((DSPARK, {"confidence": "high"}), TypeError, "confidence: expected a number, got <class 'str'>"),
        ((DSPARK, {"confidence": float("nan")}), ValueError, r"confidence: expected a number in \[0, 1\), got nan"),
        ((deepspec, {"confidence": 0.5}), ValueError, "confidence: expected 0, because this drafter has no confidence"),
    ]
    assert raised(read, cases) == []


def test_fields_that_layouts_give_differently() -> None:
    """SpecForge's stand in dflash_config, its confidence head in the weight of a loss; or as its script for SGLang
    writes them."""
    fields = {"markov_rank": 8, "markov_head_type": "gated", "confidence_head_alpha": 1.0, "projector_type": "dspark"}
    fields |= {"attention_mode": "gqa", "mask_token_id": MASK, "target_layer_ids": [-1, 1]}
    others = {name: value for name, value in DEEPSPEC.items() if name not in fields and "confidence" not in name}
    forge = others | {"architectures": ["DSparkDraftModel"], "dflash_config": fields, "sliding_window": 4}
    forge |= {"layer_types": ["full_attention", "sliding_attention"]}
    config = read_drafter_config(forge)
    assert config == read_drafter_config(forge | {"architectures": ["Qwen3DSparkModel"], "markov_rank": 8})
    assert (config.feature_layers, config.first_place, config.sees) == ((0, 2), 0, ((None, None), (3, 0)))
    assert (config.markov_rank, config.markov_kind) == (8, "gated")
    assert config.has_confidence and not config.confidence_reads_markov
    del fields["confidence_head_alpha"]
    assert not read_drafter_config(forge).has_confidence
    # speculators' layers may have their windows beside them, as vLLM reads them.
    assert read_drafter_config(DFLASH | SLIDING) == read_drafter_config(with_layers(DFLASH, **SLIDING))
    # Where speculators' config does not name the head, the drafter has it.
    without = {name: value for name, value in DSPARK.items() if "confidence" not in name}
    assert read_drafter_config(without) == read_drafter_config(DSPARK)
