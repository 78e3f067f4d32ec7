"""The byte-level pair that comes with the package: its tokenizer, its measured numbers, and the script that made it."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import struct
import sys
import zlib
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

import torch_specops
from torch_specops import SamplingParams

PAIR = Path(str(files("torch_specops") / "data" / "austen_bytes"))
HELDOUT = Path(__file__).parent / "data" / "austen_heldout.txt"
SCRIPT = Path(__file__).parents[1] / "benchmarks" / "train_byte_pair.py"
ROLES = ("target", "draft")

with_script = pytest.mark.skipif(not SCRIPT.exists(), reason="an installed package has no benchmarks")


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {role: AutoModelForCausalLM.from_pretrained(PAIR / role).eval() for role in ROLES}


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    return json.loads((PAIR / "metrics.json").read_text())


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_byte_pair", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_byte_pair"] = module
    spec.loader.exec_module(module)
    return module


def log_probs(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """Log-probabilities [N, W - 1, 256], float64, of every byte of `windows` int64 [N, W] but its first."""
    with torch.inference_mode():
        return model(input_ids=windows, use_cache=False).logits[:, :-1].double().log_softmax(-1)


def heldout_windows(num_windows: int, window: int) -> Tensor:
    return torch.tensor(list(HELDOUT.read_bytes()[: num_windows * window])).view(num_windows, window)


def test_measured_numbers_are_those_of_the_files(models: dict[str, PreTrainedModel], metrics: dict[str, Any]) -> None:
    recorded = metrics["heldout_sample"]
    windows = heldout_windows(recorded["windows"], recorded["window_bytes"])
    log_p, log_q = (log_probs(models[role], windows) for role in ROLES)
    following = windows[:, 1:, None]
    # Recorded to five digits. Where two bytes are all but equal, another machine's rounding may choose the other.
    assert -log_p.gather(-1, following).mean().item() == pytest.approx(recorded["target_nats_per_byte"], abs=1e-4)
    assert -log_q.gather(-1, following).mean().item() == pytest.approx(recorded["draft_nats_per_byte"], abs=1e-4)
    assert torch.minimum(log_p.exp(), log_q.exp()).sum(-1).mean().item() == pytest.approx(recorded["alpha"], abs=1e-4)
    agree = (log_p.argmax(-1) == log_q.argmax(-1)).double()
    assert agree.mean().item() == pytest.approx(recorded["greedy_agreement"], abs=2 / agree.numel())


@pytest.mark.parametrize("part", ["heldout", "heldout_sample"])
def test_target_is_clearly_better_than_the_draft(metrics: dict[str, Any], part: str) -> None:
    recorded = metrics[part]
    assert recorded["target_nats_per_byte"] < recorded["draft_nats_per_byte"] - 0.1
    # Learned, not luck: far below a uniform byte, and an acceptance rate between a bad draft's and a copy's.
    assert recorded["draft_nats_per_byte"] < 0.35 * math.log(256)
    assert 0.5 < recorded["alpha"] < 0.9
    assert 0.5 < recorded["greedy_agreement"] < 0.95


@pytest.mark.parametrize("role", ROLES)
def test_quality_lasts_up_to_the_longest_context(models: dict[str, PreTrainedModel], role: str) -> None:
    """Few long contexts were seen; a model that saw none of them loses more than one nat per byte there."""
    length = models[role].config.max_position_embeddings
    windows = heldout_windows(8, length)
    start = length - length // 4
    whole = log_probs(models[role], windows)[:, start - 1 :]
    # The same bytes, each with 64 to 127 bytes before it.
    short = [log_probs(models[role], windows[:, begin - 64 : begin + 64])[:, 63:] for begin in range(start, length, 64)]
    following = windows[:, start:, None]
    loss = torch.cat(short, 1).gather(-1, following).mean() - whole.gather(-1, following).mean()
    assert loss.item() < 0.15


@pytest.mark.parametrize("role", ROLES)
def test_context_matters(models: dict[str, PreTrainedModel], role: str) -> None:
    """The same bytes are predicted clearly better with 64 bytes before them than with 4."""
    windows = heldout_windows(128, 65)
    last = windows[:, -1:]
    long, short = (log_probs(models[role], windows[:, -n:])[:, -1].gather(-1, last).mean() for n in (65, 5))
    assert long.item() > short.item() + 0.1


def test_the_pair_decodes_as_the_target_alone_in_fewer_steps(metrics: dict[str, Any]) -> None:
    # float64: the widths of a forward pass differ, and rounding must not choose between two bytes.
    target, draft = (AutoModelForCausalLM.from_pretrained(PAIR / role, dtype=torch.float64).eval() for role in ROLES)
    prompt = torch.tensor([list(b"Mrs. Dashwood was ")])
    expected = target.generate(prompt, max_new_tokens=64, do_sample=False)
    found = torch_specops.generate(
        target, prompt, draft=draft, max_new_tokens=64, sampling=SamplingParams(temperature=0.0), compile=False
    )
    assert found.sequences.tolist() == expected.tolist()
    # With 5 drafts that are each accepted with probability a, (1 - a^6) / (1 - a) bytes come from a step.
    rate = metrics["heldout"]["greedy_agreement"]
    assert found.stats.mean_acceptance_length > 0.6 * (1 - rate**6) / (1 - rate)


@pytest.mark.parametrize("role", ROLES)
def test_what_the_files_say(models: dict[str, PreTrainedModel], metrics: dict[str, Any], role: str) -> None:
    model = models[role]
    assert model.dtype == torch.float32
    assert model.num_parameters() == metrics[role]["parameters"]
    assert model.config.vocab_size == 256
    assert model.generation_config.eos_token_id is None
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    raw = (PAIR / role / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    stored = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    assert "lm_head.weight" not in stored
    assert {tensor["dtype"] for tensor in stored.values()} == {"F16"}


def test_sizes() -> None:
    assert sum(path.stat().st_size for path in PAIR.rglob("*") if path.is_file()) <= 5_000_000
    assert (PAIR / "target" / "tokenizer.json").read_bytes() == (PAIR / "draft" / "tokenizer.json").read_bytes()


def test_model_card_has_the_measured_numbers(metrics: dict[str, Any]) -> None:
    card = (PAIR / "README.md").read_text()
    heldout = metrics["heldout"]
    for role in ROLES:
        row = next(line for line in card.splitlines() if line.startswith(f"| {role} |"))
        assert f"| {metrics[role]['parameters']:,} |" in row
        assert row.endswith(f"| {heldout[f'{role}_nats_per_byte']:.3f} |")
    assert f"temperature 1 | {heldout['alpha']:.3f} |" in card
    assert f"argmax | {heldout['greedy_agreement']:.3f} |" in card
    assert metrics["torch"] in card and metrics["date"] in card


@pytest.fixture(scope="module", params=ROLES)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(PAIR / request.param)


@pytest.mark.parametrize(
    "text",
    ["", "Emma", "  two  spaces\n\n\tdon 't , stop .", "£5, naïve, 漢字 😀 e\u0301", "Ā\x00\x7f\r\n", "<s></s><unk>"],
)
def test_ids_are_bytes(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@settings(deadline=None)
@given(raw=st.binary())
def test_any_bytes_decode_as_python_does(tokenizer: PreTrainedTokenizerFast, raw: bytes) -> None:
    assert tokenizer.decode(list(raw)) == raw.decode(errors="replace")


def test_batch_of_texts(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["Mr. Darcy", "naïve"]
    assert tokenizer(texts)["input_ids"] == [list(text.encode()) for text in texts]
    assert tokenizer.batch_decode(tokenizer(texts)["input_ids"]) == texts
    assert (len(tokenizer), tokenizer.all_special_ids) == (256, [])


@with_script
def test_singular_values_come_near_one(script: ModuleType) -> None:
    for rows, columns in [(8, 8), (20, 6), (6, 20)]:
        matrices = torch.randn(3, rows, columns, generator=torch.Generator().manual_seed(rows))
        left, values, right = torch.linalg.svd(matrices, full_matrices=False)
        found = left.mT @ script.orthogonalize(matrices) @ right.mT
        # The iteration scales each singular value and turns nothing; those near 0 need more steps than it takes.
        torch.testing.assert_close(found, torch.diag_embed(found.diagonal(dim1=-2, dim2=-1)), atol=1e-4, rtol=0)
        grown = found.diagonal(dim1=-2, dim2=-1)[values > 0.1 * values.amax()]
        assert grown.min().item() > 0.6 and grown.max().item() < 1.3


@with_script
def test_strings_of_an_r_database(script: ModuleType, tmp_path: Path) -> None:
    def block(lines: list[str]) -> bytes:
        strings = b"".join(
            b"\x00\x04\x00\x09" + struct.pack(">i", len(raw)) + raw for raw in (line.encode() for line in lines)
        )
        packed = zlib.compress(b"X\n\x00\x00\x00\x03" + strings)
        return struct.pack(">i", len(packed)) + packed

    books = [["EMMA", "", "By Jane Austen, 5£"], ["Chapter 1"]]
    path = tmp_path / "Rdata.rdb"
    path.write_bytes(b"".join(block(lines) for lines in books))
    assert list(script.strings_of_rdb(path)) == ["\n".join(lines) for lines in books]
    plain = tmp_path / "more.txt"
    plain.write_text("Finis", encoding="utf-8")
    assert script.read_texts([path, plain]) == "EMMA\n\nBy Jane Austen, 5£\n\n\nChapter 1\n\n\nFinis".encode()


@with_script
def test_held_out_text_is_the_end_and_is_not_trained_on(script: ModuleType) -> None:
    text = b"".join(b"line %d\n" % i for i in range(60_000))
    training, heldout = script.split(text)
    assert training + heldout == text
    assert training.endswith(b"\n") and script.HELDOUT_BYTES - 20 < len(heldout) <= script.HELDOUT_BYTES
    with pytest.raises(SystemExit, match="at least"):
        script.split(text[: script.HELDOUT_BYTES])


@with_script
def test_a_stopped_training_goes_on_as_if_it_had_not(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    monkeypatch.setitem(script.SHAPES, "draft", tiny)
    monkeypatch.setattr(script, "SECONDS_BETWEEN_CHECKPOINTS", -1.0)
    text = b"It is a truth universally acknowledged, that a single man must be in want of a wife.\n" * 50
    arguments = ("draft", text, 0.016, 60.0)
    whole, trained = script.train(*arguments, tmp_path / "whole.pt")
    assert (trained.steps, trained.bytes_seen) == (8, 8 * script.TOKENS_PER_STEP)

    saves = 0

    def save_four(state: dict[str, Any], path: os.PathLike[str]) -> None:
        nonlocal saves
        saves += 1
        torch_save(state, path)
        if saves == 4:
            raise KeyboardInterrupt

    torch_save = torch.save
    monkeypatch.setattr(torch, "save", save_four)
    with pytest.raises(KeyboardInterrupt):
        script.train(*arguments, tmp_path / "stopped.pt")
    monkeypatch.undo()
    monkeypatch.setitem(script.SHAPES, "draft", tiny)
    # Stopped before its fourth checkpoint had its name: the third one stands.
    assert torch.load(tmp_path / "stopped.pt")["trained"]["steps"] == 3
    resumed, trained = script.train(*arguments, tmp_path / "stopped.pt")
    assert trained.steps == 8
    for (name, expected), found in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(found, expected), name
    # A finished training is not taken up again.
    again, trained = script.train(*arguments, tmp_path / "stopped.pt")
    assert trained.steps == 8 and torch.equal(again.lm_head.weight, resumed.lm_head.weight)
