"""Split-K: a contraction cut into runs of blocks, whose sums are added one after the other."""

from collections.abc import Callable

from jax import lax
from jaxtyping import Array, Float32

from triage_jax.nvfp4.spec import BLOCK, DotRecipe

SPLITTABLE = ("bf16", "emulated")


def split_of(recipe: DotRecipe | None, execution: str) -> int:
    """The recipe's `split_k`; raises ValueError with an execution that sums in an order of its own."""
    split_k = 1 if recipe is None else recipe.split_k
    if split_k != 1 and execution not in SPLITTABLE:
        raise ValueError(
            f"split_k is {split_k} with execution {execution!r}, which sums in an order of its own; accepted: 1, or "
            f"execution {' or '.join(SPLITTABLE)}"
        )
    return split_k


def chunks(inputs: int, split_k: int) -> list[slice]:
    """Runs of ⌈blocks / split_k⌉ blocks of 16 that cover a contraction of `inputs`; the last may be shorter.

    So do kernels share tiles out, and so there are fewer runs than `split_k` where blocks are few or do not divide:
    36 blocks by 8 are seven runs of five and one of one, 4 blocks by 8 are four runs.
    """
    blocks = -(-inputs // BLOCK)
    step = -(-blocks // split_k) * BLOCK
    return [slice(start, min(start + step, inputs)) for start in range(0, inputs, step)]


def split_sum(
    partial: Callable[[slice], Float32[Array, "..."]], inputs: int, split_k: int
) -> Float32[Array, "..."]:
    """((p₀ + p₁) + p₂) + … of the runs' products p, each addition rounded to float32; one run is the product itself.

    `partial` multiplies one run, accumulated in float32. What a split-K GEMM without atomics computes (CUTLASS's
    serial reduction).
    """
    first, *others = chunks(inputs, split_k)
    total = partial(first)
    for run in others:
        # The barrier keeps a kernel from starting its sum with the total, which rounds in another order.
        total = total + lax.optimization_barrier(partial(run))
    return total
