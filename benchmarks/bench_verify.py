"""Time `torch_specops.verify_exact` against the way it is usually written, side by side in one run.

    python benchmarks/bench_verify.py [--device cuda] [--batch 1 8] [--vocab 50257] [--dtype bfloat16] [--out FILE.json]

Providers
    specops           one op call, eager and under torch.compile
    specops, lse      the same, given the draft's logsumexp as `torch_specops.sample` returned it
    softmax           what transformers' assisted generation does, for a batch: softmax of both sides in float32, ratio
                      test, clamp(p - q, 0), normalise, torch.multinomial; eager and under torch.compile
Kinds
    sampled           drafts with logits
    one-hot           drafts without logits (prompt lookup). `softmax` samples every position and keeps the matches
    greedy            temperature 0. `softmax` is an argmax
    top-k, top-p      sampled, with top_k = 50 or top_p = 0.9 on both sides; the softmax provider runs transformers'
                      processor over every row first

Bytes model: what must be read of [V] rows, of s_p and s_q bytes an entry, for B sequences of K drafts
    sampled           B V ((K+1) s_p + K s_q)
    sampled, lse      B V ((K+1) s_p + s_q)
    one-hot, greedy   B V (K+1) s_p
    top-k, top-p      as sampled; finding what is kept needs more than one pass over a row, which is not counted
The pair of rows that the residual needs is read again, from cache, and is not counted. Even sequences are rejected at
the last draft and odd ones accept all, so no row can be left out by stopping early. GB/s is that number over the
median time, whatever the provider really moves; the roof is the rate of `copy_` on the same device in the same run.

Every answer is checked before it is timed: specops, and softmax with its multinomial replaced by an inverse CDF over
the same uniforms, against the float64 reference; softmax as it is timed, on inputs whose result does not depend on
chance. For one-hot drafts that is its only check, and for top-p of 16-bit logits: many of those tie, and which of the
tied tokens transformers' processor keeps is left to an unstable sort.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import torch_specops
from torch_specops.testing import Case, compare

Inputs = dict[str, Tensor]
Result = tuple[Tensor, Tensor]
Provider = Callable[[Inputs], Result]

KINDS = ("sampled", "one-hot", "greedy", "top-k", "top-p")
FILTERS = {"top-k": ("top_k", 50), "top-p": ("top_p", 0.9)}
# What the timings are measured against.
BASELINE = "softmax eager"
# Inputs are rotated through more memory than the last cache holds, so that logits come from memory.
CPU_CACHE_BYTES = 64 * 2**20
ROTATE = 2


@dataclass(frozen=True)
class Problem:
    kind: str
    batch: int
    num_draft_tokens: int
    vocab: int
    dtype: str

    @property
    def has_draft_logits(self) -> bool:
        return self.kind == "sampled" or self.kind in FILTERS

    def bytes(self, with_lse: bool = False) -> int:
        size = getattr(torch, self.dtype).itemsize
        draft_rows = (1 if with_lse else self.num_draft_tokens) if self.has_draft_logits else 0
        return self.batch * self.vocab * (self.num_draft_tokens + 1 + draft_rows) * size


def make_inputs(problem: Problem, device: torch.device, seed: int) -> Inputs:
    """Drafts that are accepted, but for the last of every even sequence."""
    g = torch.Generator().manual_seed(seed)
    batch, num_drafts, vocab = problem.batch, problem.num_draft_tokens, problem.vocab
    dtype = getattr(torch, problem.dtype)
    target_logits = (3 * torch.randn(batch, num_drafts + 1, vocab, generator=g)).to(dtype)
    draft_logits = (target_logits[:, :-1].float() + torch.randn(batch, num_drafts, vocab, generator=g)).to(dtype)
    p = target_logits[:, :-1].float().softmax(-1)
    draft_tokens = p.argmax(-1)
    accept_uniforms = torch.zeros(batch, num_drafts)
    if problem.has_draft_logits:
        draft_tokens[::2, -1] = (draft_logits.float().softmax(-1) - p)[::2, -1].argmax(-1)
    else:
        draft_tokens[::2, -1] = p[::2, -1].argmin(-1)
    accept_uniforms[::2, -1] = 1 - 2**-24
    inputs = {
        "target_logits": target_logits,
        "draft_tokens": draft_tokens,
        "draft_logits": draft_logits,
        "accept_uniforms": accept_uniforms,
        "sample_uniforms": torch.rand(batch, generator=g),
        "temperature": torch.zeros(batch),
        "draft_lse": draft_logits.float().logsumexp(-1),
        "top_k": torch.full((batch,), FILTERS["top-k"][1]),
        "top_p": torch.full((batch,), FILTERS["top-p"][1]),
    }
    return {name: value.to(device) for name, value in inputs.items()}


def determined(inputs: Inputs) -> Inputs:
    """The same with p and q one-hot at their maxima: no uniform and no generator can change the result."""
    scaled = {
        name: torch.where(inputs[name] == inputs[name].amax(-1, keepdim=True), 1000.0, -1000.0).to(inputs[name].dtype)
        for name in ("target_logits", "draft_logits")
    }
    first = scaled["target_logits"].argmax(-1, keepdim=True)
    scaled["target_logits"] = torch.full_like(scaled["target_logits"], -1000).scatter_(2, first, 1000)
    tokens = first[:, :-1, 0].clone()
    # The last draft of every even sequence is another token, which the draft alone is sure of.
    tokens[::2, -1] = (tokens[::2, -1] + 1) % first.new_tensor(scaled["target_logits"].shape[-1])
    scaled["draft_logits"] = torch.full_like(scaled["draft_logits"], -1000).scatter_(2, tokens.unsqueeze(-1), 1000)
    return inputs | scaled | {"draft_tokens": tokens, "draft_lse": torch.full_like(inputs["draft_lse"], 1000.0)}


def op_arguments(kind: str, inputs: Inputs, with_lse: bool = False) -> dict[str, Any]:
    names = ("target_logits", "draft_tokens", "draft_logits", "accept_uniforms", "sample_uniforms")
    arguments: dict[str, Any] = {name: inputs[name] for name in names}
    if kind in ("one-hot", "greedy"):
        arguments["draft_logits"] = None
    if kind in FILTERS:
        name, _ = FILTERS[kind]
        arguments[name] = inputs[name]
    if kind == "greedy":
        arguments["temperature"] = inputs["temperature"]
    if with_lse:
        arguments["draft_lse"] = inputs["draft_lse"]
    return arguments


def multinomial(weights: Tensor, inputs: Inputs) -> Tensor:
    return torch.multinomial(weights, num_samples=1).squeeze(1)


def inverse_cdf(weights: Tensor, inputs: Inputs) -> Tensor:
    cdf = weights.double().cumsum(-1)
    return torch.searchsorted(cdf, inputs["sample_uniforms"].double().unsqueeze(-1) * cdf[:, -1:], right=True).squeeze(
        1
    )


def softmax_provider(kind: str, draw: Callable[[Tensor, Inputs], Tensor] = multinomial) -> Provider:
    def output(draft_tokens: Tensor, n: Tensor, next_token: Tensor) -> Result:
        positions = torch.arange(draft_tokens.shape[1] + 1, device=n.device)
        drafts = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
        kept = torch.where(positions < n.unsqueeze(-1), drafts, -1)
        return torch.where(positions == n.unsqueeze(-1), next_token.unsqueeze(-1), kept), n

    def sampled(inputs: Inputs) -> Result:
        x = inputs["draft_tokens"]
        num_drafts = x.shape[1]
        q = inputs["draft_logits"].softmax(-1, dtype=torch.float32)
        p = inputs["target_logits"].softmax(-1, dtype=torch.float32)
        q_x = q.gather(2, x.unsqueeze(-1)).squeeze(-1)
        p_x = p[:, :num_drafts].gather(2, x.unsqueeze(-1)).squeeze(-1)
        rejected = ~(inputs["accept_uniforms"] <= p_x / q_x)
        n = (rejected.cumsum(-1) < 1).sum(-1)
        rows = torch.arange(n.shape[0], device=n.device)
        p_n = p[rows, n]
        residual = (p_n - q[rows, n.clamp(max=num_drafts - 1)]).clamp(min=0)
        residual = residual / residual.sum(-1, keepdim=True)
        next_token = draw(torch.where((n < num_drafts).unsqueeze(-1), residual, p_n), inputs)
        return output(x, n, next_token)

    def matched(inputs: Inputs, selected: Tensor) -> Result:
        x = inputs["draft_tokens"]
        n = ((x != selected[:, :-1]).cumsum(-1) < 1).sum(-1)
        return output(x, n, selected[torch.arange(n.shape[0], device=n.device), n])

    def one_hot(inputs: Inputs) -> Result:
        p = inputs["target_logits"].softmax(-1, dtype=torch.float32)
        return matched(inputs, draw(p.flatten(0, 1), inputs).view(p.shape[:2]))

    def greedy(inputs: Inputs) -> Result:
        return matched(inputs, inputs["target_logits"].argmax(-1))

    def filtered(inputs: Inputs) -> Result:
        both = {
            name: processor(None, inputs[name].flatten(0, 1).float()).view(inputs[name].shape)
            for name in ("target_logits", "draft_logits")
        }
        return sampled(inputs | both)

    if kind in FILTERS:
        from transformers import TopKLogitsWarper, TopPLogitsWarper

        processor = {"top-k": TopKLogitsWarper, "top-p": TopPLogitsWarper}[kind](FILTERS[kind][1])
        return filtered
    return {"sampled": sampled, "one-hot": one_hot, "greedy": greedy}[kind]


def specops_provider(kind: str, with_lse: bool = False) -> Provider:
    def verify(inputs: Inputs) -> Result:
        return torch_specops.verify_exact(**op_arguments(kind, inputs, with_lse))

    return verify


def providers(kind: str) -> dict[str, Provider]:
    eager = {"specops": specops_provider(kind), "softmax": softmax_provider(kind)}
    if kind == "sampled":
        eager["specops, lse"] = specops_provider(kind, with_lse=True)
    return {f"{name} eager": f for name, f in eager.items()} | {
        f"{name} compiled": torch.compile(f, fullgraph=True, dynamic=False) for name, f in eager.items()
    }


def check(problem: Problem, found: dict[str, Provider], inputs: Inputs) -> None:
    """Raise unless every provider is right: see the module's last paragraph."""

    def against_reference(name: str, provider: Provider, values: Inputs) -> None:
        arguments = op_arguments(problem.kind, values, with_lse=", lse" in name)
        comparison = compare(Case(name, "verify_exact", arguments), provider(values))
        if comparison.wrong:
            raise RuntimeError(f"{problem}: {name} is wrong in rows {comparison.wrong}")

    for name, provider in found.items():
        against_reference(name, provider, determined(inputs))
        if name.startswith("specops"):
            against_reference(name, provider, inputs)
    ties = problem.kind == "top-p" and problem.dtype != "float32"
    if problem.has_draft_logits and not ties:
        against_reference("softmax, inverse CDF", softmax_provider(problem.kind, inverse_cdf), inputs)
    elif problem.kind == "greedy":
        against_reference("softmax", found["softmax eager"], inputs)


