"""The base classes of the adapters: how a peer is found, called, and checked before it is timed.

All peers get the same inputs (`problems.py`): logits of target and draft in one dtype, drafts, uniforms; temperature 1.
`prepare` makes what an engine keeps from step to step (index tensors, buffers, the layout of its token ids), which is
not timed. What has to be done with every new set of logits (softmax, a float32 copy) belongs to the call and is timed;
`needs` names it and `needs_bytes` counts it.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from problems import Inputs, Problem, Result, centred, check_answer, determined
from torch import Tensor

FOLDER = "TORCH_SPECOPS_PEERS"


class Peer(ABC):
    """One implementation.

    Attributes:
        name: as in the tables.
        needs: what its time includes beside its own kernels; empty if nothing.
        takes_uniforms: it draws from the uniforms of the inputs, so its tokens can be compared where chance decides.
        not_captured: why a CUDA graph of its call cannot be made; None if it can.
        is_built: it compiles CUDA sources where it is used, with `nvcc`.
    """

    name: str
    needs: str = ""
    takes_uniforms: bool = False
    not_captured: str | None = None
    is_built: bool = False

    @abstractmethod
    def unavailable(self, device: torch.device) -> str | None:
        """Why it cannot run here: not installed, no CUDA device, a version that is not known; None if it can."""

    @abstractmethod
    def prepare(self, inputs: Inputs) -> Callable[[], Any]:
        """The call that is timed."""

    @abstractmethod
    def answer(self, returned: Any, inputs: Inputs) -> Result:
        """What the call returned, as `verify_exact` returns it: [B, K+1] and [B] int64."""

    def needs_bytes(self, problem: Problem) -> int:
        """Bytes read and written by what `needs` says, each array once."""
        return 0

    def cases(self, inputs: Inputs) -> Iterator[Inputs]:
        """Inputs on which the answer is compared with the reference."""
        yield determined(inputs)
        yield determined(inputs, residual=True)
        if self.takes_uniforms:
            yield centred(inputs)

    def check(self, problem: Problem, inputs: Inputs) -> None:
        """Raise RuntimeError unless its answers are right, and it accepts of the inputs what they were made for."""
        for case in self.cases(inputs):
            check_answer(self.name, problem, case, self.answer(self.prepare(case)(), case))
        _, n = self.answer(self.prepare(inputs)(), inputs)
        if not torch.equal(n, inputs["num_accepted"]):
            rows = (n != inputs["num_accepted"]).nonzero().flatten().tolist()
            raise RuntimeError(f"{problem}: {self.name} is wrong in rows {rows}: numbers of accepted drafts")


class OneByOne(Peer):
    """A function for one sequence and float32 logits, called for one sequence after another."""

    @abstractmethod
    def sampling_function(
        self, candidate_ids: Tensor, draft: Tensor, num_drafts: int, target: Tensor, is_done: bool
    ) -> tuple[Tensor, int]:
        """With the arguments of transformers' `_speculative_sampling`."""

    def copied(self, target: Tensor) -> Tensor:
        return target.float()

    def prepare(self, inputs: Inputs) -> Callable[[], Any]:
        tokens = inputs["draft_tokens"]
        target, draft = inputs["target_logits"], inputs["draft_logits"]
        batch, num_drafts = tokens.shape

        def call() -> list[Any]:
            p, q = self.copied(target), draft.float()
            return [
                self.sampling_function(tokens[b : b + 1], q[b : b + 1], num_drafts, p[b : b + 1], False)
                for b in range(batch)
            ]

        return call

    def answer(self, returned: Any, inputs: Inputs) -> Result:
        batch, num_drafts = inputs["draft_tokens"].shape
        output = inputs["draft_tokens"].new_full((batch, num_drafts + 1), -1)
        for b, (tokens, _) in enumerate(returned):
            output[b, : tokens.shape[1]] = tokens[0]
        return output, torch.tensor([int(n) for _, n in returned], device=output.device)

    def needs_bytes(self, problem: Problem) -> int:
        return 0 if problem.dtype == "float32" else softmax_bytes(problem, row_count(problem))


