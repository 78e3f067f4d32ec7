"""Every kernel compiled ahead of time, with no GPU: registers do not spill, rows are read 16 bytes at a time, and all
lanes have the same sums."""

from __future__ import annotations

import ast
import re

import pytest
from marks import slow

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from benchmarks import kernel_resources as aot  # noqa: E402
from torch_specops.ops.cuda import attention, launch  # noqa: E402
from torch_specops.ops.cuda.tiles import rounded_product  # noqa: E402

# (target, first, step): of each kernel, which builds are compiled, so that the suite stays short.
# `python benchmarks/kernel_resources.py` compiles all of them for any target.
SHARES = [("sm_90", 4, 10), ("sm_100", 15, 40), ("gfx942", 25, 40), ("sm_80", 5, 40)]


def test_the_builds_are_those_of_launches() -> None:
    """Each once; every tile with a temperature and without, and with sizes of either width."""
    builds = list(aot.builds())
    assert len({(b.kernel, b.types, b.constants, b.multiples) for b in builds}) == len(builds)
    assert {b.kernel for b in builds} == set(aot.KERNELS) == {b.kernel for b in aot.share(0, 60)}
    found = {
        (dict(b.types)["vocab_size"], constants["TILE"], "temperature_ptr" not in constants)
        for b in builds
        for constants in [dict(b.constants)]
        if b.kernel == "verify_exact.draw"
    }
    assert found == {(size, tile, given) for size in ("i32", "i64") for tile in aot.TILES for given in (True, False)}


@pytest.mark.slow
@pytest.mark.parametrize("target, first, step", SHARES)
def test_no_register_spills_and_all_lanes_have_the_same_sums(target: str, first: int, step: int) -> None:
    results = [aot.compile_build(build, target) for build in aot.share(first, step)]
    limits = dict.fromkeys(((each.kernel, each.config) for each in results), aot.SPILL_LIMIT)
    if triton.__version__.startswith("3.8.") and target == "sm_90":
        # docs/performance.md. Kernels are not arranged anew for one release before a device has run them.
        limits["filter.cut", "bf16 / bf16"] = 154
    assert not [each for each in results if each.spill_bytes > limits[each.kernel, each.config]]
    assert not [each for each in results if each.fused_exchanges]


@pytest.mark.parametrize("target", ["sm_90", *(pytest.param(t, marks=pytest.mark.slow) for t in ("sm_80", "sm_100"))])
@pytest.mark.parametrize("kernel", ["verify_exact.stats", slow("sample.stats"), slow("filter.group"), "filter.mask"])
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_row_kernels_load_16_bytes(target: str, kernel: str, dtype: str) -> None:
    """Eager builds, which know nothing of vocabularies, strides and addresses."""
    size = 4 if dtype == "fp32" else 2
    option = ", draft_lse" if kernel == "verify_exact.stats" else ""
    (build,) = [b for b in aot.builds() if (b.kernel, b.config) == (kernel, f"{dtype} / {dtype}{option}")]
    result = aot.compile_build(build, target)
    # As many in a tile inside the row as in one at an end of it.
    assert result.wide_loads == 2 * aot.TILES[0] * size // (16 * aot.warps(aot.KERNELS[kernel], aot.TILES[0]) * 32)


