"""AOTInductor packages: eager's tokens here, in a process that never imports torch_specops, and without Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from aot_example import decode, load, package, step_state, tiny_step
from op_cases import op_arguments
from torch import Tensor, nn

import torch_specops

pytestmark = [
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler: g++, or what CXX names"
    ),
    # torch's own: AOTInductor copies what its exporter deprecates.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]

# Makes and loads a package without any op of ours, on CUDA.
UNRELATED = """
import sys, torch
class Twice(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1
x = torch.ones(4, device="cuda")
torch._inductor.aoti_compile_and_package(torch.export.export(Twice(), (x,)), package_path=sys.argv[1])
torch._inductor.aoti_load_package(sys.argv[1])(x)
"""
# How many sequences: the batch of a package of one verification is free.
BATCHES = (1, 2, 4, 33)


# With one draft a step has all its parts, and compiles in half the time of one with two.
NUM_DRAFTS = 1


class TopP(nn.Module):
    def forward(self, logits: Tensor, top_p: Tensor) -> Tensor:
        return torch_specops.filter_logits(logits, top_p=top_p)


class Gumbel(nn.Module):
    def forward(self, logits: Tensor, drafts: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return torch_specops.verify_gumbel(logits, drafts, seeds, positions)


def gumbel_inputs(seed: int) -> list[Tensor]:
    given = op_arguments("verify_gumbel", 4, 3, 67, seed=seed)
    return [given[name] for name in ("target_logits", "draft_tokens", "seeds", "positions")]


def filter_inputs(seed: int) -> list[Tensor]:
    logits = 3 * torch.randn(4, 67, generator=torch.Generator().manual_seed(seed))
    return [logits, torch.tensor([0.9, 1.0, 0.5, 0.1])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the package of a verification."""
    path = tmp_path_factory.mktemp("packages")
    package.package(package.Verify(), package.verify_inputs(4), path / "verify.pt2", dynamic_batch=True)
    return path


@pytest.fixture(scope="module")
def packages(folder: Path) -> Path:
    """Beside it the packages of a whole step and of an op that filters, and the C++ program."""
    compiler = subprocess.Popen(load("build").command(folder / "aot_verify"), stderr=subprocess.PIPE, text=True)
    package.package(tiny_step(num_drafts=NUM_DRAFTS), step_state(), folder / "step.pt2", dynamic_batch=False)
    package.package(TopP(), filter_inputs(0), folder / "filtered.pt2", dynamic_batch=False)
    _, errors = compiler.communicate(timeout=500)
    assert compiler.returncode == 0, errors
    return folder


def load_package(path: Path) -> Callable[..., Any]:
    return torch._inductor.aoti_load_package(str(path))


@pytest.mark.slow
def test_a_filter_in_this_process(packages: Path) -> None:
    """On a CPU a package that filters calls the op that finds the bounds, which this process has."""
    top_p = load_package(packages / "filtered.pt2")
    for seed in BATCHES:
        assert torch.equal(top_p(*filter_inputs(seed)), TopP()(*filter_inputs(seed)))


FRESH_PROCESS = """
import sys, torch
run = torch._inductor.aoti_load_package(sys.argv[1])
for arguments, expected, changed in torch.load(sys.argv[2]):
    outputs = run(*arguments)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(arguments, changed, strict=True))
assert "torch_specops" not in sys.modules
print("equal")
"""


def check_in_a_fresh_process(path: Path, cases: list[Any]) -> None:
    torch.save(cases, path.with_suffix(".cases"))
    command = [sys.executable, "-c", FRESH_PROCESS, str(path), str(path.with_suffix(".cases"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "equal"), done.stderr


@pytest.mark.slow
def test_a_verification_in_a_fresh_process(folder: Path) -> None:
    """The package needs neither torch_specops nor any of its modules, and takes any batch."""
    inputs = [package.verify_inputs(batch, seed=batch) for batch in BATCHES]
    check_in_a_fresh_process(folder / "verify.pt2", [(each, package.Verify()(*each), each) for each in inputs])


@pytest.mark.slow
def test_a_verification_with_noise_in_a_fresh_process(tmp_path: Path) -> None:
    package.package(Gumbel(), gumbel_inputs(0), tmp_path / "gumbel.pt2", dynamic_batch=False)
    inputs = [gumbel_inputs(seed) for seed in BATCHES]
    check_in_a_fresh_process(tmp_path / "gumbel.pt2", [(each, Gumbel()(*each), each) for each in inputs])


@pytest.mark.slow
def test_a_step_in_a_fresh_process(packages: Path) -> None:
    """The caches of a step are buffers of its package; the text and its state are arguments that it changes."""
    step, steps = tiny_step(num_drafts=NUM_DRAFTS), []
    state = step_state()
    for _ in range(3):
        before = [value.clone() for value in state]
        with torch.no_grad():
            record = step(*state)
        steps.append((before, [record], [value.clone() for value in state]))
    check_in_a_fresh_process(packages / "step.pt2", steps)


def run_without_python(program: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, arguments)]
    # Nothing of this process's environment: no PYTHONPATH, no virtual environment.
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env={})


def printed_rows(done: subprocess.CompletedProcess[str]) -> list[list[int]]:
    assert done.returncode == 0, done.stderr
    return [[int(token) for token in line.split()] for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_verifications_and_texts_without_python(packages: Path) -> None:
    """A C++ program loads the packages: a verification for any batch, the loop around a step, but no filter."""
    program, inputs_file = packages / "aot_verify", packages / "inputs.pt"
    if shutil.which("ldd") is not None:
        libraries = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
        assert "libtorch_cpu" in libraries and "libpython" not in libraries and "torch_python" not in libraries
    for batch in BATCHES:
        inputs = package.verify_inputs(batch, seed=batch)
        torch.save(inputs, inputs_file)
        output_tokens, num_accepted = package.Verify()(*inputs)
        done = run_without_python(program, "verify", packages / "verify.pt2", inputs_file)
        assert printed_rows(done) == [row[: n + 1].tolist() for row, n in zip(output_tokens, num_accepted, strict=True)]
    texts = run_without_python(program, "decode", packages / "step.pt2", packages / "step_inputs.pt")
    assert printed_rows(texts) == decode(tiny_step(num_drafts=NUM_DRAFTS), step_state())

    missing = run_without_python(program, "verify", packages / "verify.pt2", packages / "nothing.pt")
    assert missing.returncode == 1 and missing.stderr.startswith("cannot read ")
    assert run_without_python(program).returncode == 2
    filtered = run_without_python(program, "verify", packages / "filtered.pt2", packages / "filtered_inputs.pt")
    assert filtered.returncode == 1
    assert "Could not find schema for specops::filter_bounds" in filtered.stderr
    assert "On a CPU top_k, top_p and min_p need torch_specops, a Python package." in filtered.stderr


@pytest.mark.gpu
@pytest.mark.not_rehearsed("AOTInductor on CUDA", runs=False)
def test_a_verification_and_a_whole_step_on_cuda(tmp_path: Path) -> None:
    tried = subprocess.run([sys.executable, "-c", UNRELATED, str(tmp_path / "twice.pt2")], check=False)
    if tried.returncode < 0:
        pytest.skip(
            f"torch {torch.__version__} crashes when it loads a package of x * 2 + 1 (signal {-tried.returncode})"
        )
    inputs = [value.cuda() for value in package.verify_inputs(4)]
    package.package(package.Verify(), inputs, tmp_path / "verify.pt2", dynamic_batch=True)
    verify = load_package(tmp_path / "verify.pt2")
    for batch in BATCHES:
        inputs = [value.cuda() for value in package.verify_inputs(batch, seed=batch)]
        assert all(torch.equal(a, b) for a, b in zip(verify(*inputs), package.Verify()(*inputs), strict=True))

    step = tiny_step("cuda", num_drafts=NUM_DRAFTS)
    package.package(step, step_state("cuda"), tmp_path / "step.pt2", dynamic_batch=False)
    texts = decode(load_package(tmp_path / "step.pt2"), step_state("cuda"))
    assert texts == decode(tiny_step("cuda", num_drafts=NUM_DRAFTS), step_state("cuda"))
