"""One evaluation that nothing interrupted, for all tests that compare with it."""

from pathlib import Path

import pytest

from tests.evaluate.inputs import arguments, write_sums
from triage_jax.evaluate.__main__ import main


@pytest.fixture(scope="session")
def file(tmp_path_factory) -> Path:
    return write_sums(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory, file) -> Path:
    """An uninterrupted evaluation."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert main(arguments(out, file)) == 0
    return out
