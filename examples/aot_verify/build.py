"""Compiles main.cpp with the system's C++ compiler against the libraries of the installed torch.

    python examples/aot_verify/build.py aot_verify

CMake does the same with `find_package(Torch)`, given `-DCMAKE_PREFIX_PATH` from `torch.utils.cmake_prefix_path`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils import cpp_extension


def command(out: Path) -> list[str]:
    """The compiler's command line."""
    libraries = cpp_extension.library_paths()
    return [
        os.environ.get("CXX", "g++"),
        "-std=c++20",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in cpp_extension.include_paths()),
        str(Path(__file__).with_name("main.cpp")),
        *(option for path in libraries for option in (f"-L{path}", f"-Wl,-rpath,{path}")),
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-o",
        str(out),
    ]


if __name__ == "__main__":
    line = command(Path(sys.argv[1] if len(sys.argv) > 1 else "aot_verify"))
    print(shlex.join(line))
    subprocess.run(line, check=True)
