"""Rows of a batch to buffers of the experts, `[E, rows, D]`, and back: what batched products take.

Every expert has room for as many rows as any other. The batch is cut into groups, one for each device, which fill
their own part of each buffer, so that no row leaves its device. Everything is a sort or a gather, in the gradient
too: scatters are slow. Source: GShard (arXiv 2006.16668) for groups and capacity.
"""

import math
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from triage_jax.model.layout import split_rows

STEP = 128
"""Rows of an expert and group are a multiple: what FP4 kernels tile by, blocks and rotations of 16 divide it"""


def expert_rows(rows: int, experts: int, per_token: int, factor: float | None) -> int:
    """Room for each expert in a group of `rows` tokens: `factor` times the even share, rounded up, or for all tokens.

    No expert is chosen by more than all tokens, which bounds it and is what None gives.
    """
    wanted = rows if factor is None else min(rows, math.ceil(factor * rows * per_token / experts))
    return -(-wanted // STEP) * STEP


@no_type_check  # leaves are also shapes and shardings
@struct.dataclass
class Slots:
    """Which token lies where. A pair is a token's choice of an expert, a slot one row of a group's buffers."""

    pair: Int[Array, "G slots"]
    """Of each slot, r·k + j for choice j of row r; anything where it is empty"""
    filled: Bool[Array, "G slots"]
    slot: Int[Array, "G R k"]
    """Of each pair; anything where it is not kept"""
    kept: Bool[Array, "G R k"]
    """False for a pair whose expert was full, and for those of padding"""
    experts: int = struct.field(pytree_node=False)


def assign(chosen: Int[Array, "G R k"], valid: Bool[Array, "G R"], experts: int, capacity: int) -> Slots:
    """A slot for every pair of a valid row, first come first served within an expert; padding gets none."""

    def one(chosen: Array, valid: Array) -> tuple[Array, ...]:
        # Padding goes to an expert that does not exist, and is sorted behind all others.
        pairs = jnp.where(valid[:, None], chosen, experts).reshape(-1)
        order = jnp.argsort(pairs, stable=True)
        starts = jnp.searchsorted(pairs[order], jnp.arange(experts + 1))
        # Their place in the order, without a scatter.
        rank = jnp.argsort(order) - starts[pairs]
        kept = (rank < capacity) & (pairs < experts)
        slot = jnp.where(kept, pairs * capacity + rank, 0)
        at = starts[:-1, None] + jnp.arange(capacity)[None]
        filled = (at < starts[1:, None]).reshape(-1)
        pair = order[jnp.minimum(at, len(pairs) - 1)].reshape(-1)
        return pair, filled, slot.reshape(chosen.shape), kept.reshape(chosen.shape)

    return Slots(*jax.vmap(one)(chosen, valid), experts=experts)


@jax.custom_vjp
def rows_to_experts(x: Float[Array, "G R D"], slots: Slots) -> Float[Array, "E M D"]:
    """Each token's row in every slot that it has; empty ones are zeros. M: all groups' slots of an expert."""
    return _buffers(_taken(x, slots.pair // slots.slot.shape[2], slots.filled), slots)


def _rows_backward(slots: Slots, g: Float[Array, "E M D"]) -> tuple[Float[Array, "G R D"], None]:
    return _picked(g, slots).astype(jnp.float32).sum(2).astype(g.dtype), None


rows_to_experts.defvjp(lambda x, slots: (rows_to_experts(x, slots), slots), _rows_backward)


@jax.custom_vjp
def pairs_to_experts(x: Float[Array, "G R k D"], slots: Slots) -> Float[Array, "E M D"]:
    """Each pair's row in its slot; empty ones are zeros."""
    return _buffers(_taken(x.reshape(len(x), -1, x.shape[-1]), slots.pair, slots.filled), slots)


@jax.custom_vjp
def experts_to_pairs(y: Float[Array, "E M D"], slots: Slots) -> Float[Array, "G R k D"]:
    """Each pair's row out of its slot; of a pair without one, zeros."""
    return _picked(y, slots)


pairs_to_experts.defvjp(
    lambda x, slots: (pairs_to_experts(x, slots), slots), lambda slots, g: (_picked(g, slots), None)
)
experts_to_pairs.defvjp(
    lambda y, slots: (experts_to_pairs(y, slots), slots),
    lambda slots, g: (pairs_to_experts(g, slots), None),
)


def _taken(rows: Float[Array, "G R D"], at: Int[Array, "G n"], wanted: Bool[Array, "G n"]) -> Array:
    taken = jax.vmap(lambda rows, at: rows[at])(rows, at)
    return split_rows(jnp.where(wanted[..., None], taken, 0))


def _buffers(rows: Float[Array, "G slots D"], slots: Slots) -> Float[Array, "E M D"]:
    groups, _, width = rows.shape
    by_expert = rows.reshape(groups, slots.experts, -1, width).swapaxes(0, 1)
    return split_rows(by_expert.reshape(slots.experts, -1, width), axis=1)


def _picked(y: Float[Array, "E M D"], slots: Slots) -> Float[Array, "G R k D"]:
    groups, rows, per_token = slots.slot.shape
    own = y.reshape(slots.experts, groups, -1, y.shape[-1]).swapaxes(0, 1).reshape(groups, -1, y.shape[-1])
    flat = (groups, rows * per_token)
    picked = _taken(split_rows(own), slots.slot.reshape(flat), slots.kept.reshape(flat))
    return picked.reshape(groups, rows, per_token, -1)
