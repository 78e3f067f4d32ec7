"""Bring what the adapters need of packages that are not installed into external/, which git ignores.

    python benchmarks/peers/gather.py [--python 3.12]

FlashInfer, vLLM and SGLang come from their wheels, by pip, and of each only the files that its adapter loads:
FlashInfer's sampling functions with the CUDA sources that it compiles when they are called, and the others' Triton
files. Versions and hashes are fixed here. `manifest.json` holds the hash of every file; run again, files are compared
with it, and only what is missing or differs is brought anew.

The files are for x86-64 Linux, and one of them for one version of Python: --python names it where the files are to be
used elsewhere. CUDA sources are compiled where they are used, with `nvcc`.
"""

from __future__ import annotations

import argparse
import hashlib
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
MAX_BYTES = 60 * 2**20
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
        # The wheels of which only Python files are kept are the same for every version.
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


def _matches(name: str, pattern: str) -> bool:
    return name.startswith(pattern) if pattern.endswith("/") else PurePosixPath(name).match(pattern)


def gather(folder: Path, python: str, sources: Sequence[Wheel] = SOURCES) -> int:
    """Bring what is missing; returns the bytes of all files."""
    path = folder / MANIFEST
    manifest: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for source in sources:
        wanted = source.wanted(python)
        recorded = manifest.get(source.name, {})
        if wanted == {key: recorded.get(key) for key in wanted} and not differing(folder, recorded["files"]):
            print(f"{source.name}: as recorded", flush=True)
            continue
        for name in recorded.get("files", ()):
            (folder / name).unlink(missing_ok=True)
        files = {}
        for name, content in source.files(wanted, python):
            target = folder / source.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            files[str(target.relative_to(folder))] = digest(content)
        if not files:
            raise RuntimeError(f"{source.name}: none of its files is one of those wanted")
        manifest[source.name] = {**wanted, "files": files}
        path.write_text(json.dumps(manifest, indent=1) + "\n")
        print(f"{source.name}: {len(files)} files", flush=True)
    size = sum((folder / name).stat().st_size for source in manifest.values() for name in source["files"])
    if size > MAX_BYTES:
        raise RuntimeError(f"{folder}: expected at most {MAX_BYTES:,} bytes of files, got {size:,}")
    return size


def differing(folder: Path, files: dict[str, str]) -> list[str]:
    """Files that are not there or not as recorded."""
    return [
        name
        for name, expected in files.items()
        if not (folder / name).is_file() or digest((folder / name).read_bytes()) != expected
    ]


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=EXTERNAL)
    parser.add_argument("--python", default="{}.{}".format(*sys.version_info), help="version that will load the files")
    options = parser.parse_args(arguments)
    size = gather(options.folder, options.python)
    print(f"{options.folder}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
