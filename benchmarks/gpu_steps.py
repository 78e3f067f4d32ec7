"""The plan of `bench_gpu.py`: the steps of each call, in order, with their time limits."""

from __future__ import annotations

from dataclasses import dataclass

CALLS = (1, 2, 3)
# The call of steps that fill the time that another call has left.
IF_TIME_IS_LEFT = 0


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: of its files.
        call: the call that it belongs to.
        seconds: it is killed after this time.
        command: a script of this folder and its arguments, or "pytest" and its arguments.
        tiny: arguments that a rehearsal adds; the last value of an option counts. None = not rehearsed, because
            another step runs the same lines.
    """

    name: str
    call: int
    seconds: int
    command: str
    tiny: str | None


VERIFY = "bench_verify.py --device cuda --no-compiled --dtype bfloat16"
PEERS = "bench_peers.py --device cuda --no-compiled"
GRID = f"{VERIFY} --kind sampled --vocab 128256"
TINY = "--batch 1 --vocab 40 --num-draft-tokens 1 --rounds 2"
TINY_PEERS = f"{TINY} --acceptance 0.6 --no-compiled"
TINY_LOOP = (
    "--target tiny --draft tiny --vocab 40 --batch 1 --num-draft-tokens 1 --prompt 4 --new-tokens 8 --max-length 32"
    " --rounds 2"
)
TINY_TOOL = "--batch 1 --vocab 33 --num-draft-tokens 1"

STEPS = (
    Step("device", 1, 25, "bench_gpu.py --describe", ""),
    Step("smoke", 1, 75, "pytest -m 'gpu and smoke' -q -n 4", "--collect-only -n 0"),
    Step("verify", 1, 120, f"{GRID} --batch 1 8 64 256 --acceptance 0.6 1.0 --rounds 60", f"{TINY} --acceptance 0.6"),
    Step("peers-build", 1, 150, "bench_peers.py --device cuda --build", ""),
    Step("peers", 1, 150, f"{PEERS} --batch 1 64 256 --vocab 128256 --rounds 20", TINY_PEERS),
    Step("tests", 2, 300, "pytest -m gpu -q -n 12 --dist worksteal", "--collect-only -n 0"),
    Step("loop", 2, 85, "bench_loop.py --no-inductor", TINY_LOOP),
    Step(
        "attention",
        2,
        60,
        "bench_attention.py --device cuda --queries 6",
        "--batch 2 --slots 128 --layers 1 --rounds 2",
    ),
    Step("memcheck", 2, 45, "sanitize.py --tool memcheck --limit 38", TINY_TOOL),
    Step("racecheck", 2, 45, "sanitize.py --tool racecheck --limit 38", None),
    Step("loop-compiled", 3, 120, "bench_loop.py --batch 1", None),
    Step(
        "tiles",
        3,
        65,
        "bench_tiles.py --batch 1 64 --dtype bfloat16 --tile 1024 2048 4096 8192 --warps 2 4 8 --rounds 40",
        f"{TINY} --tile 1024 --warps 4",
    ),
    Step(
        "filters",
        3,
        65,
        f"{VERIFY} --kind top-k top-p min-p --vocab 128256 --batch 1 64 --acceptance 0.6 --rounds 20",
        # In the interpreter the other two take minutes.
        f"{TINY} --kind min-p",
    ),
    Step(
        "vocabularies",
        3,
        60,
        f"{VERIFY} --kind sampled --vocab 256000 32000 50256 50257 51864 51865 151936 --batch 1 64 --acceptance 1.0"
        " --rounds 30",
        None,
    ),
    Step("counters", 3, 60, "ncu.py --batch 64 1 --acceptance 1.0 0.6", f"{TINY_TOOL} --acceptance 0.6"),
    Step(
        "wagner",
        3,
        60,
        "paper_wagner_kernels.py --device cuda --gammas 1 5 10 20",
        "--models Qwen --vocab 40 --gammas 1 --calls 1",
    ),
    Step("acceptance", IF_TIME_IS_LEFT, 60, f"{GRID} --batch 1 8 64 256 --acceptance 0.3 0.9 --rounds 40", None),
    Step(
        "kinds",
        IF_TIME_IS_LEFT,
        45,
        f"{VERIFY} --kind one-hot greedy --vocab 128256 --batch 1 64",
        f"{TINY} --kind one-hot",
    ),
    Step("drafts", IF_TIME_IS_LEFT, 60, f"{GRID} --batch 1 64 --num-draft-tokens 1 3 8 15 --acceptance 0.6", None),
    Step("warm", IF_TIME_IS_LEFT, 45, f"{GRID} --batch 1 8 --cache warm --acceptance 0.6", f"{TINY} --kind greedy"),
    Step(
        "compiled",
        IF_TIME_IS_LEFT,
        90,
        "bench_peers.py --device cuda --batch 1 64 --vocab 128256 --rounds 20 --only specops transformers",
        None,
    ),
    Step(
        "peers-vocab",
        IF_TIME_IS_LEFT,
        90,
        f"{PEERS} --dtype bfloat16 float32 --batch 1 64 --vocab 32000 256000 --rounds 20",
        None,
    ),
)

# What the stand-in for CUDA cannot execute, by name.
NOT_REHEARSED = {
    "GPU tests": "rehearsed by TORCH_SPECOPS_CUDA_STAND_IN=1 pytest -m gpu; here they are only collected",
    "machine code": "Triton's, ptxas' and the GPU's own: kernels run in Triton's interpreter",
    "Inductor on CUDA": "torch.compile returns the function as it is, in the loop and in FlexAttention",
    "FlexAttention": "runs on the CPU alone (bench_attention.py --device cpu), not compiled",
    "FlashInfer's kernels": "compiled by nvcc where they are used; a function of the same signature stands in",
    "Wagner et al.'s kernels": "compiled by nvcc where they are used; functions of the same signature stand in",
    "ncu": "a program of its name runs the command and prints a table",
    "compute-sanitizer": "a program of its name runs the command and prints a summary",
    "time": "no figure of a rehearsal means anything",
}


def plan(minutes: float) -> str:
    """The steps of each call with their limits, and the sum of the limits."""
    lines = []
    for call in (*CALLS, IF_TIME_IS_LEFT):
        steps = [step for step in STEPS if step.call == call]
        total = sum(step.seconds for step in steps)
        head = f"call {call}: {total} of {60 * minutes:.0f} s" if call else "where a call has time left"
        lines += [head, *(f"  {step.seconds:4d} s  {step.name:14}  {step.command}" for step in steps)]
    return "\n".join(lines)
