"""The ops as a repository for the `kernels` package, which loads them where torch_specops is not installed.

    python examples/kernel_repository.py FOLDER

Then, in another program:

    ops = kernels.get_local_kernel(Path("FOLDER"))
    output_tokens, num_accepted = ops.verify_exact(target_logits, draft_tokens, draft_logits, accept, sample)

The folder can also be uploaded to a hub. Several versions may be loaded side by side, so each registers its ops under a
name of its own, with a hash of its code. The variants for the CPU and for CUDA have the same code, and both need numpy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import torch_specops

PACKAGE = Path(torch_specops.__file__).parent
INIT = "from .ops import *\nfrom .ops import __all__ as __all__\nfrom .ops.uniforms import uniforms as uniforms\n"


def build(folder: Path) -> str:
    """Write `folder/build`; returns the name under which `torch.ops` will have the ops."""
    files = [PACKAGE / "checks.py", *sorted(PACKAGE.glob("ops/**/*.py"))]
    sources = {file.relative_to(PACKAGE): file.read_text() for file in files}
    name = f"_torch_specops_{hashlib.sha256(''.join(sources.values()).encode()).hexdigest()[:8]}"
    metadata = {"id": name, "name": "torch-specops", "version": 1, "license": "Apache-2.0", "python-depends": []}
    for backend in ("cpu", "cuda"):
        variant = folder / "build" / f"torch-{backend}"
        for path, source in sources.items():
            (variant / path).parent.mkdir(parents=True, exist_ok=True)
            # The modules import each other relatively, so only the name of the ops has to change.
            (variant / path).write_text(source.replace('"specops::', f'"{name}::').replace(".specops", f".{name}"))
        (variant / "__init__.py").write_text(INIT)
        (variant / "metadata.json").write_text(json.dumps(metadata | {"backend": {"type": backend}}))
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print(f"torch.ops.{build(folder)} in {folder}")


if __name__ == "__main__":
    main()
