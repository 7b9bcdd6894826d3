"""Which products of a model run in which number format: a setting, printed at start, never an environment variable."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from triage_jax.model.params import Params
from triage_jax.nvfp4 import DotRecipe, Execution, Operand, QuantSpec, to_operand

MLP = ("gate", "up", "down")
ATTENTION = ("q", "k", "v", "o")


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Numerics of one side's forward pass. Norms, attention scores, embedding and head stay in the compute dtype."""

    execution: Execution = "emulated"
    """float32, bf16, or emulated (exact two-level NVFP4 W4A4 on any device)"""
    layers: Literal["mlp", "linear"] = "mlp"
    """Quantised products: mlp (gate, up, down; the reported 4B recipe) or linear (attention projections too)"""
    weight: QuantSpec = field(default_factory=lambda: QuantSpec(tile="1x16", scope="tensor"))
    """How weights are quantised"""
    activation: QuantSpec = field(default_factory=lambda: QuantSpec(tile="1x16", scope="tensor"))
    """How activations are quantised"""

    @property
    def recipe(self) -> DotRecipe:
        return DotRecipe(weight=self.weight, activation=self.activation)

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float32 if self.execution == "float32" else jnp.bfloat16)

    def quantized_names(self) -> tuple[str, ...]:
        """Names of the weights that run in NVFP4; empty unless the execution is a quantised one."""
        if self.execution != "emulated":
            return ()
        return MLP if self.layers == "mlp" else ATTENTION + MLP

    def execution_of(self, name: str) -> Execution:
        """Execution of the product with weight `name`: what is not quantised runs in BF16."""
        if self.execution == "emulated" and name not in self.quantized_names():
            return "bf16"
        return self.execution

    def describe(self) -> str:
        """One line for the start-up summary."""
        if self.execution != "emulated":
            return self.execution
        weight, activation = self.weight, self.activation
        return (
            f"NVFP4 W4A4 emulated on {'/'.join(self.quantized_names())}; "
            f"weights {weight.tile} per {weight.scope} ({weight.rule}), "
            f"activations {activation.tile} per {activation.scope} ({activation.rule}); the rest BF16"
        )


def serving_params(params: Params, numerics: Numerics) -> Params:
    """Parameters as a sampler holds them: a tuple of layers, quantised weights as operands, the rest in compute dtype.

    Weights are rounded to BF16 before they are quantised, as an exported checkpoint is (numerics.md §3 row 11).
    """
    if isinstance(params.layers, tuple):
        raise ValueError(
            "serving_params takes a learner's parameters, with stacked layers; these are a sampler's"
        )
    # Copies, even where the dtype is right already: the learner gives its own buffers away at the next update.
    params = jax.tree.map(lambda leaf: jnp.array(leaf, numerics.compute_dtype, copy=True), params)
    layers: Any = params.layers
    operands = {
        name: _matrix_by_matrix(getattr(layers, name), numerics.weight) for name in numerics.quantized_names()
    }
    layers = replace(layers, **operands)
    count = layers.input_norm.shape[0]
    return replace(
        params, layers=tuple(jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(count))
    )


def _matrix_by_matrix(stack: jax.Array, spec: QuantSpec) -> Operand:
    """Operands of a stack of weights, each matrix (of a layer, of an expert) in a scope of its own."""

    def quantise(weight: jax.Array) -> Operand:
        return to_operand(weight, spec)

    for _ in range(stack.ndim - 2):
        quantise = jax.vmap(quantise)
    return quantise(stack)
