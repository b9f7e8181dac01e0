"""The weights of the engines' contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rlhf_pipeline.policies.engines.contract import write_model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Checkpoint folders of the versions 1 and 2."""
    parent = tmp_path_factory.mktemp("weights")
    for version in (1, 2):
        write_model(parent / f"version-{version}", version)
    return {version: parent / f"version-{version}" for version in (1, 2)}
