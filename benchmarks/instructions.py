"""How many instructions a thread of `verify_exact`'s first kernel executes for the bytes it loads; no GPU needed.

    python benchmarks/instructions.py [--target sm_90]

The kernel is compiled ahead of time and its SASS followed along every path from the entry to an exit; there are no
loops. The common path is that of a sampled row in a tile that is not an end of its row: all wide loads of one row and
no narrow loads of it, an exponential for each entry, no call (a division's rare case). Of the
paths that are left the shortest and the longest are reported; an instruction that a predicate switches off counts, as
it is issued.

The last column is what the schedulers allow: --multiprocessors x 4 instructions a clock, at --ghz.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kernel_resources import KERNELS, TARGETS, Build, builds, compile_kernel, cuobjdump
from markdown_table import table

from torch_specops.kernels import launch

KERNEL = "verify_exact.stats"
CONFIGS = (
    "bf16 / bf16, HAS_TEMPERATURE=False, draft rows",
    "bf16 / bf16, draft rows",
    "fp32 / fp32, draft rows",
    "bf16 / bf16, TILE=1024, BLOCK_T=256, draft rows",
)
LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(@!?U?P\w+\s+)?([^;]*);")


@dataclass(frozen=True)
class Instruction:
    address: int
    predicated: bool
    text: str

    @property
    def name(self) -> str:
        return self.text.split()[0]

    @property
    def jumps_to(self) -> int | None:
        """`BRA.DIV` leaves for threads that have diverged, which these have not."""
        return int(self.text.split()[-1], 16) if self.name == "BRA" else None


def instructions(sass: str) -> list[Instruction]:
    return [Instruction(int(m[1], 16), m[2] is not None, m[3].strip()) for m in LINE.finditer(sass)]


def paths(program: list[Instruction]) -> Iterator[list[Instruction]]:
    """Every path that goes forward from the entry to an exit and calls nothing."""
    place = {instruction.address: i for i, instruction in enumerate(program)}

    def follow(i: int, before: list[Instruction]) -> Iterator[list[Instruction]]:
        path = list(before)
        while True:
            one = program[i]
            path.append(one)
            if one.name == "EXIT":
                yield path
                if not one.predicated:
                    return
            elif one.name.startswith("CALL"):
                return
            elif one.jumps_to is not None:
                if one.jumps_to <= one.address:
                    return
                if one.predicated:
                    yield from follow(place[one.jumps_to], path)
                else:
                    i = place[one.jumps_to]
                    continue
            i += 1

    yield from follow(0, [])


def common_paths(program: list[Instruction], wide_loads: int, entries: int) -> list[int]:
    """Instructions on each common path, sorted."""
    found = []
    for path in paths(program):
        wide = [i.address for i in path if ".128" in i.text and i.name.startswith("LDG")]
        if len(wide) != wide_loads or sum(i.name == "MUFU.EX2" for i in path) != entries:
            continue
        # Narrow loads behind the wide ones are the branch for a row's ends; those before are of single numbers.
        if not any(i.name.startswith("LDG") and i.address > wide[-1] for i in path):
            found.append(len(path))
    return sorted(found)


def measure(build: Build, target: str) -> dict[str, Any]:
    types, constants = dict(build.types), dict(build.constants)
    compiled = compile_kernel(KERNELS[build.kernel], types, constants, target)
    threads = 32 * launch.stats_warps(constants["TILE"])
    entries = constants["TILE"] // threads
    loaded = entries * (4 if types["target_ptr"] == "*fp32" else 2)
    found = common_paths(instructions(cuobjdump(compiled, "--dump-sass")), loaded // 16, entries)
    return {"config": build.config, "bytes": loaded, "shortest": found[0], "longest": found[-1]}


def chosen_builds() -> list[Build]:
    known = {(build.kernel, build.config): build for build in builds()}
    return [known[KERNEL, config] for config in CONFIGS]


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    nvidia = [name for name, target in TARGETS.items() if target.backend == "cuda"]
    parser.add_argument("--target", choices=nvidia, default="sm_90")
    parser.add_argument("--multiprocessors", type=int, default=132)
    parser.add_argument("--ghz", type=float, default=1.98)
    options = parser.parse_args(arguments)
    found = [measure(build, options.target) for build in chosen_builds()]
    rows = []
    for one in found:
        per_byte = [one[name] / one["bytes"] for name in ("shortest", "longest")]
        most = [options.multiprocessors * 4 * 32 * options.ghz / each / 1e3 for each in reversed(per_byte)]
        rows.append(one | {"per_byte": per_byte, "most": most})
    line = "{config} | {bytes} | {shortest} to {longest} | {per_byte[0]:.1f} to {per_byte[1]:.1f}"
    header = f"{KERNEL}, {options.target} | bytes a thread | instructions | a byte | at most, TB/s"
    print(table(header, line + " | {most[0]:.1f} to {most[1]:.1f}", rows, padded=True))
    return found


if __name__ == "__main__":
    main()
