"""What every script in this directory shares: cells that are measured once, where they were measured, and plots.

A cell is one number, row or curve of a table: a key, a function, and the settings it is called with. `Cells` runs those
that are not finished, with a progress bar, and writes the JSON after each one, so that a run that was stopped goes on
where it was. A cell counts as finished when the file has its key with the same settings; delete the file, or the
cell in it, and it is measured again. The file holds the cells of its script and no others.

    from evidence import Cell, Cells, options, results_path

    def alpha(draft: str, temperature: float) -> dict[str, float]:
        ...                                             # anything that JSON can hold

    def main(arguments: list[str] | None = None) -> None:
        chosen = options(__doc__, arguments)            # --large, --device, --threads, --out, --only
        cells = [
            Cell(f"table 3/{draft}/T={t}", alpha, {"draft": draft, "temperature": t})
            for draft in ("unigram", "bigram") for t in (0.0, 1.0)
        ]
        found = Cells(results_path("leviathan_measured", chosen), cells, chosen.device).run(chosen.only)
        found["table 3/bigram/T=1.0"]                   # what `alpha` returned

A model that several cells use belongs behind `functools.cache`, so that finished cells do not load it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torch_specops.cli.env import device_name, versions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FIGURES", "RESULTS", "Cell", "Cells", "environment", "options", "results_path", "save_svg", "wide_console"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "evidence"
FIGURES = ROOT / "docs" / "figures"


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Args:
        key: its name in the file; parts joined by "/".
        measure: called with the settings as keyword arguments; returns what JSON can hold.
        settings: what the result depends on: sizes, temperatures, names. Other settings make another measurement.
        missing: what it needs and is not there; then it is not run, and a result that the file has is kept.
    """

    key: str
    measure: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""


class Cells:
    """The cells of one script and the JSON file that they are kept in.

    The file: "environments", a list of device, threads, versions and commit; "cells", by key: "settings", "result",
    "seconds", "date", and "environment", an index into that list.

    Args:
        path: the JSON file; its directory is made.
        cells: all cells of the script, in the order in which they are to run.
        device: where they run, for the record.
        packages: whose versions count beside those of torch, transformers and the like.
    """

    def __init__(
        self, path: Path, cells: Sequence[Cell], device: str | torch.device = "cpu", packages: Sequence[str] = ()
    ) -> None:
        self.path = path
        self._cells = cells
        self._environment = environment(device, packages)
        written = json.loads(path.read_text()) if path.exists() else {"environments": [], "cells": {}}
        # By key: a cell of the file, with its environment in place of the index.
        self._records: dict[str, dict[str, Any]] = {}
        for cell in cells:
            record = written["cells"].get(cell.key)
            if record is not None and record["settings"] == _plain(cell.settings):
                self._records[cell.key] = record | {"environment": written["environments"][record["environment"]]}

    @property
    def results(self) -> dict[str, Any]:
        """What the finished cells returned, by key; a later cell may read an earlier one."""
        return {key: record["result"] for key, record in self._records.items()}

    def run(self, only: str = "", console: Console | None = None) -> dict[str, Any]:
        """Measure the cells that are not finished and whose key begins with `only`; return `results`."""
        pending = [cell for cell in self._cells if cell.key not in self._records and cell.key.startswith(only)]
        console = console or Console(stderr=True)
        for reason in dict.fromkeys(cell.missing for cell in pending if cell.missing):
            keys = ", ".join(cell.key for cell in pending if cell.missing == reason)
            console.print(f"not run, {reason}: {keys}", highlight=False)
        pending = [cell for cell in pending if not cell.missing]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=len(self._cells), completed=len(self._cells) - len(pending))
            for cell in pending:
                progress.update(task, description=cell.key)
                started = time.perf_counter()
                result = _plain(cell.measure(**cell.settings))
                self._records[cell.key] = {
                    "settings": _plain(cell.settings),
                    "result": result,
                    "seconds": round(time.perf_counter() - started, 3),
                    "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                    "environment": self._environment,
                }
                self._write()
                progress.advance(task)
        return self.results

    def _write(self) -> None:
        environments: list[dict[str, Any]] = []
        records = {}
        for key in (cell.key for cell in self._cells if cell.key in self._records):
            record = self._records[key]
            if record["environment"] not in environments:
                environments.append(record["environment"])
            records[key] = record | {"environment": environments.index(record["environment"])}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when whole: a run that is stopped here leaves the file before.
        partial = self.path.with_suffix(".partial")
        partial.write_text(_compact({"environments": environments, "cells": records}))
        partial.replace(self.path)


def environment(device: str | torch.device, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Device, threads, versions and commit ("-dirty" behind it: with changes that were not committed)."""
    return {
        "device": device_name(torch.device(device)),
        "threads": torch.get_num_threads(),
        "versions": versions() | {package: metadata.version(package) for package in packages},
        "commit": _commit(),
    }


def options(
    description: str | None, arguments: Sequence[str] | None = None, add: Callable[[Any], None] | None = None
) -> argparse.Namespace:
    """The options that every script has: large, device, threads, out, only; `add` is handed the parser for more."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="larger sizes, in a file of their own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    parser.add_argument("--out", type=Path, help="the JSON file; default: benchmarks/results/evidence/...")
    parser.add_argument("--only", default="", metavar="PREFIX", help="run the cells whose key begins so")
    if add is not None:
        add(parser)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    return chosen


def wide_console() -> Console:
    """Where tables are printed: a table is wider than a log is taken for."""
    return Console(width=None if sys.stdout.isatty() else 140)


def results_path(name: str, chosen: argparse.Namespace) -> Path:
    """Where a script's cells are kept: `--out`, else a file by its name, size and kind of device."""
    if chosen.out is not None:
        return Path(chosen.out)
    kind = torch.device(chosen.device).type
    return RESULTS / ("-".join([name, *["large"] * chosen.large, *[kind] * (kind != "cpu")]) + ".json")


def save_svg(figure: Figure, path: Path) -> None:
    """The figure as a small SVG that is the same, byte for byte, for the same numbers."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "evidence", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _plain(value: Any) -> Any:
    """What JSON makes of a value, so that it compares equal to what is read back."""
    return json.loads(json.dumps(value, allow_nan=False))


def _compact(value: Any, depth: int = 0) -> str:
    """JSON with a line per entry down to a cell's fields, whose values stand on one line."""
    if not isinstance(value, dict) or not value or depth > 2:
        return json.dumps(value)
    indent = " " * (depth + 1)
    lines = [f"{indent}{json.dumps(key)}: {_compact(entry, depth + 1)}" for key, entry in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}" + "\n" * (depth == 0)


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
