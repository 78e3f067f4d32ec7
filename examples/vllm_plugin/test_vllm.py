"""vLLM with the plugin: greedy text, the sampled law, seeds, and what goes back to vLLM. `make test-vllm` runs it.

A model with 8 tokens and random weights runs through all of vLLM, and `check_engine` knows its law exactly.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

# Read by vLLM when it is imported. With the engine in this process, the tests can exchange its sampler.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # One thread: several would wait for each other, and longest on a busy machine.
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}

import pytest
import specops_vllm
import torch
import vllm
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.v1.sample.rejection_sampler import RejectionSampler

from torch_specops import SamplingParams
from torch_specops.testing import EngineReport, check_engine

V = 8
TRIALS = 5_000
PROMPTS = [[1, 0, 1, 0, 1], [2, 3, 2], [4, 0, 2, 5]]
SETTINGS = {
    "plain": SamplingParams(),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top-p 0.8": SamplingParams(top_p=0.8),
    "greedy": SamplingParams(temperature=0.0),
    "top-k 3": SamplingParams(top_k=3),
    "temperature 1.3, top-k 5, top-p 0.9": SamplingParams(temperature=1.3, top_k=5, top_p=0.9),
}
# On this build, a batch that mixes top-k with requests without it can crash vLLM's own sampler.
WITHOUT_TOP_K = {name: params for name, params in SETTINGS.items() if not params.top_k}
VLLMS_OWN = RejectionSampler.forward
PATCHED = specops_vllm.taking_over(VLLMS_OWN)

DRAFTS = {
    "model": {"num_speculative_tokens": 2, "draft_sample_method": "probabilistic"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2},
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a draft that is the target with noise."""
    path = tmp_path_factory.mktemp("models")
    config = LlamaConfig(
        vocab_size=V,
        # vLLM's attention for CPUs knows heads of 32 and more.
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.12,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(path / "target")
    model.load_state_dict({name: value + 0.05 * torch.randn_like(value) for name, value in model.state_dict().items()})
    model.save_pretrained(path / "draft")
    return path


@pytest.fixture(scope="session")
def target(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder / "target").eval()


def options(folder: Path, draft: str) -> dict[str, Any]:
    return {
        "model": str(folder / "target"),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 64,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "speculative_config": DRAFTS[draft] | ({"model": str(folder / "draft")} if draft == "model" else {}),
    }


@pytest.fixture(scope="session", params=DRAFTS)
def engine(folder: Path, request: pytest.FixtureRequest) -> vllm.LLM:
    return vllm.LLM(**options(folder, request.param))


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RejectionSampler, "forward", PATCHED)


def texts(engine: vllm.LLM, prompts: list[list[int]], params: list[vllm.SamplingParams]) -> list[list[int]]:
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [list(each.outputs[0].token_ids) for each in engine.generate(inputs, params, use_tqdm=False)]


def sampling(params: SamplingParams, max_tokens: int, **others: Any) -> vllm.SamplingParams:
    return vllm.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        **others,
    )


def law(engine: vllm.LLM, target: LlamaForCausalLM, settings: dict[str, SamplingParams], trials: int) -> EngineReport:
    def generate(prompts: list[list[int]], params: list[SamplingParams], seeds: list[int]) -> list[list[int]]:
        return texts(engine, prompts, [sampling(each, 4) for each in params])

    report = check_engine(
        generate,
        lambda text: target(text).logits,
        settings,
        vocab_size=V,
        num_tokens=4,
        trials=trials,
        prompts=PROMPTS,
    )
    print(f"\n{report}")
    return report


def test_nothing_is_patched_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RejectionSampler, "forward", VLLMS_OWN)
    (entry,) = entry_points(group="vllm.general_plugins", name="specops")
    register = entry.load()
    for choice in ("", "0"):
        monkeypatch.setenv("TORCH_SPECOPS_VLLM", choice)
        register()
        assert RejectionSampler.forward is VLLMS_OWN
    monkeypatch.setenv("TORCH_SPECOPS_VLLM", "yes")
    with pytest.raises(ValueError, match="TORCH_SPECOPS_VLLM: expected 0 or 1, got 'yes'"):
        register()
    monkeypatch.setenv("TORCH_SPECOPS_VLLM", "1")
    with monkeypatch.context() as other:
        other.setattr(vllm, "__version__", "0.33.0")
        with pytest.raises(RuntimeError, match=r"made for vLLM 0\.32\.0, this is 0\.33\.0"):
            register()
    with monkeypatch.context() as other:
        other.delenv("VLLM_USE_V2_MODEL_RUNNER")
        with pytest.raises(RuntimeError, match="runner V2 has another sampler"):
            register()
    register()
    first = RejectionSampler.forward
    register()
    assert RejectionSampler.forward is first and first.__wrapped__ is VLLMS_OWN


