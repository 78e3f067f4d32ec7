"""Settings of every test, and the numbers that the suite reports at its end."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from report import Report

# Imports and compilers make many objects and few cycles. By default the collector looks through them after every 700,
# and Dynamo asks it to after every graph.
gc.set_threshold(100_000)
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# Inductor would compile a program for every instruction set of the processor to see whether the compiler has it.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# A thread that waits for others would take the core of a worker.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "TORCH_SPECOPS_CUDA_STAND_IN" in os.environ:
    # Triton reads it when it is imported, which the conftest.py of a folder named on the command line may do.
    os.environ["TRITON_INTERPRET"] = "1"

NOT_REHEARSED = "not rehearsed"
MEASURED = "measured"


def pytest_configure(config: pytest.Config) -> None:
    """The process that gives tests to workers needs no torch, and starts them when it has read its settings."""
    if getattr(config.option, "dist", "no") != "no":
        return
    if "TORCH_SPECOPS_CUDA_STAND_IN" in os.environ:
        import cuda_stand_in

        cuda_stand_in.install()

        from torch_specops.ops.cuda import attention

        # Every program takes the interpreter a while.
        attention.RESIDENT_PROGRAMS = 16
    import torch

    # The tensors of the tests are small: more threads cost more than they bring, and workers share the cores.
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Each worker would start a process per core for Inductor's kernels.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(4, os.cpu_count() or 1)))
    if not torch.cuda.is_available():
        # They compile Triton's kernels alone, of which a CPU has none.
        os.environ.setdefault("TORCH_WARM_POOL", "0")
    # pytest listens to every logger that does not propagate. torch writes its trace only if somebody listens: that
    # takes time, and would fill the report of a failed compile test.
    trace = logging.getLogger("torch.__trace")
    trace.propagate = True
    trace.handlers.clear()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` leaves files alone that have no such test: every worker would import them all, which takes longer than
    most of the tests."""
    if not config.option.markexpr.startswith("gpu") or collection_path.suffix != ".py":
        return None
    return True if "mark.gpu" not in collection_path.read_text() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available() and not config.option.markexpr.startswith("gpu"):
        # A worker takes longer to skip a test than to leave it out. Where all need a device, they say so.
        kept = [item for item in items if item.get_closest_marker("gpu") is None]
        if kept:
            config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
            items[:] = kept
    stand_in = "TORCH_SPECOPS_CUDA_STAND_IN" in os.environ
    for item in items:
        if item.get_closest_marker("gpu") is None:
            continue
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        # No CPU test can meet the warnings of CUDA's side of torch and Triton: they are reported. An empty graph is a
        # mistake of ours.
        item.add_marker(pytest.mark.filterwarnings("default", "error:The CUDA Graph is empty"))
        unseen = item.get_closest_marker("not_rehearsed")
        if stand_in and unseen is not None:
            test = item.nodeid.split("[")[0]
            item.user_properties.append((NOT_REHEARSED, f"{test}: {unseen.args[0]}"))
            if not unseen.kwargs.get("runs", True):
                item.add_marker(pytest.mark.skip(reason=f"not rehearsed: {unseen.args[0]}"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: to look for garbage in it takes seconds, and later half of the time of a test with
    thousands of texts."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_finish() -> None:
    # What Dynamo does for a log that nobody reads: it empties the processor's caches to time the guards of each graph,
    # reads every file that it traces for the names of its functions, and writes down all settings of compilers.
    if (guards := sys.modules.get("torch._dynamo.guards")) is not None:
        guards.profile_guard_manager = lambda *arguments: 0.0
    if (names := sys.modules.get("torch._dynamo.symbolic_convert")) is not None:
        names.get_funcname = lambda *arguments: None
    if (metrics := sys.modules.get("torch._dynamo.utils")) is not None:
        metrics.record_compilation_metrics = lambda *arguments, **options: None


@pytest.fixture
def quick_collection() -> None:
    """What was there before the test stays: a test that collects garbage looks through its own alone."""
    gc.freeze()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before counts, and nothing compiled here is left."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """What is to be compiled runs as it stands, and on CUDA is captured all the same."""
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Iterator[Report]:
    from report import Report

    found = Report()
    yield found
    # A worker's reports hold plain types only.
    request.node.user_properties.append((MEASURED, vars(found)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [each for kind in terminalreporter.stats.values() for each in kind if isinstance(each, pytest.TestReport)]
    properties = [each for report in reports for each in report.user_properties]
    unseen = {value for name, value in properties if name == NOT_REHEARSED}
    if unseen:
        terminalreporter.section("not rehearsed: only a device shows it")
        for line in sorted(unseen):
            terminalreporter.write_line(line)
    measured = [value for name, value in properties if name == MEASURED]
    compared = [row for own in measured for row in own["rows"]]
    if compared:
        terminalreporter.section("rows compared with the float64 oracle")
    for kind in sorted({kind for kind, _, _ in compared}):
        rows, rounding = zip(*(counts for own_kind, *counts in compared if own_kind == kind), strict=True)
        line = f"{kind}: {len(rows)} comparisons, {sum(rows)} rows, of which {sum(rounding)} differ by float32 rounding"
        terminalreporter.write_line(line)
    for name, what, extreme in (
        ("p_values", "chi-square tests, worst", min),
        ("wrong_p_values", "wrong samplers, best", max),
    ):
        p_values = [(value, law) for own in measured for law, value in own[name].items()]
        if p_values:
            value, law = extreme(p_values)
            terminalreporter.write_line(f"laws: {len(p_values)} {what} p-value {value:.3g} ({law})")
