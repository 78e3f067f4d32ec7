"""Runs every script of this directory, then writes the tables of docs/evidence*.md.

    python benchmarks/papers/run.py [--only NAME...]

Each script is a process of its own and goes on where it was: cells that its JSON has are not measured again, so that a
second run takes seconds a script. To measure everything, delete benchmarks/results/evidence/*.json. What is not
installed is left out, with the reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# What a script imports beside torch; what a single cell needs, it says itself.
NEEDS = {
    "leviathan_theory": ("rich", "matplotlib"),
    "leviathan_measured": ("rich", "matplotlib", "transformers"),
    "leviathan_oracle": ("rich", "matplotlib", "transformers"),
    "wagner_text": ("rich", "matplotlib", "transformers", "rouge_score"),
    "wagner_asr": ("rich", "matplotlib", "transformers", "jiwer"),
    "wagner_memory": ("rich", "matplotlib", "transformers"),
    "chen": ("rich", "matplotlib", "transformers", "rouge_score"),
    "tables": ("rich", "transformers"),
}


def missing(script: str) -> list[str]:
    return [package for package in NEEDS[script] if importlib.util.find_spec(package) is None]


def main(arguments: list[str] | None = None) -> int:
    """The number of scripts that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NEEDS, default=list(NEEDS), metavar="NAME")
    chosen = parser.parse_args(arguments).only
    failed = []
    for script in chosen:
        if missing(script):
            print(f"{script}: not run, not installed: {', '.join(missing(script))} (the extra `evidence`)", flush=True)
            continue
        print(f"{script} ...", flush=True)
        started = time.perf_counter()
        if subprocess.run([sys.executable, str(HERE / f"{script}.py")]).returncode != 0:
            failed.append(script)
        print(f"{script}: {time.perf_counter() - started:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