class FunctionPeer(Peer):
    """A function of an installed package, or of a copy of its file.

    Attributes:
        arguments: the names it takes in the version that the adapter was written for.
    """

    arguments: tuple[str, ...]
    _function: Callable[..., Any] | None = None

    @abstractmethod
    def find(self) -> Callable[..., Any] | None:
        """Of the package, else of the copy; None if there is neither."""

    @abstractmethod
    def place_of_copy(self) -> str: ...

    def unavailable(self, device: torch.device) -> str | None:
        try:
            function = self.find()
        except Exception as error:
            return f"its copy does not load: {type(error).__name__}: {error}"
        if function is None:
            return f"neither installed nor at {self.place_of_copy()}"
        self._function = function
        return missing_arguments(function, self.arguments) or no_cuda(device)


def no_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else f"needs a CUDA device, this is {device.type}"


def external_folder() -> Path:
    """Where copies of peers that are not installed lie: the environment variable, else a folder that git ignores."""
    return Path(os.environ.get(FOLDER) or Path(__file__).parent / "external")


class BarePackages:
    """Finds the packages of a copy without running their `__init__`, which would load all there is of them.

    Args:
        folder: holds the package.
        package: its name.
    """

    def __init__(self, folder: Path, package: str) -> None:
        self.folder = folder
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        folder = self.folder / Path(*name.split("."))
        if name.split(".")[0] != self.package or not folder.is_dir():
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


def prepare_nvcc() -> str | None:
    """Name in the environment what a build needs and a bare toolkit may lack; returns why nothing can be built."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return "needs nvcc to build it"
    # What is on PATH may be a script beside other programs, not the toolkit.
    places = [Path("/usr/local/cuda"), Path(nvcc).resolve().parents[1]]
    home = next((path for path in places if (path / "include" / "cuda_runtime.h").exists()), places[-1])
    os.environ.setdefault("CUDA_HOME", str(home))
    if not (home / "include" / "curand.h").exists():
        # torch's own copy.
        headers = [path.parent for place in sys.path for path in Path(place).glob("nvidia/*/include/curand.h")]
        os.environ["CPATH"] = os.pathsep.join([*filter(None, [os.environ.get("CPATH")]), *map(str, headers[:1])])
    if not (home / "lib64" / "stubs" / "libcuda.so").exists() and "driver-stub" not in os.environ.get(
        "LIBRARY_PATH", ""
    ):
        # The linker wants a library of the driver's name; which one is loaded is decided where the program runs.
        stub = Path(tempfile.mkdtemp(prefix="driver-stub-")) / "libcuda.so"
        command = ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o", str(stub)]
        subprocess.run(command, check=True)
        known = filter(None, [os.environ.get("LIBRARY_PATH")])
        os.environ["LIBRARY_PATH"] = os.pathsep.join([*known, str(stub.parent)])
    return None


def load_file(path: Path, name: str) -> ModuleType:
    """The module in a file, under a name that is free to choose."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no Python module: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def missing_arguments(function: Callable[..., Any], names: tuple[str, ...]) -> str | None:
    """Why this is another version than the adapter was written for."""
    known = inspect.signature(function).parameters
    missing = [name for name in names if name not in known]
    if missing:
        return f"another version: {function.__name__} has no argument {', '.join(missing)}"
    more = [
        name
        for name, parameter in known.items()
        if name not in names and parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    return f"another version: {function.__name__} also wants {', '.join(more)}" if more else None


def padded(tokens: Tensor, num_accepted: Tensor) -> Result:
    """[B, K+1] tokens that may hold anything behind the next token -> as `verify_exact` returns them."""
    n = num_accepted.long()
    behind = torch.arange(tokens.shape[1], device=tokens.device) > n.unsqueeze(-1)
    return tokens.long().masked_fill(behind, -1), n


def row_count(problem: Problem) -> int:
    """Rows of logits of both sides."""
    return problem.batch * (2 * problem.num_draft_tokens + 1)


def softmax_bytes(problem: Problem, rows: int) -> int:
    """Of `softmax(dtype=float32)` or a float32 copy of so many rows: one read and one write."""
    size = getattr(torch, problem.dtype).itemsize
    return rows * problem.vocab * (size + 4)
