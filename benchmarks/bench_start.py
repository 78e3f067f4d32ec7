"""How long the first step takes in a process that starts cold, and in one that loads what another has compiled.

    python benchmarks/bench_start.py
    python benchmarks/bench_start.py --num-draft-tokens 4 --temperature 0 --out out.json

Two fresh processes, each with an empty compile cache, decode with the byte-level pair. The first one compiles
everything and saves it (`torch.compiler.save_cache_artifacts`); the second loads that file before its first step.
`stats.compile_seconds` is what both report: tracing, guards and, in the first, code generation and the C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import torch_specops
from torch_specops.cli.env import device_name


def first_step(artifacts: str, warm: bool, num_draft_tokens: int, temperature: float, device: str) -> dict[str, Any]:
    """One process: load what was compiled if `warm`, decode, save what was compiled if not."""
    from torch._dynamo.utils import counters
    from transformers import AutoModelForCausalLM

    if warm:
        torch.compiler.load_cache_artifacts(Path(artifacts).read_bytes())
    folder = Path(torch_specops.__file__).parent / "data" / "austen_bytes"
    target, draft = (
        AutoModelForCausalLM.from_pretrained(folder / role).eval().to(device) for role in ("target", "draft")
    )
    sampling = torch_specops.SamplingParams(temperature=temperature)
    decoder = torch_specops.SpeculativeDecoder(
        target, draft, num_draft_tokens=num_draft_tokens, sampling=sampling, compile=True
    )
    prompt = torch.tensor([list(b"It was not to be supposed that ")], device=device)
    output = decoder.generate(prompt, max_new_tokens=32, seed=0)
    if not warm:
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        Path(artifacts).write_bytes(saved[0])
    return {
        "start": "warm" if warm else "cold",
        "compile_seconds": output.stats.compile_seconds,
        "graphs": counters["stats"]["unique_graphs"],
        "cache_hits": counters["aot_autograd"]["autograd_cache_hit"],
        "cache_misses": counters["aot_autograd"]["autograd_cache_miss"],
        "artifact_bytes": Path(artifacts).stat().st_size,
        "tokens": output.new_tokens(0),
    }


def in_fresh_process(*arguments: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        call = ", ".join(repr(argument) for argument in arguments)
        result = subprocess.run(
            [sys.executable, "-c", f"import bench_start, json; print(json.dumps(bench_start.first_step({call})))"],
            cwd=Path(__file__).parent,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
            capture_output=True,
            text=True,
        )
    if result.returncode != 0:
        raise RuntimeError(result.stderr.strip().splitlines()[-1])
    return json.loads(result.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the records as JSON")
    options = parser.parse_args(arguments)
    console = Console()
    records = []
    with tempfile.TemporaryDirectory() as folder, Progress(console=console, transient=True) as progress:
        for warm in progress.track((False, True), description="starting"):
            cell = (f"{folder}/artifacts", warm, options.num_draft_tokens, options.temperature, options.device)
            records.append(in_fresh_process(*cell))
    same = records[0].pop("tokens") == records[1].pop("tokens")

    table = Table("start", "compile s", "graphs", "cache hits", "misses", "artifacts MB")
    for record in records:
        table.add_row(
            record["start"],
            f"{record['compile_seconds']:.1f}",
            str(record["graphs"]),
            str(record["cache_hits"]),
            str(record["cache_misses"]),
            f"{record['artifact_bytes'] / 1e6:.1f}",
        )
    console.print(table)
    console.print(f"same tokens: {'yes' if same else 'NO'}")
    if options.out is not None:
        described = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": device_name(torch.device(options.device)),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_specops": torch_specops.__version__,
            "num_draft_tokens": options.num_draft_tokens,
            "temperature": options.temperature,
            "same_tokens": same,
        }
        options.out.write_text(json.dumps({"environment": described, "records": records}, indent=1) + "\n")
    return records


if __name__ == "__main__":
    main()
