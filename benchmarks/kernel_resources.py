"""Compile every kernel ahead of time, with no GPU, and report registers, spills and the width of its loads.

    python benchmarks/kernel_resources.py [--out FILE.json] [--target sm_90 ...] [--every 1]

A build knows what its caller would state. An eager call: nothing of sizes, strides and addresses. A graph of Inductor:
addresses are multiples of 16 bytes; a size is a constant where it is 1, and marked where it is a multiple of 16; a
symbolic size is 64 bits wide.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import triton
from rich.progress import track
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torch_specops.ops import cuda
from torch_specops.ops.cuda import accept, attention, exact, launch, sample, stats, uniforms
from torch_specops.ops.cuda.filter import bounds, groups, search

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Where the first part of a kernel's name is not "verify_" and its module.
PREFIXES = {"stats": "verify_exact", "attention": "attend"}
PREFIXES |= {"sample": "sample", "filter": "filter", "uniforms": "uniforms"}


def kernels() -> dict[str, Any]:
    """Every kernel of the package, by the op that launches it."""
    found = {}
    for info in pkgutil.walk_packages(cuda.__path__, f"{cuda.__name__}."):
        room = info.name.removeprefix(f"{cuda.__name__}.").split(".")[0]
        for name, kernel in vars(importlib.import_module(info.name)).items():
            if name.endswith("_kernel") and kernel.fn.__module__ == info.name:
                found[f"{PREFIXES.get(room, f'verify_{room}')}.{name.removesuffix('_kernel')}"] = kernel
    return found


KERNELS = kernels()
# Its name in the result files.
KERNELS["attend.parts"] = KERNELS.pop("attend.attend")
DTYPES = (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "bf16"))
TILES = (launch.MAX_TILE, launch.MAX_TILE // 2, launch.MIN_TILE)
# With the partials of a row of 256,000 entries, as the default has them.
SMALL_TILES = ({"TILE": TILES[1], "BLOCK_T": 128}, {"TILE": TILES[2], "BLOCK_T": 256})
# Numbers that are multiples of 16 in a graph of contiguous tensors if the vocabulary is one.
VOCABULARIES = {
    *("vocab_size", "stride_target_b", "stride_target_k", "stride_draft_b", "stride_draft_k"),
    *("stride_b", "stride_r", "stride_n"),
}
# The arguments that are None under a flag of a build, or without one.
ABSENT_WITH = {
    "UNIT_STRIDE": ("stride_v", "stride_target_v", "stride_draft_v"),
    "ONE_HOT": ("draft_ptr", "draft_lse_ptr", "draft_bounds_ptr"),
    "DRAFT_ROWS": ("draft_lse_ptr",),
    "UNFILTERED_DRAFT": ("draft_bounds_ptr",),
}
ABSENT_WITHOUT = {
    "HAS_TEMPERATURE": ("temperature_ptr",),
    "FILTERED": ("bounds_ptr", "draft_bounds_ptr", "top_ptr"),
    "ARGMAX_LENIENT": ("argmax_gap",),
    "SOME_ONE_HOT": ("one_hot_ptr",),
}
TYPES = dict.fromkeys(("num_accepted_ptr", "output_tokens_ptr", "tokens_ptr", "top_k_ptr"), "*i64")
TYPES |= dict.fromkeys(("draft_tokens_ptr", "seeds_ptr", "positions_ptr"), "*i64")
TYPES |= {"ratio_ptr": "*fp64", "reach_ptr": "*fp64", "count_ptr": "*i32", "part_ptr": "*i32", "token_ptr": "*i32"}
TYPES |= {"one_hot_ptr": "*i1"}
TYPES |= dict.fromkeys(("lenience", "argmax_gap", "alpha", "inverse_range", "lowest"), "fp32")
# A number of the launcher's own, never symbolic.
TYPES |= {"tiles_per_program": "i32"}
# `ptxas` keeps up to two registers in 8 bytes of stack to make room for another program on a multiprocessor, and
# accesses them up to six times; what is more is a fault of the kernel.
SPILL_LIMIT = 14


@dataclass(frozen=True)
class Build:
    """One kernel in one configuration: types of its arguments by name, its constants, and the arguments that are known
    to be multiples of 16."""

    kernel: str
    config: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    multiples: tuple[str, ...]


@dataclass(frozen=True)
class Resources:
    """What the assembler says. `spill_bytes` is memory that spilled registers went to: stack and local memory, plus 1
    for every local load or store (NVIDIA); the private segment (AMD, where a scalar register that moves to a lane of
    a vector register touches no memory). Loads are counted in the SASS of NVIDIA builds: 128-bit ones, and all
    narrower ones. `instructions` are those of the SASS, padding included. `fused_exchanges` are faults: sums
    that are not the same number in all lanes."""

    kernel: str
    config: str
    target: str
    registers: int
    spill_bytes: int
    wide_loads: int | None = None
    narrow_loads: int | None = None
    fused_exchanges: int | None = None
    instructions: int | None = None


def builds() -> Iterator[Build]:
    """Every kernel with every pair of dtypes and kind of draft, and every other option: temperatures, and sizes of 64
    bits, with every tile; the rest one at a time. Attention with every dtype and several widths of a head."""
    cold, i64 = {"HAS_TEMPERATURE": False}, {"sizes": "i64"}
    options: list[dict[str, Any]] = [
        *(cold, {"UNIT_STRIDE": False}, {"BLOCK_K": 64}, {"FILTERED": True, "ARGMAX_LENIENT": True}),
        *({"SOME_ONE_HOT": True}, {"SOME_ONE_HOT": True, "FILTERED": True}),
        {"FOUND": True, "FILTERED": True, "LSE_WIDTH": 3},
        *({"FILTERED": True, "UNFILTERED_DRAFT": True}, {"tokens": "i32", "uniforms": "fp64"}, {"sizes": "static"}),
        *(i64, i64 | cold, i64 | {"FILTERED": True}),
    ]
    for tile in SMALL_TILES:
        options += [tile, tile | cold, tile | {"FILTERED": True}, tile | i64, tile | i64 | cold]
    # The searches that `cut_warps` tells apart.
    few_groups = {"BLOCK_G": bounds.FEW_GROUPS}
    every = [_op_builds(*dtypes, **groups) for groups in ({}, few_groups) for dtypes in DTYPES]
    options += [few_groups | option for option in options]
    few = [build for option in options for build in _op_builds("bf16", "bf16", **option)]
    seen = set()
    for build in (*itertools.chain(*every), *(build for build in few if "draft_lse" not in build.config)):
        # A kernel that does not know an option is not built twice alike.
        known = (build.kernel, build.types, build.constants, build.multiples)
        if known not in seen:
            seen.add(known)
            yield build
    yield from _attention_builds()


def share(first: int, step: int) -> list[Build]:
    """Of each kernel the first-th build and every step-th from there."""
    every = list(builds())
    return [build for kernel in KERNELS for build in [b for b in every if b.kernel == kernel][first::step]]


def _op_builds(target_dtype: str, draft_dtype: str, **option: Any) -> Iterator[Build]:
    types = TYPES | {"draft_ptr": f"*{draft_dtype}", "sizes": option.get("sizes", "")}
    types |= {f"{name}_ptr": f"*{target_dtype}" for name in ("target", "logits", "output", "top", "value")}
    types |= {"draft_tokens_ptr": f"*{option.get('tokens', 'i64')}"}
    numbers = f"*{option.get('uniforms', 'fp32')}"
    types |= dict.fromkeys(("accept_uniforms_ptr", "sample_uniforms_ptr", "uniforms_ptr"), numbers)
    flags = {"HAS_TEMPERATURE": True, "UNIT_STRIDE": True}
    flags |= {key: value for key, value in option.items() if isinstance(value, bool)}
    constants = {"TILE": TILES[0], "BLOCK_K": launch.MIN_LANES, "BLOCK_T": 64, "LSE_WIDTH": 1, "LANES": uniforms.LANES}
    constants |= {key: value for key, value in option.items() if key in constants}
    constants["GROUP"], constants["PART"] = bounds.GROUP, bounds.GROUP // bounds.PARTS
    constants["PART_SHIFT"] = (constants["PART"] // 8).bit_length() - 1 + (target_dtype == "fp32")
    constants["BLOCK_G"] = option.get("BLOCK_G", 2 * bounds.FEW_GROUPS)
    constants["WALK"] = accept.walk_width(constants["BLOCK_T"])
    label = ", ".join([f"{target_dtype} / {draft_dtype}", *(f"{key}={value}" for key, value in option.items())])
    for kernel in [name for name in KERNELS if not name.startswith("attend")]:
        if kernel.startswith(("verify_exact", "verify_block")):
            modes = {"draft rows": {"DRAFT_ROWS": True}, "draft_lse": {}, "one-hot": {"ONE_HOT": True}}
            for mode, mode_flags in modes.items():
                yield _build(kernel, f"{label}, {mode}", types, constants, flags | mode_flags)
        elif kernel.startswith("verify_sigmoid") or target_dtype == draft_dtype:
            yield _build(kernel, label, types, constants, flags)


def _attention_builds() -> Iterator[Build]:
    """Programs with few rows and with as many as they may have, of one part and of 32, and the kernel that joins 32.
    The builds are those of an eager call, which specialises addresses here."""

    def build(kernel: str, config: str, types: dict[str, str], constants: dict[str, Any]) -> Build:
        names = [name for name in KERNELS[kernel].arg_names if name not in constants]
        given = {name: types.get(name, "*fp32" if name.endswith("_ptr") else "i32") for name in names}
        addresses = tuple(name for name in names if name.endswith("_ptr"))
        return Build(kernel, config, tuple(given.items()), tuple(constants.items()), addresses)

    # 8 is less than a product of tensor cores sums over.
    for dtype, width in itertools.product(("bf16", "fp16", "fp32"), (8, 64, 80, 96, 128, 256, 512)):
        block_d, tile, most_rows = attention.block_sizes(width, 4 if dtype == "fp32" else 2)
        shape = {"D": width, "BLOCK_D": block_d}
        types = dict.fromkeys(("queries_ptr", "keys_ptr", "values_ptr", "output_ptr"), f"*{dtype}")
        for rows, parts in itertools.product(sorted({16, most_rows}), (1, 32)):
            constants = shape | {"SCALE": 0.125, "GROUP": 4, "PARTS": parts, "ROWS": rows, "TILE": tile}
            sums = {"spans_ptr": "*i64", "sums_ptr": "*fp32"}
            if parts == 1:
                constants["scales_ptr"] = None
                sums["sums_ptr"] = f"*{dtype}"
            label = f"{dtype}, D={width}, ROWS={rows}, PARTS={parts}"
            yield build("attend.parts", label, types | sums, constants)
        yield build("attend.join", f"{dtype}, D={width}", types, shape | {"PARTS": 32})


def _build(kernel: str, config: str, types: dict[str, str], constants: dict[str, Any], flags: dict[str, bool]) -> Build:
    names = KERNELS[kernel].arg_names
    sizes = types["sizes"]
    absent = {name for flag, found in ABSENT_WITH.items() if flags.get(flag) for name in found}
    absent |= {name for flag, found in ABSENT_WITHOUT.items() if not flags.get(flag) for name in found}
    if kernel.startswith("filter"):
        absent -= {"bounds_ptr", "top_ptr"}
    if kernel == "filter.cut" and not flags.get("FOUND"):
        absent |= {"found_ptr", "lse_ptr"}
    if kernel == "verify_exact.stats" and not flags.get("DRAFT_ROWS"):
        absent.add("draft_ptr")
    constants = constants | dict.fromkeys(absent)
    defaults = {name: "*fp32" if name.endswith("_ptr") else "i64" if sizes == "i64" else "i32" for name in names}
    given = {name: types.get(name, defaults[name]) for name in names if name not in constants}
    multiples = [name for name in given if name.endswith("_ptr") or (sizes == "static" and name in VOCABULARIES)]
    known = tuple((name, constants[name]) for name in names if name in constants)
    return Build(kernel, config, tuple(given.items()), known, tuple(multiples) if sizes else ())


def compile_build(build: Build, target: str) -> Resources:
    kernel = KERNELS[build.kernel]
    compiled = compile_kernel(kernel, dict(build.types), dict(build.constants), target, build.multiples)
    if TARGETS[target].backend == "hip":
        counts = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", compiled.asm["amdgcn"]))
        sizes = (int(counts[name]) for name in ("vgpr_count", "private_segment_fixed_size"))
        return Resources(build.kernel, build.config, target, *sizes)
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", cuobjdump(compiled, "--dump-resource-usage")))
    sass = cuobjdump(compiled, "--dump-sass")
    # Copies to shared memory are among them.
    loads = re.findall(r"\bLDG(?:STS)?\.[\w.]*", sass)
    wide = sum(".128" in load for load in loads)
    local = int(usage["STACK"]) + int(usage["LOCAL"]) + len(re.findall(r"\b(?:LDL|STL)\b", sass))
    fused = fused_exchanges(compiled.asm["ptx"])
    count = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.MULTILINE))
    return Resources(
        build.kernel, build.config, target, int(usage["REG"]), local, wide, len(loads) - wide, fused, count
    )


def compile_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], target: str, multiples: Sequence[str] = ()
) -> Any:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    fixed = {
        attention.attend_kernel: lambda: attention.ATTEND_WARPS,
        attention.join_kernel: lambda: attention.join_warps(constants["PARTS"], constants["BLOCK_D"]),
        uniforms.numbers_kernel: lambda: uniforms.WARPS,
        search.cut_kernel: lambda: bounds.cut_warps(constants["BLOCK_G"], constants.get("stride_v", 0) is None),
    }
    # A kernel without tiles holds partials.
    num_warps = fixed.get(kernel, lambda: warps(kernel, constants.get("TILE", accept.MAX_PARTIALS)))()
    return triton.compile(source, target=TARGETS[target], options={"num_warps": num_warps, **launch.OPTIONS})


def warps(kernel: Any, tile: int) -> int:
    """Of a program, as the launchers have it."""
    sums_only = kernel in (stats.stats_kernel, exact.rest_kernel, sample.stats_kernel, groups.group_kernel)
    return launch.stats_warps(tile) if sums_only else launch.num_warps(tile)


def cuobjdump(compiled: Any, flag: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, flag, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def fused_exchanges(ptx: str) -> int:
    """How often a product that is not rounded is added to a number of another lane, which adds the rounded one
    (`rounded_product` in `tiles.py`)."""
    exchanged = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+)", ptx))
    # A float64 is exchanged in halves.
    for joined, parts in re.findall(r"\b(?:mov|cvt|shl|or)\.[\w.]+\s+(%\w+), ([^;]*);", ptx):
        if not exchanged.isdisjoint(re.findall(r"%\w+", parts)):
            exchanged.add(joined)
    addends = re.findall(r"fma\.rn\.f(?:32|64|32x2)\s+%\w+, %\w+, %\w+, (%\w+)", ptx)
    return sum(addend in exchanged for addend in addends)


def main() -> None:
    from markdown_table import table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--out", type=Path, help="write every build's resources as JSON")
    parser.add_argument("--every", type=int, default=1, help="compile every so many-th build of a kernel")
    arguments = parser.parse_args()
    chosen = share(0, arguments.every)
    results = []
    with ProcessPoolExecutor(2) as pool:
        for target in arguments.target:
            found = pool.map(partial(compile_build, target=target), chosen, chunksize=4)
            results += track(found, f"compiling for {target}", total=len(chosen))

    rows = []
    for kernel, target in itertools.product(KERNELS, arguments.target):
        group = [result for result in results if (result.kernel, result.target) == (kernel, target)]
        one = {"kernel": kernel, "target": target, "builds": len(group)}
        for name in ("registers", "spill_bytes", "wide_loads"):
            values = [value for result in group if (value := getattr(result, name)) is not None]
            one[name] = f"{min(values)} to {max(values)}" if values else "not read"
        rows.append(one)
    line = "{kernel} | {target} | {builds} | {registers} | {spill_bytes} | {wide_loads}"
    print(table("kernel | target | builds | registers | spill bytes | 128-bit loads", line, rows, padded=True))
    if arguments.out:
        record = {"triton": triton.__version__, "builds": [dataclasses.asdict(result) for result in results]}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
