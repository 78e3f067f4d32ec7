"""The adapters of other implementations, with stand-ins for what is not installed: layouts, reasons for skipping, and a
check that finds a wrong peer."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_specops

FOLDER = Path(__file__).parents[1] / "benchmarks"

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="an installed package has no benchmarks")

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """The scripts import each other by name."""
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture
def problems() -> ModuleType:
    return importlib.import_module("problems")


@pytest.fixture
def peers() -> ModuleType:
    return importlib.import_module("peers")


@pytest.fixture(params=["float32", "bfloat16"])
def problem(request: pytest.FixtureRequest, problems: ModuleType) -> Any:
    return problems.Problem("sampled", 5, 3, 64, request.param, acceptance=0.7)


def own_law(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What a peer that draws its own numbers returns: of our op, on probabilities."""
    u, s = torch.rand(tokens.shape), torch.rand(len(tokens))
    return torch_specops.verify_exact(p.log(), tokens.long(), q.log(), u, s)


def install_flashinfer(monkeypatch: pytest.MonkeyPatch, verify: Callable[..., Any] = own_law) -> None:
    def chain_speculative_sampling(
        draft_probs: Tensor,
        draft_token_ids: Tensor,
        target_probs: Tensor,
        maybe_output_accepted_token_num: Tensor | None = None,
        maybe_output_emitted_draft_token_num: Tensor | None = None,
        deterministic: bool = True,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        offset: int | None = None,
    ) -> tuple[Tensor, ...]:
        assert draft_probs.dtype == target_probs.dtype == torch.float32
        assert draft_token_ids.dtype == maybe_output_accepted_token_num.dtype == torch.int32
        tokens, n = verify(target_probs, draft_probs, draft_token_ids)
        return tokens.int(), n.int(), n.int()

    module = ModuleType("flashinfer.sampling")
    module.chain_speculative_sampling = chain_speculative_sampling
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", module)


# Files at the places and with the functions of the clones, on probabilities or logits of the same layout.
SGLANG = """
import torch, torch_specops

def chain_speculative_sampling_triton(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs, threshold_single, threshold_acc,
    deterministic,
):
    tokens, n = torch_specops.verify_exact(
        target_probs.log(), candidates[:, 1:], draft_probs.log(), uniform_samples, uniform_samples_for_final_sampling
    )
    for b, own in enumerate(tokens):
        predicts[retrive_index[b, : n[b] + 1]] = own[: n[b] + 1].int()
    accept_token_num.copy_(n)
"""
VLLM = """
import torch, torch_specops
from vllm.triton_utils import tl, tldevice, triton
from vllm.v1.worker.gpu.sample.gumbel import rand

def rejection_sample(
    target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping,
    expanded_local_pos, temperature, seed, num_speculative_steps, use_fp64=False,
):
    batch, width = len(cu_num_logits) - 1, num_speculative_steps + 1
    assert cu_num_logits.tolist() == [width * b for b in range(batch + 1)]
    assert expanded_local_pos.tolist() == list(range(width)) * batch
    assert expanded_idx_mapping.tolist() == [b for b in idx_mapping.tolist() for _ in range(width)]
    # The draft that row i is verified with stands at i + 1.
    rows = torch.arange(batch * width).view(batch, width)[:, :-1]
    tokens, n = torch_specops.verify_exact(
        target_logits.view(batch, width, -1), draft_sampled[rows + 1].long(), draft_logits,
        rand(batch, width - 1), rand(batch), temperature,
    )
    return tokens.where(tokens >= 0, 12345), (n + 1).int()
"""


