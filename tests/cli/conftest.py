"""A target and a draft in folders, as the commands take them."""

from __future__ import annotations

import pytest
from tiny_cli import save_model


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("draft"), seed=1)