def timers(provider: Provider, sets: list[Inputs], device: torch.device) -> dict[str, Callable[[int], float]]:
    """mode -> round -> seconds per call. "call" is a Python call; "graph" replays a CUDA graph of one call per set."""

    def call(round_index: int) -> float:
        inputs = sets[round_index % len(sets)]
        start = time.perf_counter()
        provider(inputs)
        return time.perf_counter() - start

    if device.type != "cuda":
        return {"call": call}

    def timed(work: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            provider(sets[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Outputs are held until the capture ends: a freed one would be handed to the next call.
        outputs = [provider(inputs) for inputs in sets]
    del outputs
    return {
        "call": lambda i: timed(lambda: provider(sets[i % len(sets)])),
        "graph": lambda i: timed(graph.replay) / len(sets),
    }


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of copying 256 MiB (1 GiB on CUDA)."""
    source = torch.ones((1024 if device.type == "cuda" else 256) * 2**18, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(12):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(seconds[2:])


def cache_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else CPU_CACHE_BYTES


def run_problem(problem: Problem, device: torch.device, rounds: int, roof: float) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    found = providers(problem.kind)
    first = make_inputs(problem, device, seed=0)
    check(problem, found, first)

    per_set = sum(value.nbytes for value in first.values())
    count = min(64, max(2, math.ceil(ROTATE * cache_bytes(device) / per_set)))
    # Copies of one set: their contents do not matter for the time, their addresses do.
    sets = [first] + [{name: value.clone() for name, value in first.items()} for _ in range(count - 1)]
    runs = {(name, mode): f for name, p in found.items() for mode, f in timers(p, sets, device).items()}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for i in range(-3, rounds):
        # One call of each in turn: a change in the machine's load meets all of them.
        for key, run in runs.items():
            elapsed = run(i)
            if i >= 0:
                seconds[key].append(elapsed)

    records = []
    for (name, mode), values in seconds.items():
        median = statistics.median(values)
        moved = problem.bytes(with_lse=", lse" in name)
        against = statistics.median(seconds[BASELINE, mode])
        records.append(
            asdict(problem)
            | {
                "provider": name,
                "mode": mode,
                "median_ms": median * 1e3,
                "quartiles_ms": [q * 1e3 for q in statistics.quantiles(values, n=4)[::2]],
                "bytes": moved,
                "gb_per_s": moved / median * 1e-9,
                "percent_of_copy": 100 * moved / median / roof,
                "speedup": against / median,
            }
        )
    return records


def environment(device: torch.device, roof: float, rounds: int) -> dict[str, Any]:
    def commit() -> str | None:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "torch_specops": torch_specops.__version__,
        "commit": commit(),
        "copy_gb_per_s": roof * 1e-9,
        "rounds": rounds,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def show(console: Console, described: dict[str, Any], records: list[dict[str, Any]]) -> None:
    console.print(", ".join(f"{name} {value}" for name, value in described.items() if value is not None))
    console.print(f"bytes: what must be read (see --help); speedup: against '{BASELINE}' of the same row and mode")
    table = Table(
        "kind", "V", "B", "K", "dtype", "provider", "mode", "ms", "quartiles", "MB", "GB/s", "% of copy", "speedup"
    )
    last = None
    for r in records:
        problem = tuple(r[name] for name in ("kind", "vocab", "batch", "num_draft_tokens", "dtype"))
        if last not in (None, problem):
            table.add_section()
        last = problem
        low, high = r["quartiles_ms"]
        table.add_row(
            *(str(value) for value in problem), r["provider"], r["mode"],
            f"{r['median_ms']:.3f}", f"{low:.3f}-{high:.3f}", f"{r['bytes'] * 1e-6:.2f}",
            f"{r['gb_per_s']:.1f}", f"{r['percent_of_copy']:.0f}", f"{r['speedup']:.2f}",
        )  # fmt: skip
    console.print(table)


def plot(records: list[dict[str, Any]], device: str, path: Path) -> None:
    """Bars of the speedup over the baseline, one group per problem."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars: dict[str, dict[str, float]] = {}
    for r in records:
        group = f"{r['kind']}\nB={r['batch']} {r['dtype']}\nV={r['vocab']} {r['mode']}"
        bars.setdefault(r["provider"], {})[group] = r["speedup"]
    groups = list(dict.fromkeys(group for found in bars.values() for group in found))
    figure, axes = pyplot.subplots(figsize=(1.6 + 1.3 * len(groups), 4.5), layout="constrained")
    width = 0.8 / len(bars)
    for i, (name, found) in enumerate(bars.items()):
        places = [g + (i + 0.5) * width - 0.4 for g, group in enumerate(groups) if group in found]
        axes.bar(places, list(found.values()), width, label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set_ylabel(f"speedup over '{BASELINE}'")
    axes.set_title(f"verify_exact, {device}")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[5], help="K, at least 1")
    parser.add_argument("--vocab", type=int, nargs="+", default=[50257])
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument("--kind", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--rounds", type=int, default=100, help="timed calls of each provider")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    parser.add_argument("--out", type=Path, help="write environment and results to this JSON file")
    parser.add_argument("--plot", type=Path, help="write a bar chart to this PNG file (needs matplotlib)")
    options = parser.parse_args(arguments)
    if min(options.num_draft_tokens) < 1 or min(options.batch) < 1 or min(options.vocab) < 2 or options.rounds < 2:
        parser.error("expected batch >= 1, num-draft-tokens >= 1, vocab >= 2 and rounds >= 2")

    if options.threads is not None:
        torch.set_num_threads(options.threads)

    console = Console()
    device = torch.device(options.device)
    problems = [
        Problem(kind, batch, num_draft_tokens, vocab, dtype)
        for vocab in options.vocab
        for num_draft_tokens in options.num_draft_tokens
        for dtype in options.dtype
        for batch in options.batch
        for kind in options.kind
    ]
    records = []
    with Progress(console=console, transient=True) as progress, torch.inference_mode():
        task = progress.add_task("copy rate", total=len(problems))
        roof = copy_rate(device)
        for problem in problems:
            progress.update(task, description=f"{problem.kind} B={problem.batch} {problem.dtype}")
            records += run_problem(problem, device, options.rounds, roof)
            progress.advance(task)

    described = environment(device, roof, options.rounds)
    show(console, described, records)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"environment": described, "records": records}, indent=1) + "\n")
    if options.plot is not None:
        plot(records, described["device"], options.plot)
    return records


if __name__ == "__main__":
    main()
