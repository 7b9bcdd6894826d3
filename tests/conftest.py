"""Test process set-up: eight CPU devices, strict promotion, and run-time shape checks on the whole package."""

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Two programs with collectives in flight at once can lock up virtual devices on few cores.
jax.config.update("jax_cpu_enable_async_dispatch", False)
jax.config.update("jax_numpy_rank_promotion", "raise")

install_import_hook("triage_jax", "beartype.beartype")
