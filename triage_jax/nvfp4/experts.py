"""Global scales of a mixture's operands: each expert's own, or one of all experts of a layer (`spec.ExpertScopes`)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, UInt32

from triage_jax.nvfp4.operand import Operand, to_operand
from triage_jax.nvfp4.scales import ScopeAmax, as_float
from triage_jax.nvfp4.spec import DotRecipe, ExpertScopes


def check_experts(recipe: DotRecipe, execution: str) -> None:
    """Raises ValueError for scopes of experts that the execution would not follow."""
    scopes = recipe.experts
    if execution == "te":
        for name, value, own in (
            ("weight", scopes.weight, ("expert",)),
            ("activation", scopes.activation, ("expert", None)),
        ):
            if value not in own:
                raise ValueError(
                    f"ExpertScopes.{name} is {value!r} with execution 'te', which multiplies one expert after the "
                    f"other; accepted: {', '.join(map(repr, own))}, or execution emulated or scaled_matmul"
                )
    elif scopes.activation == "expert" and recipe.activation.scope == "shard":
        raise ValueError(
            "ExpertScopes.activation is 'expert' with activation.scope 'shard', which splits the batch and not the "
            "experts; accepted: tensor, row, static"
        )


def check_count(scopes: ExpertScopes, experts: int) -> None:
    """Raises ValueError unless calibrated magnitudes, if there are any, are one for each expert."""
    if scopes.static_amax is not None and len(scopes.static_amax) != experts:
        raise ValueError(
            f"ExpertScopes.static_amax has {len(scopes.static_amax)} numbers, the model {experts} experts; accepted: "
            "one for each"
        )


def buffers_amax(recipe: DotRecipe, experts: int) -> ScopeAmax | None:
    """A of activations `[E, M, K]`, `[E, 1, 1]` or a scalar; None where the spec's own scope says it all.

    Raises ValueError where calibrated magnitudes are not one for each expert.
    """
    if (static := _static(recipe, experts)) is not None:
        amax = static.reshape(-1, 1, 1) if static.ndim else static
        return lambda block: amax
    if recipe.experts.activation == "expert" and recipe.activation.scope == "tensor":
        return lambda block: as_float(block.max(axis=(1, 2), keepdims=True))
    return None


def sorted_amax(recipe: DotRecipe, sizes: Int[Array, "E"], rows: int) -> ScopeAmax | None:
    """As `buffers_amax`, of `rows` sorted by expert, `sizes` of each: `[M, 1]` or a scalar.

    Rows past the last group belong to nobody and enter no scale.
    """
    experts = len(sizes)
    static = _static(recipe, experts)
    if static is not None and not static.ndim:
        return lambda block: static
    if recipe.experts.activation != "expert" or recipe.activation.scope not in ("tensor", "static"):
        return None
    expert = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right")

    def each_row_s(amax: Float32[Array, "E"]) -> Float32[Array, "M 1"]:
        return amax[jnp.minimum(expert, experts - 1)][:, None]

    def largest(block: UInt32[Array, "M blocks"]) -> Float32[Array, "M 1"]:
        # A masked maximum for each expert: scatters are slow, and rows may be split over devices.
        member = expert[None] == jnp.arange(experts)[:, None]
        return each_row_s(as_float(jnp.where(member, block.max(axis=-1)[None], jnp.uint32(0)).max(axis=1)))

    return largest if static is None else lambda block: each_row_s(static)


def _static(recipe: DotRecipe, experts: int) -> Float32[Array, "*E"] | None:
    """Calibrated magnitudes, of each expert or the largest of all; None where the experts have none of their own."""
    scopes = recipe.experts
    if recipe.activation.scope != "static" or scopes.static_amax is None:
        return None
    check_count(scopes, experts)
    own = scopes.activation == "expert"
    # Behind the barrier, lest XLA divide at compile time by its own rules.
    return lax.optimization_barrier(
        jnp.asarray(scopes.static_amax if own else max(scopes.static_amax), jnp.float32)
    )


def stacked_operand(w: Float[Array, "E N K"], recipe: DotRecipe) -> Operand:
    """Every expert's weight quantised, each by itself or with one global scale; scales `[E]` or `[E, N, 1]`."""
    if recipe.experts.weight == "layer":
        shared = to_operand(w, recipe.weight, keep_encode=recipe.keeps_encode)
        return jax.tree.map(lambda leaf: leaf if leaf.ndim else jnp.broadcast_to(leaf, (len(w),)), shared)
    return jax.vmap(lambda expert: to_operand(expert, recipe.weight, keep_encode=recipe.keeps_encode))(w)
