"""Test process set-up: eight CPU devices, strict promotion, and run-time shape checks on the whole package."""

import gc
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Two programs with collectives in flight at once can lock up virtual devices on few cores.
jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.config.update("jax_numpy_rank_promotion", "raise")

install_import_hook("triage_jax", "beartype.beartype")

_HERE = Path(__file__).parent
_MAPPINGS = Path("/proc/self/maps")
_MANY_MAPPINGS = 20_000


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps a file's tests in one process (--dist loadgroup): what they share is compiled once.

    The files beside this one run whole commands; their tests are long, share little, and are dealt one by one.
    """
    for item in items:
        if item.path.parent != _HERE and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(_HERE))))


@pytest.fixture(scope="module", autouse=True)
def _room_for_compiled_programs() -> Iterator[None]:
    """Forgets compiled programs before there are too many for one process.

    One holds some sixteen memory mappings. Linux allows a process 65,530 (vm.max_map_count), and beyond them XLA ends
    the process; thousands of tests in two processes come that far.
    """
    yield
    if _MAPPINGS.exists() and _MAPPINGS.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        jax.clear_caches()
        gc.collect()
