"""Where arrays lie while a model runs on several devices: rows split over all of them, a layer's weights gathered.

Without these constraints XLA splits some activations over features and turns them about with all-to-alls. They say
nothing unless the function runs inside `on_mesh`, so that one device is none of a model's concern.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

BATCH_AXES = ("data", "fsdp")
"""`data` splits the batch, `fsdp` the batch and the parameters"""


@contextlib.contextmanager
def on_mesh(data: int, fsdp: int) -> Iterator[None]:
    """Traced inside: the constraints of a mesh of this shape, whichever devices it will be of."""
    if data * fsdp == 1:
        yield
        return
    mesh = AbstractMesh((data, fsdp), BATCH_AXES, axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def meshed() -> bool:
    """Whether there are several devices to lay arrays out on."""
    return _mesh() is not None


def row_parts(rows: int) -> int:
    """Into how many parts the mesh splits so many rows: one for each device, or 1 where they do not divide."""
    mesh = _mesh()
    return mesh.size if mesh is not None and rows % mesh.size == 0 else 1


def split_rows(x: Array, axis: int = 0) -> Array:
    """x with `axis` split over all devices; as it is where its size does not divide."""
    mesh = _mesh()
    if mesh is None or x.shape[axis] % mesh.size:
        return x
    return _placed(x, mesh, PartitionSpec(*(None,) * axis, BATCH_AXES))


def gathered[Tree](tree: Tree, *, layer: bool = False) -> Tree:
    """Weights whole on every device; their gradients are split over `fsdp` as the parameters are.

    layer: these are one layer's, which the parameters hold as a stack.
    """
    return jax.tree.map(partial(_gathered, layer), tree) if meshed() else tree


def split_axis(shape: Sequence[int], parts: int) -> int | None:
    """The axis along which `fsdp` splits a parameter; None for vectors and odd sizes.

    The last that divides of stacked layers, which a matrix's inputs are: split along the outputs, weights that are
    joined to one product (q/k/v, gate/up) would have to move between devices. Of embedding and head the longest.
    """
    divisible = [axis for axis, size in enumerate(shape) if size % parts == 0]
    if len(shape) < 2 or not divisible:
        return None
    return divisible[-1] if len(shape) > 2 else max(divisible, key=lambda axis: shape[axis])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(layer: bool, leaf: Array) -> Array:
    mesh = _mesh()
    return leaf if mesh is None else _placed(leaf, mesh, PartitionSpec())


def _forward(layer: bool, leaf: Array) -> tuple[Array, None]:
    return _gathered(layer, leaf), None


def _backward(layer: bool, _: None, gradient: Array) -> tuple[Array]:
    mesh, stacked = _mesh(), 1 if layer else 0
    # One layer of a stack: an axis of size 1 in front, which never is the one.
    shape = (1,) * stacked + gradient.shape
    axis = None if mesh is None else split_axis(shape, mesh.shape["fsdp"])
    if mesh is None or axis is None:
        return (gradient,)
    return (_placed(gradient, mesh, PartitionSpec(*(None,) * (axis - stacked), "fsdp")),)


_gathered.defvjp(_forward, _backward)


def _placed(x: Array, mesh: AbstractMesh, spec: PartitionSpec) -> Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _mesh() -> AbstractMesh | None:
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names == BATCH_AXES and mesh.size > 1 else None
