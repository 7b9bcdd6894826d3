"""Compile for GPUs that are not there: the very program a Blackwell or Hopper machine would run, made on a CPU.

XLA needs no device to compile, only its description. Wanted are the packages jax-cuda13-plugin and jax-cuda13-pjrt of
jaxlib's own version, and `ptxas` (a CUDA toolkit or the package nvidia-cuda-nvcc); no driver, no other CUDA library.
What is proven is that XLA accepts the program, which library calls and collectives it became, and the memory it
takes. What is not: that cuDNN has a kernel for a shape, speed, and rounding on the device.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, Sharding, SingleDeviceSharding
from jax.stages import Compiled
from jax.typing import DTypeLike

from triage_jax.learner import (
    Learner,
    MeshConfig,
    RolloutBatch,
    batch_sharding,
    init_state,
    parameter_shardings,
    update,
)
from triage_jax.model.layout import BATCH_AXES
from triage_jax.model.params import abstract_params

type Device = Any  # `jax.Device`, which type checkers take for a variable


class AotError(RuntimeError):
    """Nothing can be compiled for a GPU in this environment: the message says what to install."""


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """One kind of GPU, as XLA sees it. Numbers are those that XLA lists for the device."""

    name: str
    compute_capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors"""
    memory: int
    """Bytes"""
    bandwidth: float
    """Bytes per second"""
    l2_cache: int
    """Bytes"""
    clock: float
    """GHz"""
    cudnn: str = "9.28.0"
    """Below 9.10, or empty, XLA has no FP4 product and dequantises in silence"""
    cuda: str = "13.0.0"

    def description(self) -> str:
        """XLA's GpuTargetConfigProto as text."""
        major, minor = self.compute_capability
        return f"""
            platform_name: "CUDA"
            device_description_str: "NVIDIA {self.name}"
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {self.cores}
              device_memory_size: {self.memory}
              memory_bandwidth: {self.bandwidth:.0f}
              l2_cache_size: {self.l2_cache}
              clock_rate_ghz: {self.clock}
              dnn_version: "{self.cudnn}"
              driver_version: "{self.cuda}" runtime_version: "{self.cuda}"
              compile_time_toolkit_version: "{self.cuda}"
              {_LIMITS}
            }}
        """


# The same on every data-centre GPU since compute capability 9.0.
_LIMITS = """
    threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
    fpus_per_core: 128 registers_per_core_limit: 65536 registers_per_block_limit: 65536
    shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
    block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
    thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
"""

H200 = GpuTarget(
    name="H200",
    compute_capability=(9, 0),
    cores=132,
    memory=151_397_597_184,
    bandwidth=4.8e12,
    l2_cache=52_428_800,
    clock=1.98,
)
B200 = GpuTarget(
    name="B200",
    compute_capability=(10, 0),
    cores=148,
    memory=191_514_411_008,
    bandwidth=7.67232e12,
    l2_cache=132_644_864,
    clock=1.965,
)
B300 = GpuTarget(
    name="B300",
    compute_capability=(10, 3),
    cores=158,
    memory=297_021_865_984,
    bandwidth=7.936e12,
    l2_cache=135_528_448,
    clock=1.965,
)
TARGETS = {target.name.lower(): target for target in (H200, B200, B300)}


@cache
def target_devices(target: GpuTarget, count: int = 1) -> tuple[Device, ...]:
    """`count` devices to compile for; arrays cannot be put on them. Raises AotError without the CUDA plugin."""
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=target.description(), topology=f"1x1x{count}"
        )
    except Exception as error:
        raise AotError(
            f"no compiler for NVIDIA {target.name} here ({_first_line(error)}); it is in the packages "
            f"jax-cuda13-plugin=={jax.__version__} and jax-cuda13-pjrt=={jax.__version__}"
        ) from error
    return tuple(topology.devices)


