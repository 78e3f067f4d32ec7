"""Runs every script of this directory, then writes the tables of docs/evidence*.md.

    python benchmarks/papers/run.py [--only NAME...]

Each script is a process of its own and measures only the cells that its JSON file does not have. To measure everything,
delete benchmarks/results/evidence/*.json. A script whose packages are not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

COMMON = ("rich", "matplotlib", "transformers")
# What a script imports beside torch and these. A cell that needs more says so itself.
NEEDS = {"leviathan_theory": [], "leviathan_measured": [], "wagner_text": ["rouge_score"], "chen": ["rouge_score"]}
NEEDS |= {"tables": []}


def missing(script: str) -> list[str]:
    return [package for package in (*COMMON, *NEEDS[script]) if importlib.util.find_spec(package) is None]


def main(arguments: list[str] | None = None) -> int:
    """The number of scripts that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=NEEDS, default=list(NEEDS), metavar="NAME")
    failed = []
    for script in parser.parse_args(arguments).only:
        if missing(script):
            print(f"{script}: not run, not installed: {', '.join(missing(script))} (the extra `evidence`)", flush=True)
        elif subprocess.run([sys.executable, str(Path(__file__).with_name(f"{script}.py"))]).returncode != 0:
            failed.append(script)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