def write_copies(folder: Path) -> None:
    for path, text in {
        "sglang/python/sglang/kernels/ops/speculative/reject_sampling.py": SGLANG,
        "vllm/vllm/__init__.py": "raise RuntimeError('the engine was loaded')",
        "vllm/vllm/v1/worker/gpu/sample/gumbel.py": "from torch import rand",
        "vllm/vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py": VLLM,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def found(peers: ModuleType, name: str) -> Any:
    (peer,) = [peer for peer in peers.all_peers() if peer.name == name]
    return peer


def test_what_is_not_there_is_skipped_with_a_reason(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_SPECOPS_PEERS", str(tmp_path))
    for package in ("flashinfer", "vllm", "sglang"):
        monkeypatch.setitem(sys.modules, package, None)
    reasons = {peer.name: peer.unavailable(CPU) for peer in peers.all_peers()}
    assert [name for name, reason in reasons.items() if reason is None] == [
        *("specops", "specops, lse", "specops compiled", "transformers", "transformers compiled")
    ]
    assert "not installed: flashinfer" in reasons["FlashInfer"]
    assert str(tmp_path) in reasons["vLLM"] and str(tmp_path) in reasons["SGLang"]
    assert "speculative_sampling_fp32.cu" in reasons["Wagner et al., exact"]
    # With its source there it is the device that is missing.
    folder = tmp_path / "optimized-speculative-sampling"
    folder.mkdir()
    (folder / "speculative_sampling_fp32.cu").touch()
    assert found(peers, "Wagner et al., exact").unavailable(CPU) == "needs a CUDA device, this is cpu"


def test_copies_are_found_without_loading_the_engine(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TORCH_SPECOPS_PEERS", str(tmp_path))
    write_copies(tmp_path)
    for name in ("vLLM", "SGLang"):
        assert found(peers, name).unavailable(CPU) == "needs a CUDA device, this is cpu"
    assert not any(name.startswith("vllm") for name in sys.modules)
    (tmp_path / "vllm/vllm/v1/worker/gpu/sample/gumbel.py").write_text("import a_module_that_is_not_there")
    assert "does not load: ModuleNotFoundError" in found(peers, "vLLM").unavailable(CPU)


def test_another_version_is_refused(peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_SPECOPS_PEERS", str(tmp_path))
    monkeypatch.setitem(sys.modules, "sglang", None)
    write_copies(tmp_path)
    path = tmp_path / "sglang/python/sglang/kernels/ops/speculative/reject_sampling.py"
    path.write_text(SGLANG.replace("threshold_acc,", ""))
    assert "has no argument threshold_acc" in found(peers, "SGLang").unavailable(CPU)
    path.write_text(SGLANG.replace("deterministic,", "deterministic, tree"))
    assert "also wants tree" in found(peers, "SGLang").unavailable(CPU)

    from transformers.generation import utils

    monkeypatch.setattr(utils, "_speculative_sampling", lambda ids, logits: None)
    assert "another version" in found(peers, "transformers").unavailable(CPU)


@pytest.mark.parametrize(
    "name", ["specops", "specops, lse", "transformers", "FlashInfer", "vLLM", "vLLM, no copy", "SGLang"]
)
def test_answers_in_their_own_layouts_are_right(
    name: str, problem: Any, problems: ModuleType, peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TORCH_SPECOPS_PEERS", str(tmp_path))
    write_copies(tmp_path)
    install_flashinfer(monkeypatch)
    peer = found(peers, name)
    assert peer.unavailable(CPU) in (None, "needs a CUDA device, this is cpu")
    inputs = problems.make_inputs(problem, CPU, seed=0)
    assert 0 < sum(problem.num_accepted) < 15
    peer.check(problem, inputs)


def test_the_papers_kernels_are_called_row_by_row(
    problem: Any, problems: ModuleType, peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sampling_cuda(
        ids: Tensor, candidate_logits: Tensor, length: int, new_logits: Tensor, is_eos: bool, max_matches: int
    ) -> tuple[Tensor, int]:
        assert candidate_logits.dtype == new_logits.dtype == torch.float32
        tokens, n = own_law(new_logits.softmax(-1), candidate_logits.softmax(-1), ids[:, -length:])
        return tokens[:, : int(n) + 1], min(int(n), max_matches)

    inputs = problems.make_inputs(problem, CPU, seed=0)
    for name in ("Wagner et al., exact", "Wagner et al., sigmoid"):
        peer = found(peers, name)
        peer._function = sampling_cuda
        peer.check(problem, inputs)
        peer._function = lambda *arguments: (sampling_cuda(*arguments)[0], 0)
        with pytest.raises(RuntimeError, match="is wrong in"):
            peer.check(problem, inputs)


@pytest.mark.parametrize(
    "defect", ["draws from p", "verifies the next draft", "one draft too few", "shifted tokens", "accepts with p"]
)
def test_check_finds_a_wrong_peer(
    defect: str, problem: Any, problems: ModuleType, peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    install_flashinfer(monkeypatch, wrong)
    with pytest.raises(RuntimeError, match="FlashInfer is wrong in rows"):
        found(peers, "FlashInfer").check(problem, problems.make_inputs(problem, CPU, seed=0))


def test_uniforms_are_compared_where_a_peer_takes_them(problem: Any, problems: ModuleType, peers: ModuleType) -> None:
    """A draw that ignores s passes where nothing is left to chance."""
    peer = found(peers, "specops")
    inputs = problems.make_inputs(problem, CPU, seed=0)
    right = peer.prepare

    def ignoring(case: dict[str, Tensor]) -> Callable[[], Any]:
        return right(case | {"sample_uniforms": torch.zeros_like(case["sample_uniforms"])})

    peer.prepare = ignoring
    for case in (problems.determined(inputs), problems.determined(inputs, residual=True)):
        problems.check_answer("specops", problem, case, ignoring(case)())
    with pytest.raises(RuntimeError, match="specops is wrong in rows"):
        peer.check(problem, inputs)


def test_bytes_of_what_a_peer_needs(problems: ModuleType, peers: ModuleType) -> None:
    bf16 = problems.Problem("sampled", 2, 3, 100, "bfloat16")
    fp32 = problems.Problem("sampled", 2, 3, 100, "float32")
    rows = 2 * (4 + 3) * 100
    needs = {peer.name: (peer.needs_bytes(bf16), peer.needs_bytes(fp32)) for peer in peers.all_peers()}
    assert needs["specops"] == needs["vLLM, no copy"] == (0, 0)
    assert needs["transformers"] == needs["Wagner et al., exact"] == (6 * rows, 0)
    assert needs["FlashInfer"] == needs["SGLang"] == (6 * rows, 8 * rows)
    assert needs["vLLM"] == (6 * 2 * 4 * 100, 8 * 2 * 4 * 100)


def test_a_wrong_peer_is_not_timed_and_ours_must_be_right(
    problem: Any, peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = importlib.import_module("bench_peers")

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
    bench = importlib.import_module("bench_peers")
    out, picture = tmp_path / "new" / "out.json", tmp_path / "out.png"
    size = ["--device", "cpu", "--batch", "3", "--vocab", "300", "--num-draft-tokens", "2", "--rounds", "2"]
    bench.main([*size, "--no-compiled", "--out", str(out), "--plot", str(picture)])
    written = json.loads(out.read_text())
    assert {"device", "torch", "triton", "date", "commit", "copy_gb_per_s"} <= set(written["environment"])
    assert {"FlashInfer", "vLLM", "SGLang"} <= set(written["skipped"]) | {r["peer"] for r in written["records"]}
    ours, theirs = ([r for r in written["records"] if r["peer"] == name] for name in ("specops", "transformers"))
    assert [r["batch"] for r in ours] == [r["batch"] for r in theirs] == [3]
    for record, own in zip(theirs, ours, strict=True):
        assert record["device_time_over_ours"] == pytest.approx(record["device_ms"] / own["device_ms"])
        assert record["needs_bytes"] == record["batch"] * 5 * 300 * 6
        assert record["peak_bytes"] > 0 and record["launches"] is None and record["graph_ms"] is None
    assert picture.read_bytes().startswith(b"\x89PNG")
