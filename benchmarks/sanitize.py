"""Run the five ops once under compute-sanitizer, at small sizes, and write what it found.

    python benchmarks/sanitize.py --tool memcheck [--limit 30] [--out FILE.json]

The allocator's cache is off, so that a read behind a tensor's end is a read outside of its memory. If there is no
result, "refused" says why: the tool is not installed, does not know the device, or took too long. Exits with 1 if the
tool found errors.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from timing import Report, copy_rate, environment, process_of

import torch_specops

SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def ops_once(batch: int, num_draft_tokens: int, vocab: int) -> None:
    device = torch.device("cuda")
    g = torch.Generator().manual_seed(0)
    target, draft = (
        (3 * torch.randn(batch, count, vocab, generator=g)).bfloat16().to(device)
        for count in (num_draft_tokens + 1, num_draft_tokens)
    )
    u, s, own = (torch.rand(shape, generator=g).to(device) for shape in ((batch, num_draft_tokens), batch, batch))
    temperature = torch.full((batch,), 0.8, device=device)
    token, _ = torch_specops.sample(draft[:, 0], own, temperature)
    tokens = torch.cat([token.unsqueeze(1), draft[:, 1:].argmax(-1)], 1)
    filters = {"top_k": torch.full((batch,), 5, device=device), "top_p": torch.full((batch,), 0.9, device=device)}
    for verify in (torch_specops.verify_exact, torch_specops.verify_block):
        verify(target, tokens, draft, u, s, temperature)
        verify(target, tokens, draft, u, s, temperature, **filters)
    torch_specops.verify_sigmoid(target, tokens, draft, u, s)
    torch_specops.filter_logits(target[:, 0], temperature, **filters)
    torch.cuda.synchronize()


def sanitized(tool: str, limit: float, size: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"tool": tool}
    if shutil.which("compute-sanitizer") is None:
        return found | {"refused": "compute-sanitizer is not on PATH"}
    command = ["compute-sanitizer", "--tool", tool, *process_of(__file__), "--inside", *size]
    try:
        done = subprocess.run(
            command,
            text=True,
            timeout=limit,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return found | {"refused": f"more than {limit:g} seconds", "output": text.splitlines()[-20:]}
    lines = done.stdout.splitlines()
    summary = SUMMARY.search(done.stdout)
    found |= {"exit_code": done.returncode, "output": lines[-40:]}
    if summary is None or done.returncode != 0:
        # The summary of a program that did not finish is not a result.
        return found | {"refused": "no summary of a program that ran to its end", "summary": summary and summary[0]}
    return found | {"errors": int(summary[1])}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=["memcheck", "racecheck", "initcheck", "synccheck"], default="memcheck")
    parser.add_argument("--limit", type=float, default=30, help="seconds")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--num-draft-tokens", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=1025)
    parser.add_argument("--out", type=Path, help="write environment and results to this JSON file")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        ops_once(options.batch, options.num_draft_tokens, options.vocab)
        return {}
    device = torch.device("cuda")
    size = ["--batch", str(options.batch), "--num-draft-tokens", str(options.num_draft_tokens)]
    report = Report(options.out, environment(device, copy_gb_per_s=copy_rate(device) * 1e-9))
    report.add([sanitized(options.tool, options.limit, [*size, "--vocab", str(options.vocab)])])
    print(report.records[-1], flush=True)
    return report.records[-1]


if __name__ == "__main__":
    raise SystemExit(int(main().get("errors", 0) > 0))