@pytest.mark.parametrize("target", ["sm_90", pytest.param("sm_100", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype, width", [("bf16", 128), pytest.param("fp32", 64, marks=pytest.mark.slow)])
def test_attention_kernel_spills_nothing(target: str, dtype: str, width: int) -> None:
    """With as many rows as a program may have."""
    *_, build = [b for b in aot.builds() if b.kernel == "attend.parts" and b.config.startswith(f"{dtype}, D={width},")]
    result, constants = aot.compile_build(build, target), dict(build.constants)
    tile_bytes = constants["TILE"] * constants["BLOCK_D"] * (4 if dtype == "fp32" else 2)
    # The keys of a tile and its values, in the loop and ahead of it.
    assert result.spill_bytes == 0 and result.wide_loads >= 4 * tile_bytes // (16 * 32 * attention.ATTEND_WARPS)


@pytest.mark.parametrize("dtype", ["bf16", slow("fp32")])
def test_masked_copy_stores_16_bytes(dtype: str) -> None:
    (build,) = [b for b in aot.builds() if (b.kernel, b.config) == ("filter.mask", f"{dtype} / {dtype}")]
    compiled = aot.compile_kernel(aot.KERNELS["filter.mask"], dict(build.types), dict(build.constants), "sm_90")
    stores = re.findall(r"\bSTG\.[\w.]*", aot.cuobjdump(compiled, "--dump-sass"))
    share = aot.TILES[0] * (4 if dtype == "fp32" else 2) // (16 * launch.num_warps(aot.TILES[0]) * 32)
    assert sum(".128" in store for store in stores) == share
    # The others are those of the branch for a row's two ends.
    assert len(stores) - share <= aot.TILES[0] // (launch.num_warps(aot.TILES[0]) * 32)


@pytest.mark.parametrize(
    "kernel", [slow("verify_exact.stats"), slow("verify_exact.draw"), "sample.stats", slow("verify_gumbel.score")]
)
def test_bounds_do_not_narrow_the_loads(kernel: str) -> None:
    """A row that is masked by its bounds is loaded as wide as one that is not."""
    wide = []
    for option in ({}, {"FILTERED": True}):
        builds = [b for b in aot._op_builds("bf16", "bf16", **option) if b.kernel == kernel]
        wide.append(aot.compile_build(builds[0], "sm_90").wide_loads)
    # Kernels that read only parts of a tile have no branch for a tile inside the row.
    branches = 2 if "PART" in aot.KERNELS[kernel].arg_names else 1
    assert wide[0] == branches * wide[1] > 0


@pytest.mark.parametrize("kernel", [slow("verify_exact.draw"), "verify_block.reach", slow("verify_block.draw")])
def test_last_program_loads_stored_partials(kernel: str) -> None:
    """Between barriers: a fence, the count, and L1 forgotten. No load is one of memory that nobody writes."""
    build = next(build for build in aot.builds() if build.kernel == kernel)
    compiled = aot.compile_kernel(aot.KERNELS[kernel], dict(build.types), dict(build.constants), "sm_90")
    sass = aot.cuobjdump(compiled, "--dump-sass")
    order = re.findall(r"\b(BAR\.SYNC|MEMBAR|ATOMG|CCTL\.IVALL|LDG)\b", sass)
    assert order.count("ATOMG") == 1
    count = order.index("ATOMG")
    assert order[count - 2 : count + 3] == ["BAR.SYNC", "MEMBAR", "ATOMG", "CCTL.IVALL", "BAR.SYNC"]
    assert re.findall(r"MEMBAR[\w.]*|ATOMG[\w.]*", sass) == ["MEMBAR.ALL.GPU", "ATOMG.E.ADD.STRONG.GPU"]
    assert "LDG" in order[count:] and "CONSTANT" not in sass


# Of tiles and groups of one row.
COUNTS = {"tiles_per_program", "num_groups", "room"}


@pytest.mark.parametrize("kernel", ["attend.parts", *(slow(name) for name in aot.KERNELS if name != "attend.parts")])
def test_kernels_multiply_strides_in_64_bits(kernel: str) -> None:
    """An index times a stride passes 2^31 in a large tensor, whose sizes and strides do not."""
    builds = [build for build in aot.builds() if build.kernel == kernel]
    build = next((build for build in builds if "UNIT_STRIDE=False" in build.config), builds[0])
    compiled = aot.compile_kernel(aot.KERNELS[kernel], dict(build.types), dict(build.constants), "sm_90")
    sizes = {f"%{name}" for name, kind in build.types if kind == "i32" and name not in COUNTS}
    products = []
    for result, operation, operands in re.findall(r"(%\w+) = (tt\.\w+|arith\.\w+) (.*)", compiled.asm["ttir"]):
        if sizes.intersection(re.findall(r"%\w+", operands)):
            if operation in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
                sizes.add(result)
            elif operation == "arith.muli" and not re.search(r": (tensor<\w+x)?i64", operands):
                products.append(f"{result} = {operands}")
    assert products == []


def test_no_kernel_has_a_parameter_that_inductor_adds() -> None:
    """Its launchers take the arguments by their names, and then the stream."""
    assert not [name for name, kernel in aot.KERNELS.items() if "stream" in kernel.arg_names]


# Of `test_no_register_spills_and_all_lanes_have_the_same_sums`, which is slow too.
@pytest.mark.slow
def test_a_spilling_kernel_is_seen() -> None:
    """The check itself: 512 values a thread, all alive at once, are more than a thread has registers."""
    compiled = aot.compile_kernel(spilling_kernel, {"x_ptr": "*fp32", "out_ptr": "*fp32"}, {"TILE": 2**17}, "sm_90")
    sass = aot.cuobjdump(compiled, "--dump-sass")
    assert len(re.findall(r"\b(?:LDL|STL)\b", sass)) > aot.SPILL_LIMIT


@triton.jit
def spilling_kernel(x_ptr, out_ptr, TILE: tl.constexpr):
    v = tl.arange(0, TILE)
    x = tl.load(x_ptr + v)
    tl.store(out_ptr + v, x / tl.sum(x, 0))


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_a_product_fused_into_an_exchange_is_seen(dtype: str) -> None:
    """The check itself, and the mend."""
    fused = []
    for ROUNDED in (False, True):
        types, constants = {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}, {"SIZE": 64, "ROUNDED": ROUNDED}
        compiled = aot.compile_kernel(summing_kernel, types, constants, "sm_90")
        fused.append(aot.fused_exchanges(compiled.asm["ptx"]))
    assert fused == [1, 0]


@triton.jit
def summing_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, ROUNDED: tl.constexpr):
    i = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + i), tl.load(x_ptr + SIZE + i)
    tl.store(out_ptr, tl.sum(rounded_product(x, y) if ROUNDED else x * y, 0))


@pytest.mark.parametrize("name", aot.KERNELS)
def test_inductor_can_write_the_kernels_anew(name: str) -> None:
    """Inductor copies a kernel's source into its own module and follows plain global names only; a name behind a module
    (`rows.scale`) would be missing there. This needs a GPU to happen, and none to be checked."""
    from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code as closure

    kernel = aot.KERNELS[name]
    tree = ast.parse("@triton.jit\n" + closure(kernel))
    provided = {"tl", "triton", "range", "float"}
    provided |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    provided |= {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            local = {node.id for node in names if isinstance(node.ctx, ast.Store)}
            local |= {argument.arg for argument in function.args.args}
            assert {node.id for node in names} <= provided | local


@pytest.mark.parametrize("name", [name for name in aot.KERNELS if not name.startswith("attend")])
def test_one_build_serves_all_sizes_strides_and_addresses(name: str) -> None:
    """Triton compiles a kernel anew for each property of an argument that it specialises on."""
    arguments = [parameter for parameter in aot.KERNELS[name].params if not parameter.is_constexpr]
    assert all(each.do_not_specialize and each.do_not_specialize_on_alignment for each in arguments)


@pytest.mark.parametrize("vocab_size, num_rows", [(32_000, 6), (128_256, 6), (128_256, 704), (256_000, 2816)])
def test_a_row_is_split_over_programs(vocab_size: int, num_rows: int) -> None:
    """A tile is a small part of the vocabulary, and a small batch gets the smallest tiles."""
    tile = launch.tile_size(vocab_size, num_rows)
    assert launch.MIN_TILE <= tile <= launch.MAX_TILE
    programs = num_rows * triton.cdiv(vocab_size, tile)
    assert programs >= launch.FEW_PROGRAMS or tile == launch.MIN_TILE
