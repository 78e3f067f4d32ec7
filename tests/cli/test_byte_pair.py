"""The byte-level pair that comes with the package: its tokenizer, its measured numbers, and the script that made it."""

from __future__ import annotations

import json
import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import needs_benchmarks, script
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marks import slow
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

PAIR = Path(str(files("torch_specops") / "data" / "austen_bytes"))
HELDOUT = Path(__file__).parents[1] / "data" / "austen_heldout.txt"
ROLES = ("target", "draft")


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {role: AutoModelForCausalLM.from_pretrained(PAIR / role).eval() for role in ROLES}


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    return json.loads((PAIR / "metrics.json").read_text())


def log_probs(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """Log-probabilities [N, W - 1, 256], float64, of every byte of `windows` int64 [N, W] but its first."""
    with torch.inference_mode():
        return model(input_ids=windows, use_cache=False).logits[:, :-1].double().log_softmax(-1)


def heldout_windows(num_windows: int, window: int) -> Tensor:
    return torch.tensor(list(HELDOUT.read_bytes()[: num_windows * window])).view(num_windows, window)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(PAIR / "target")


def test_measured_numbers_are_those_of_the_files(models: dict[str, PreTrainedModel], metrics: dict[str, Any]) -> None:
    recorded = metrics["heldout_sample"]
    windows = heldout_windows(recorded["windows"], recorded["window_bytes"])
    log_p, log_q = (log_probs(models[role], windows) for role in ROLES)
    following = windows[:, 1:, None]
    # Recorded to five digits. Where two bytes are all but equal, another machine's rounding may choose the other.
    assert -log_p.gather(-1, following).mean().item() == pytest.approx(recorded["target_nats_per_byte"], abs=1e-4)
    assert -log_q.gather(-1, following).mean().item() == pytest.approx(recorded["draft_nats_per_byte"], abs=1e-4)
    for each in (recorded, metrics["heldout"]):
        assert each["target_nats_per_byte"] < each["draft_nats_per_byte"] - 0.1
        assert 0.5 < each["alpha"] < 0.9
    assert torch.minimum(log_p.exp(), log_q.exp()).sum(-1).mean().item() == pytest.approx(recorded["alpha"], abs=1e-4)
    agree = (log_p.argmax(-1) == log_q.argmax(-1)).double()
    assert agree.mean().item() == pytest.approx(recorded["greedy_agreement"], abs=2 / agree.numel())


@pytest.mark.parametrize("role", ROLES)
def test_quality_lasts_up_to_the_longest_context(models: dict[str, PreTrainedModel], role: str) -> None:
    """A model that was never trained on long contexts loses more than one nat per byte there."""
    length = models[role].config.max_position_embeddings
    windows, start = heldout_windows(4, length), length - length // 4
    whole = log_probs(models[role], windows)[:, start - 1 :]
    # The same bytes, each with 64 to 127 bytes before it.
    short = [log_probs(models[role], windows[:, begin - 64 : begin + 64])[:, 63:] for begin in range(start, length, 64)]
    loss = (torch.cat(short, 1) - whole).gather(-1, windows[:, start:, None]).mean()
    assert loss.item() < 0.15


def test_what_the_files_say(models: dict[str, PreTrainedModel], metrics: dict[str, Any]) -> None:
    card, heldout = (PAIR / "README.md").read_text(), metrics["heldout"]
    for role, model in models.items():
        assert model.dtype == torch.float32
        assert model.num_parameters() == metrics[role]["parameters"]
        assert model.config.vocab_size == 256
        assert model.generation_config.eos_token_id is None
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        row = next(line for line in card.splitlines() if line.startswith(f"| {role} |"))
        assert f"| {metrics[role]['parameters']:,} |" in row
        assert row.endswith(f"| {heldout[f'{role}_nats_per_byte']:.3f} |")
    assert f"temperature 1 | {heldout['alpha']:.3f} |" in card
    assert f"argmax | {heldout['greedy_agreement']:.3f} |" in card
    assert metrics["torch"] in card and metrics["date"] in card
    assert sum(path.stat().st_size for path in PAIR.rglob("*") if path.is_file()) <= 5_000_000
    assert (PAIR / "target" / "tokenizer.json").read_bytes() == (PAIR / "draft" / "tokenizer.json").read_bytes()


@settings(deadline=None, max_examples=50)
@given(raw=st.binary() | st.text(st.characters(codec="utf-8")).map(str.encode))
@example(raw=b"  two  spaces\n\n\tdon 't , stop .")
@example(raw=b"<s></s><unk>\x00\x7f\r\n")
def test_any_bytes_decode_as_python_does(tokenizer: PreTrainedTokenizerFast, raw: bytes) -> None:
    text = raw.decode(errors="replace")
    assert tokenizer.decode(list(raw)) == tokenizer.decode(list(raw), skip_special_tokens=True) == text
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert (len(tokenizer), tokenizer.all_special_ids) == (256, [])


@needs_benchmarks
@pytest.mark.parametrize("model_type", ["llama", slow("qwen3_5_text")])
def test_training_writes_a_pair(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps: the loss falls, and the files are those of a pair that loads."""
    train = script("train_byte_pair")
    tiny = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    monkeypatch.setattr(train, "SHAPES", {"target": tiny, "draft": tiny})
    monkeypatch.setattr(train, "HELDOUT_BYTES", 3000)
    monkeypatch.setattr(train, "SAMPLE_BYTES", 2000)
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged, that a single man must be in want of a wife.\n" * 80)
    sizes = ["--megabytes", "0.05", "--draft-megabytes", "0.03", "--heldout-sample", str(tmp_path / "sample.txt")]
    train.main([str(text), *sizes, "--model-type", model_type, "--out", str(tmp_path / "out")])
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["target"]["steps"] == 25 and metrics["draft"]["bytes_seen"] == 15 * 2048
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "target").config.model_type == model_type
    assert metrics["heldout"]["target_nats_per_byte"] < 0.8 * math.log(256)
    assert (tmp_path / "sample.txt").read_bytes() == text.read_bytes()[-len((tmp_path / "sample.txt").read_bytes()) :]


@needs_benchmarks
def test_training_does_not_overwrite_the_package_pair(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script("train_byte_pair").main(["text.txt", "--model-type", "qwen3_5_text"])
    assert "--out: expected a folder for a pair of qwen3_5_text, got none" in capsys.readouterr().err
