"""Time `torch_specops.verify_exact`, or `verify_block`, against the way it is usually written, side by side in one run.

    python benchmarks/bench_verify.py [--device cuda] [--batch 1 8] [--vocab 50257] [--dtype bfloat16] [--out FILE.json]

Providers
    specops           one op call, for sampled drafts with the loop's random numbers before it; eager and under
                      torch.compile
    specops, lse      the same, given the draft's logsumexp as `torch_specops.sample` returned it
    softmax           what transformers' assisted generation does, for a batch: softmax of both sides in float32, ratio
                      test, clamp(p - q, 0), normalise, torch.multinomial; eager and under torch.compile. On CUDA the
                      token is drawn as multinomial draws it, without its checks, which wait for the device
    with --peers      other implementations that are installed (`peers.py`), on sampled drafts
Kinds
    sampled           drafts with logits, and a temperature of 1, which is an argument, as in the decoding loop
    one-hot           drafts without logits (prompt lookup). `softmax` samples every position and keeps the matches
    gumbel            `verify_gumbel`, whatever --op says, with drafts of the same noise; `softmax` as for one-hot
    sigmoid           `verify_sigmoid`, whatever --op says; `softmax` as for sampled
    greedy            temperature 0. `softmax` is an argmax
    top-k, top-p, min-p   sampled, with top_k = 50, top_p = 0.9 or min_p = 0.05 on both sides; the softmax provider runs
                      transformers' processor over every row first

GB/s is the number of bytes that must be read over the median time, whatever the provider really moves; the roof is the
rate of `copy_` on the same device in the same run. `problems.py` has the bytes model: all rows, and "needed", the rows
up to each sequence's first rejection; and what --acceptance does to the inputs.

Every answer is checked before it is timed: specops, and softmax with its multinomial replaced by an inverse CDF over
the same uniforms, against the float64 reference; the others as they are timed, on inputs whose result does not depend
on chance. A peer that is wrong is left out, with the reason. For one-hot drafts this is the only check of softmax, and
for top-p of 16-bit logits: many of those tie, and an unstable sort decides which of them transformers' processor keeps.

On CUDA, modes "call" (a Python call and its launches), "graph" (the replay of a CUDA graph of as many calls as there
are sets of inputs, over their number) and "replay" (one replay of a graph of one call: what a step of decoding pays).
Records of the mode "call" have the time of each kernel. Cold inputs are rotated through twice the last cache; with
--cache warm each call reads the same ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import peers
import torch
from markdown_table import table
from problems import (
    FILTERS,
    KINDS,
    OPS,
    Inputs,
    Problem,
    Provider,
    Result,
    check_answer,
    copies,
    determined,
    make_inputs,
    op_arguments,
    with_own_numbers,
)
from rich.progress import Progress
from timing import Report, copy_rate, device_work, environment, options_of, peak_bytes, spread, take_turns, timers
from torch import Tensor

import torch_specops

# What the timings are measured against.
BASELINE = "softmax eager"
# Calls of a graph whose inputs stay in the cache.
WARM_CALLS = 16


def multinomial(weights: Tensor, inputs: Inputs) -> Tensor:
    return torch.multinomial(weights, num_samples=1).squeeze(1)


def race(weights: Tensor, inputs: Inputs) -> Tensor:
    """What `multinomial` does for one sample, without the host's look at the weights, which a CUDA graph forbids."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def inverse_cdf(weights: Tensor, inputs: Inputs) -> Tensor:
    cdf = weights.double().cumsum(-1)
    thresholds = inputs["sample_uniforms"].double().unsqueeze(-1) * cdf[:, -1:]
    return torch.searchsorted(cdf, thresholds, right=True).squeeze(1)


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
        draws = kind == "sampled" and draw is not inverse_cdf
        rejected = ~((torch.rand_like(p_x) if draws else inputs["accept_uniforms"]) <= p_x / q_x)
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
        sides = {name: inputs[name] for name in ("target_logits", "draft_logits")}
        kept = {name: processor(None, x.flatten(0, 1).float()).view(x.shape) for name, x in sides.items()}
        return sampled(inputs | kept)

    if kind in FILTERS:
        from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        processors = {"top-k": TopKLogitsWarper, "top-p": TopPLogitsWarper, "min-p": MinPLogitsWarper}
        processor = processors[kind](FILTERS[kind][1])
        return filtered
    return {"sampled": sampled, "sigmoid": sampled, "one-hot": one_hot, "gumbel": one_hot, "greedy": greedy}[kind]