def test_greedy_text_is_the_targets(engine: vllm.LLM, target: LlamaForCausalLM) -> None:
    expected = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(24):
            text.append(int(target(torch.tensor([text])).logits[0, -1].argmax()))
        expected.append(text[len(prompt) :])
    assert texts(engine, PROMPTS, [sampling(SETTINGS["greedy"], 24)] * 3) == expected
    # In a batch with sampled requests.
    mixed = [sampling(params, 24) for params in SETTINGS.values()]
    assert texts(engine, [PROMPTS[0]] * len(mixed), mixed)[3] == expected[0]


def test_the_law_is_the_targets(engine: vllm.LLM, target: LlamaForCausalLM) -> None:
    law(engine, target, SETTINGS, TRIALS).assert_lossless()


@pytest.mark.parametrize("engine", ["model"], indirect=True)
def test_filters_on_both_sides_break_it(
    engine: vllm.LLM, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mapping that suggests itself: vLLM draws drafts without filters."""
    verify = specops_vllm.verify_exact
    naive = {"filter_draft": True, "draft_lse": None}
    monkeypatch.setattr(specops_vllm, "verify_exact", lambda *args, **named: verify(*args, **(named | naive)))
    report = law(engine, target, SETTINGS, TRIALS)
    assert report.broken == ["top-p 0.8", "top-k 3", "temperature 1.3, top-k 5, top-p 0.9"]


@pytest.mark.parametrize("engine", ["ngram"], indirect=True)
def test_a_seed_gives_the_same_text_in_any_batch(engine: vllm.LLM) -> None:
    """With drafts from the text: vLLM draws those of a model from a generator that has no seed."""
    seeded = [sampling(params, 16, seed=7) for params in SETTINGS.values()]
    prompts = [PROMPTS[i % 3] for i in range(len(seeded))]
    alone = [texts(engine, [prompt], [params])[0] for prompt, params in zip(prompts, seeded, strict=True)]
    unseeded = sampling(SETTINGS["plain"], 16)
    mixed = texts(engine, [*prompts, *PROMPTS * 4], [*seeded, *[unseeded] * 12])
    assert mixed[: len(seeded)] == alone
    others = texts(engine, prompts, [sampling(params, 16, seed=8) for params in SETTINGS.values()])
    assert [one == other for one, other in zip(alone, others, strict=True)] == [name == "greedy" for name in SETTINGS]


LEFT = {
    "logprobs": {"logprobs": 2},
    "penalties": {"presence_penalty": 0.5},
    "allowed tokens": {"allowed_token_ids": [1, 2, 5]},
    "logits processors": {"min_tokens": 3, "stop_token_ids": [5]},
}


@pytest.mark.parametrize("engine", ["ngram"], indirect=True)
def test_what_goes_back_to_vllm(
    engine: vllm.LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def original(*args: Any) -> Any:
        calls.append(args)
        return VLLMS_OWN(*args)

    monkeypatch.setattr(RejectionSampler, "forward", specops_vllm.taking_over(original))
    # Loggers of vLLM do not propagate.
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [caplog.handler])
    texts(engine, PROMPTS, [sampling(SETTINGS["greedy"], 8)] * 3)
    assert not calls
    for reason, setting in LEFT.items():
        for _ in range(2):
            calls.clear()
            (output,) = engine.generate(
                {"prompt_token_ids": PROMPTS[0]}, sampling(SETTINGS["greedy"], 8, **setting), use_tqdm=False
            )
            assert calls, reason
        if reason == "logprobs":
            assert len(output.outputs[0].logprobs) == 8
        if reason == "allowed tokens":
            assert set(output.outputs[0].token_ids) <= {1, 2, 5}
    lines = [record.getMessage() for record in caplog.records if record.name == "vllm.specops"]
    assert lines == [f"torch_specops leaves batches with {reason} to vLLM's own sampler" for reason in LEFT]


SCRIPT = """
import sys, vllm
if __name__ == "__main__":
    print(vllm.LLM(**eval(sys.argv[1])).generate({"prompt_token_ids": [1]}))
"""


def test_the_engines_own_process_loads_it(folder: Path) -> None:
    """As README.md has it: by the environment alone."""
    path = folder / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(path), repr(options(folder, "model"))],
        env=os.environ | {"TORCH_SPECOPS_VLLM": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "torch_specops verifies" in line]
    assert any("EngineCore" in line for line in lines), done.stdout + done.stderr
    assert "RequestOutput(" in done.stdout


def test_vllm_alone(engine: vllm.LLM, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the same check says of this build as it is (vLLM issue 55005: temperature and top-p are uninitialised memory
    for the drafted tokens). If it passes one day, README.md must be written anew."""
    monkeypatch.setattr(RejectionSampler, "forward", VLLMS_OWN)
    assert law(engine, target, WITHOUT_TOP_K, TRIALS).broken == list(WITHOUT_TOP_K)
