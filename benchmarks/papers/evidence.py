"""What the scripts in this directory share: measurements that are made once, and the file they are kept in.

A cell is one number, row or curve of a paper's table: a key, a function, and the settings it is called with. `run`
measures the cells that are not in the JSON file yet and writes the file after each one, so that a stopped run continues
where it was. A cell is in the file if its key is there with the same settings. To measure it again, delete it there.

    def alpha(draft: str, temperature: float) -> dict[str, float]:
        ...                                             # returns anything that JSON can hold

    def cells_of(chosen: argparse.Namespace) -> list[Cell]:
        return [Cell(f"alpha/{draft}", alpha, {"draft": draft, "temperature": 1.0}) for draft in ("unigram", "bigram")]

    main = partial(reproduce, "leviathan_measured", __doc__, cells_of)

Put a model that several cells use behind `functools.cache`, so that it is loaded only if a cell is measured.
`run.py` writes the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torch_specops.cli.env import device_name, versions

sys.path.append(str(Path(__file__).resolve().parents[1]))
from timing import commit, write_whole

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "evidence"


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Args:
        key: its name in the file; parts are joined by "/".
        measure: is called with the settings, and with the results in `reads`, as keyword arguments. Returns what JSON
            can hold.
        settings: what the result depends on: sizes, temperatures, names. A cell with other settings is measured again.
        missing: what the cell needs and is not installed. It is then not run, and a result in the file is kept.
        reads: argument -> key of an earlier cell, whose result is passed as that argument.
    """

    key: str
    measure: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    missing: str = ""
    reads: Mapping[str, str] = field(default_factory=dict)


def read(path: Path, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """By key, what the file has of cells with the same settings, and of cells that are gone from the script. The file
    has an index into its list "environments" for the "environment" of a cell."""
    written = json.loads(path.read_text()) if path.exists() else {"environments": [], "cells": {}}
    wanted = {cell.key: _plain(cell.settings) for cell in cells}
    return {
        key: record | {"environment": written["environments"][record["environment"]]}
        for key, record in written["cells"].items()
        if wanted.get(key, record["settings"]) == record["settings"]
    }


def run(
    path: Path, cells: Sequence[Cell], only: str = "", device: str = "cpu", packages: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure the unfinished cells whose key begins with `only`; return the results of all finished ones by key.

    Args:
        path: the JSON file; its directory is made.
        cells: all cells of the script, in the order in which they are to run.
        device: where they run, for the record.
        packages: whose versions are recorded beside those of torch and transformers.
    """
    environment = {
        "device": device_name(torch.device(device)),
        "threads": torch.get_num_threads(),
        "versions": versions() | {package: metadata.version(package) for package in packages},
        "commit": commit(),
    }
    records = read(path, cells)
    pending = [cell for cell in cells if cell.key not in records and cell.key.startswith(only)]
    console = Console(stderr=True, highlight=False)
    for reason in dict.fromkeys(cell.missing for cell in pending if cell.missing):
        console.print(f"not run, {reason}: {', '.join(cell.key for cell in pending if cell.missing == reason)}")
    pending = [cell for cell in pending if not cell.missing]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cells), completed=len(cells) - len(pending))
        for cell in pending:
            progress.update(task, description=cell.key)
            started = time.perf_counter()
            earlier = {name: records[key]["result"] for name, key in cell.reads.items()}
            result = _plain(cell.measure(**cell.settings, **earlier))
            records[cell.key] = {
                "settings": _plain(cell.settings),
                "result": result,
                "seconds": round(time.perf_counter() - started, 3),
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "environment": environment,
            }
            # In the order of the script, in which the tables have them.
            records = {each.key: records[each.key] for each in cells if each.key in records} | records
            _write(path, records)
            progress.advance(task)
    return {cell.key: records[cell.key]["result"] for cell in cells if cell.key in records}


def _write(path: Path, records: Mapping[str, dict[str, Any]]) -> None:
    environments: list[dict[str, Any]] = []
    cells = {}
    for key, record in records.items():
        if record["environment"] not in environments:
            environments.append(record["environment"])
        cells[key] = record | {"environment": environments.index(record["environment"])}
    write_whole(path, _compact({"environments": environments, "cells": cells}).encode())


def reproduce(
    name: str,
    description: str | None,
    cells_of: Callable[[argparse.Namespace], list[Cell]],
    arguments: Sequence[str] | None = None,
    *,
    packages: Sequence[str] = (),
) -> dict[str, Any]:
    """The `main` of a script: read the options, and measure what is missing.

    Cells are kept in `--out`, or in a file named after the script and the kind of device.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads on a CPU")
    parser.add_argument("--out", type=Path, help="the JSON file; default: benchmarks/results/evidence/...")
    parser.add_argument("--only", default="", metavar="PREFIX", help="run the cells whose key begins with this")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    kind = torch.device(chosen.device).type
    path = chosen.out or RESULTS / (f"{name}.json" if kind == "cpu" else f"{name}-{kind}.json")
    cells = cells_of(chosen)
    found = run(path, cells, chosen.only, chosen.device, packages)
    print(f"{path}: {len(found)} of {len(cells)} cells")
    return found


def _plain(value: Any) -> Any:
    """A value as JSON gives it back, so that it compares equal to what is read from the file."""
    return json.loads(json.dumps(value, allow_nan=False))


def _compact(value: Any, depth: int = 0) -> str:
    """JSON with one line for each field of a cell."""
    if not isinstance(value, dict) or not value or depth > 2:
        return json.dumps(value)
    indent = " " * (depth + 1)
    lines = [f"{indent}{json.dumps(key)}: {_compact(entry, depth + 1)}" for key, entry in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}" + "\n" * (depth == 0)