def specops_provider(kind: str, with_lse: bool = False, op: str = "verify_exact") -> Provider:
    verify = getattr(torch_specops, OPS.get(kind, op))

    def call(inputs: Inputs) -> Result:
        drawn = with_own_numbers(inputs) if kind == "sampled" else inputs
        return verify(**op_arguments(kind, drawn, with_lse))

    return call


def providers(kind: str, device: torch.device, compiled: Sequence[str], op: str) -> dict[str, Provider]:
    draw = race if device.type == "cuda" else multinomial
    eager = {"specops": specops_provider(kind, op=op), "softmax": softmax_provider(kind, draw)}
    if kind == "sampled":
        eager["specops, lse"] = specops_provider(kind, True, op)
    found = {f"{name} eager": f for name, f in eager.items()}
    for name, provider in eager.items():
        if name.split(",")[0] in compiled:
            found[f"{name} compiled"] = torch.compile(provider, fullgraph=True, dynamic=False)
    return found


def check(problem: Problem, found: Mapping[str, Provider], inputs: Inputs, op: str = "verify_exact") -> None:
    """Raise RuntimeError unless every provider is right: see the module's docstring."""

    def against_reference(name: str, provider: Provider, values: Inputs) -> None:
        of_op = name.startswith("specops") or problem.kind == "gumbel"
        law = OPS.get(problem.kind, op) if of_op else "verify_exact"
        check_answer(name, problem, values, provider(values), ", lse" in name, law)

    for name, provider in found.items():
        against_reference(name, provider, determined(inputs))
        if problem.kind == "sampled":
            against_reference(name, provider, determined(inputs, residual=True))
        is_certain = problem.kind == "sampled" and op == "verify_exact"
        if is_certain or (problem.kind == "gumbel" and name.startswith("specops")):
            wrong = (provider(inputs)[1] != inputs["num_accepted"]).nonzero().flatten().tolist()
            if wrong:
                raise RuntimeError(f"{problem}: {name} is wrong in rows {wrong}: numbers of accepted drafts")
        if name.startswith("specops"):
            against_reference(name, provider, inputs)
    ties = problem.kind == "top-p" and problem.dtype != "float32"
    if problem.has_draft_logits and not ties:
        against_reference("softmax, inverse CDF", softmax_provider(problem.kind, inverse_cdf), inputs)
    elif problem.kind == "greedy":
        against_reference("softmax", softmax_provider("greedy"), inputs)


