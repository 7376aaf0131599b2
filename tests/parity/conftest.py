"""A certified file with its BOM, for the tests of statements and of BOMs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from certified import certified


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release")
    certified(folder)
    return folder


@pytest.fixture
def copied(release: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(release, tmp_path / "copy"))
