"""Cases that `make test` leaves to `make test-all`."""

from __future__ import annotations

import pytest


def slow(*values: object) -> object:
    """These values of a parametrised test, for `make test-all` alone."""
    return pytest.param(*values, marks=pytest.mark.slow)