def run_problem(
    problem: Problem,
    device: torch.device,
    rounds: int,
    roof: float,
    cache: str = "cold",
    compiled: Sequence[str] = (),
    op: str = "verify_exact",
    others: Mapping[str, peers.Peer] | None = None,
    skipped: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """A record per provider and mode. `skipped` gets why one of the `others` has none, by name."""
    torch._dynamo.reset()
    op = OPS.get(problem.kind, op)
    own = providers(problem.kind, device, compiled, op)
    first = make_inputs(problem, device, seed=0)
    check(problem, own, first, op)

    sets = [first] * WARM_CALLS if cache == "warm" else copies(first, device)
    runs: dict[tuple[str, str], Callable[[int], float]] = {}
    work: dict[str, dict[str, Any]] = {}
    peaks = {}

    def prepare(name: str, calls: Sequence[Callable[[], Any]], graphs: bool) -> None:
        work[name], peaks[name] = device_work(calls[0], device), peak_bytes(calls[0], device)
        modes = timers(calls, device, graphs, cold=cache == "cold")
        runs.update({(name, mode): run for mode, run in modes.items()})

    for name, provider in own.items():
        prepare(name, [partial(provider, inputs) for inputs in sets], True)
    for name, peer in (others or {}).items():
        try:
            check(problem, {name: peer}, first)
            prepare(name, [peer.prepare(inputs) for inputs in sets], peer.captured)
        except Exception as error:
            # Written for another release, not for this device, or wrong: ours are measured all the same.
            assert skipped is not None
            skipped[name] = f"not timed: {type(error).__name__}: {error}"
    seconds = take_turns(runs, rounds)

    records = []
    for (name, mode), values in seconds.items():
        median = statistics.median(values)
        baseline = statistics.median(seconds[BASELINE, mode])
        moved, needed = problem.bytes(", lse" in name), problem.needed_bytes(", lse" in name)
        record = {"op": op, "acceptance_rate": problem.acceptance_rate, "cache": cache, "provider": name, "mode": mode}
        record |= {"calls_per_replay": {"graph": len(sets), "replay": 1}.get(mode), **spread(values, "ms")}
        record |= {"bytes": moved, "needed_bytes": needed, "gb_per_s": moved / median * 1e-9}
        rates = {"percent_of_copy": 100 * moved / median / roof, "needed_percent_of_copy": 100 * needed / median / roof}
        record |= {key: value for key, value in work[name].items() if key != "kernels" or mode == "call"}
        record |= {"peak_bytes": peaks[name]}
        records.append(asdict(problem) | record | rates | {"speedup": baseline / median})
    return records


def show(report: Report) -> None:
    print(", ".join(f"{name} {value}" for name, value in report.written["environment"].items() if value is not None))
    print(f"bytes: what must be read (see --help); speedup: against '{BASELINE}' of the same row and mode")
    rows = [
        record | {name: record[f"{name}_bytes".lstrip("_")] / 1e6 for name in ("", "needed", "peak")}
        for record in report.records
    ]
    header = "kind | accepted | scale | V | B | K | dtype | cache | provider | mode | calls | ms | quartiles | GB/s"
    line = "{kind} | {acceptance:g} | {scale:g} | {vocab} | {batch} | {num_draft_tokens} | {dtype} | {cache}"
    line += " | {provider} | {mode}"
    line += " | {calls_per_replay:d} | {median_ms:.3f} | {quartiles_ms[0]:.3f}-{quartiles_ms[1]:.3f}"
    line += " | {gb_per_s:.1f} | {percent_of_copy:.0f} | {needed:.2f} | {needed_percent_of_copy:.0f} | {launches:g}"
    more = " | % of copy | needed MB | needed % of copy | launches | GPU ms | peak MB | speedup"
    print(table(header + more, line + " | {device_ms:.4f} | {peak:.3f} | {speedup:.2f}", rows, padded=True))
    for name, reason in report.written["skipped"].items():
        print(f"not here: {name}: {reason}")


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = options_of(__doc__, rounds=100)
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[5], help="K, at least 1")
    parser.add_argument("--vocab", type=int, nargs="+", default=[50257])
    dtypes = ["float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", nargs="+", default=dtypes[:2], choices=dtypes)
    reached = "probability that a draft that was reached is accepted, in (0, 1]"
    parser.add_argument("--acceptance", type=float, nargs="+", default=[None], help=reached)
    parser.add_argument("--kind", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--scale", type=float, nargs="+", default=[3.0], help="of the target's logits")
    parser.add_argument("--op", default="verify_exact", choices=["verify_exact", "verify_block"], help="of specops")
    names = ["specops", "softmax"]
    parser.add_argument("--compiled", nargs="*", default=names, choices=names, help="what torch.compile also makes")
    parser.add_argument("--peers", action="store_true", help="also time other implementations that are installed")
    parser.add_argument("--cache", nargs="+", default=["cold"], choices=["cold", "warm"])
    options = parser.parse_args(arguments)
    if min(options.num_draft_tokens) < 1 or min(options.batch) < 1 or min(options.vocab) < 3 or options.rounds < 2:
        parser.error("expected batch >= 1, num-draft-tokens >= 1, vocab >= 3 and rounds >= 2")
    if not all(rate is None or 0 < rate <= 1 for rate in options.acceptance):
        parser.error(f"--acceptance: expected numbers in (0, 1], got {options.acceptance}")
    torch.set_num_threads(options.threads)
    sizes = (options.vocab, options.num_draft_tokens, options.dtype, options.batch)
    problems = [
        (Problem(kind, batch, num_drafts, vocab, dtype, acceptance, scale), cache)
        for vocab, num_drafts, dtype, batch in product(*sizes)
        for kind, acceptance, scale, cache in product(options.kind, options.acceptance, options.scale, options.cache)
    ]
    device = torch.device(options.device)
    others, skipped = peers.find() if options.peers else ({}, {})
    with Progress(transient=True) as progress, torch.inference_mode():
        task = progress.add_task("copy rate", total=len(problems))
        roof = copy_rate(device)
        described = environment(device, copy_gb_per_s=roof * 1e-9, rounds=options.rounds)
        report = Report(options.out, described, skipped=skipped)
        for problem, cache in problems:
            progress.update(task, description=f"{problem.kind} B={problem.batch} {problem.dtype} {cache}")
            beside = others if problem.kind == "sampled" else {}
            own = (options.compiled, options.op)
            report.add(run_problem(problem, device, options.rounds, roof, cache, *own, beside, skipped))
            progress.advance(task)

    show(report)
    return report.records


if __name__ == "__main__":
    main()
