"""The device mesh: `data` splits the batch, `fsdp` splits the batch and the parameters too."""

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from triage_jax.model.layout import BATCH_AXES, split_axis


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices of the learner."""

    data: int = 1
    """Copies of the parameters; the batch is split over them"""
    fsdp: int = 1
    """Devices that share one copy of the parameters; the batch is split over them too"""

    def __post_init__(self) -> None:
        if self.data < 1 or self.fsdp < 1:
            raise ValueError(f"mesh: data={self.data}, fsdp={self.fsdp}; accepted: at least 1 each")


def make_mesh(config: MeshConfig) -> Mesh:
    """Mesh over the first data × fsdp devices; raises ValueError when there are fewer."""
    needed, devices = config.data * config.fsdp, jax.devices()
    if needed > len(devices):
        raise ValueError(
            f"mesh: data={config.data} x fsdp={config.fsdp} needs {needed} devices; this process sees {len(devices)}"
        )
    grid = np.asarray(devices[:needed]).reshape(config.data, config.fsdp)
    return Mesh(grid, BATCH_AXES, axis_types=(AxisType.Auto,) * 2)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over all devices."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def parameter_shardings[Tree](tree: Tree, mesh: Mesh) -> Tree:
    """For every array the sharding that splits it over `fsdp` (`split_axis`); vectors and odd sizes are replicated.

    Works on parameters and on optimiser state alike, since the moments have the parameters' shapes.
    """
    parts = mesh.shape["fsdp"]

    def place(leaf: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
        axis = split_axis(leaf.shape, parts)
        if parts == 1 or axis is None:
            return replicated(mesh)
        return NamedSharding(mesh, PartitionSpec(*(None,) * axis, "fsdp"))

    return jax.tree.map(place, tree)
