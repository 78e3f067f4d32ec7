"""Progress bars of tqdm, which transformers installs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any


def progress_bar(progress: bool, total: int | None, unit: str) -> Any:
    """A bar, as a context manager. Inside of `with`, it is None if `progress` is False."""
    if not progress:
        return nullcontext()
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    return tqdm(total=total, unit=unit)
