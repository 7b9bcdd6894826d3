"""Compiling a learner's update takes seconds; these tests compare to rounding, so LLVM need not try hard."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def quick_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
