"""Builds wheel and sdist into dist/, and tries the wheel in an environment outside of the checkout (`make dist`)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
# `exclude` of the sdist in pyproject.toml.
LEFT_OUT = "benchmarks/results/"
SHORT_BENCH = "--rounds 1 --batch-sizes 1 --temperature 0"
DEMO = "demo --target austen-bytes --draft austen-bytes-draft --max-new-tokens 24"


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    """What a command prints. No PYTHONPATH reaches it, and pip keeps to the constraints in builds too."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    own |= {"PIP_CONSTRAINT": str(CONSTRAINTS), "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | environment
    line = [str(part) for part in command]
    print("+", shlex.join(line), flush=True)
    done = subprocess.run(line, cwd=cwd, env=own, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}error: exit code {done.returncode}")
    return done.stdout


def expect(what: str, got: object, expected: object) -> None:
    if got != expected:
        sys.exit(f"error: {what}: expected {expected!r}, got {got!r}")


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT)
    same = (folder / wheel.name).read_bytes() == wheel.read_bytes()
    expect("the sdist and the checkout give the same wheel", same, True)
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """The sdist has the files that git tracks, and the wheel those of the package: no more, no less."""
    tracked = set(run("git", "ls-files", "-z").split("\0")) - {""}
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    source = {name for name in tracked if not name.startswith(LEFT_OUT)} | {"PKG-INFO"}
    package = {name for name in tracked if name.startswith(("torch_specops/", "torch_specops_command.py"))}
    expect("files of the sdist alone, or of the checkout alone", sorted(in_sdist ^ source), [])
    expect("files of the wheel alone, or of the package alone", sorted(in_wheel ^ package), [])
    needed = {"torch_specops/py.typed", "torch_specops/data/austen_bytes/target/model.safetensors"}
    expect("files that the wheel needs", sorted(needed - in_wheel), [])
    expect("licences of the wheel", len(licences), 1)
    for path, names in ((sdist, in_sdist), (wheel, in_wheel)):
        print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB, {len(names)} files")


def examples() -> list[tuple[str, str]]:
    """The Python blocks of README.md, each with the text block below it."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    found = [(code, below) for (language, code), (_, below) in pairwise(blocks) if language == "python"]
    expect("README.md has examples", bool(found), True)
    return found


def commands(program: str) -> list[list[str]]:
    """The arguments of each call of the program in README.md."""
    lines = re.findall(rf"^{program} (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    expect(f"README.md calls {program}", bool(lines), True)
    return [shlex.split(line, comments=True) for line in lines]


def try_wheel(wheel: Path, folder: Path) -> None:
    run(sys.executable, "-m", "venv", folder / "venv")
    binaries = folder / "venv" / "bin"
    for arguments in commands("pip"):
        run(binaries / "python", "-m", "pip", *(each.replace(".[hf]", f"{wheel}[hf]") for each in arguments))
    # Models come from the wheel alone, and code is compiled here.
    elsewhere = {"HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    where = "import sysconfig, torch_specops as t; print(t.__file__.startswith(sysconfig.get_path('purelib')))"
    expect("imported from site-packages", run(binaries / "python", "-c", where, cwd=folder).strip(), "True")
    expect("version", run(binaries / "torch-specops", "--version", cwd=folder).split()[1], wheel.name.split("-")[1])
    script = folder / "example.py"
    for code, printed in examples():
        script.write_text(code)
        output = run(binaries / "python", script, cwd=folder, **elsewhere)
        expect("output of an example in README.md", output.split(), printed.split())
    print(run(binaries / "torch-specops", *DEMO.split(), cwd=folder, **elsewhere))
    # From the checkout, where the file of prompts is.
    for first, *others in commands("torch-specops"):
        shortened = ["--max-new-tokens", "8", *(SHORT_BENCH.split() if first == "bench" else [])]
        print(run(binaries / "torch-specops", first, *others, *shortened, cwd=ROOT, **elsewhere))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        built = build(Path(name))
        check_contents(*built)
        try_wheel(built[1], Path(name))