def target_mesh(target: GpuTarget, shape: MeshConfig) -> Mesh:
    """A learner's mesh of such devices."""
    grid = np.asarray(target_devices(target, shape.data * shape.fsdp)).reshape(shape.data, shape.fsdp)
    return Mesh(grid, BATCH_AXES, axis_types=(AxisType.Auto,) * 2)


@cache
def unavailable() -> str | None:
    """Why nothing can be compiled for a GPU here; None where it can."""
    try:
        devices = target_devices(B200)
        compile_for(jnp.tanh, (jax.ShapeDtypeStruct((8,), jnp.float32),), devices)
    except AotError as error:
        return str(error)
    return None


def compile_for(
    fn: Callable[..., Any],
    args: Sequence[Any],
    devices: Sequence[Device],
    options: Mapping[str, str] | None = None,
) -> Compiled:
    """`fn(*args)` compiled for `devices`, with `jax.ShapeDtypeStruct`s in place of arrays.

    A struct that names no sharding lies on the first device; name one on a mesh of `devices` to use several.
    A jitted `fn` keeps its static and donated arguments; `options` are XLA's own. Raises AotError without `ptxas`,
    and whatever XLA raises for a program that it cannot compile.
    """
    first = SingleDeviceSharding(devices[0])

    def place(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first)
        return leaf

    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    lowered = jitted.lower(*jax.tree.map(place, tuple(args)))
    try:
        return lowered.compile(compiler_options=dict(options or {}))
    except jax.errors.JaxRuntimeError as error:
        if "No PTX compilation provider" in str(error):
            raise AotError(
                "XLA found no `ptxas`: put a CUDA 13 toolkit on PATH or install nvidia-cuda-nvcc"
            ) from error
        raise


def compile_update(
    learner: Learner,
    target: GpuTarget,
    *,
    rows: int,
    prompt_tokens: int,
    new_tokens: int,
    options: Mapping[str, str] | None = None,
) -> Compiled:
    """One update of `rows` responses on the learner's mesh of `target` GPUs, from shapes alone: no weight exists."""
    mesh = target_mesh(target, learner.settings.mesh)

    def array(sharding: Sharding, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    by_rows = partial(array, batch_sharding(mesh))
    whole, response = (rows, prompt_tokens + new_tokens), (rows, new_tokens)
    batch = RolloutBatch(
        tokens=by_rows(whole, jnp.int32),
        valid=by_rows(whole, jnp.bool),
        mask=by_rows(response, jnp.bool),
        sampler_logp=by_rows(response),
        advantages=by_rows((rows,)),
    )
    state = jax.eval_shape(partial(init_state, learner), abstract_params(learner.model, jnp.float32))
    state = jax.tree.map(
        lambda leaf, sharding: array(sharding, leaf.shape, leaf.dtype),
        state,
        parameter_shardings(state, mesh),
    )
    return compile_for(update, (learner, state, batch, batch.sampler_logp), tuple(mesh.devices.flat), options)


def custom_calls(compiled: Compiled) -> Counter[str]:
    """How often the program calls each library function; `__cudnn$blockScaledDot` is an FP4 tensor-core product."""
    return Counter(re.findall(r'custom_call_target="([^"]+)"', compiled.as_text() or ""))


def collectives(compiled: Compiled) -> Counter[str]:
    """How many collective operations of each kind the program holds."""
    kinds = "all-gather|all-reduce|reduce-scatter|ragged-all-to-all|all-to-all|collective-permute"
    return Counter(re.findall(rf"\s({kinds})(?:-start)?\(", compiled.as_text() or ""))


def device_memory(compiled: Compiled) -> dict[str, int]:
    """Bytes on each device by purpose, as the compiler laid them out; a donated argument's bytes count once."""
    stats = compiled.memory_analysis()
    if stats is None:
        raise AotError("XLA gave no memory analysis for this program")
    parts = {
        "arguments": stats.argument_size_in_bytes,
        "outputs, not in donated arguments": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "program": stats.generated_code_size_in_bytes,
    }
    return parts | {"total": sum(parts.values())}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
