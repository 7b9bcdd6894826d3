"""Which products of a model run in which number format: a setting, printed at start, never an environment variable."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from triage_jax.model.params import LayerParams, Params
from triage_jax.nvfp4 import DotRecipe, Execution, Operand, QuantSpec, to_operand
from triage_jax.nvfp4.experts import check_experts, stacked_operand
from triage_jax.nvfp4.product import dense
from triage_jax.nvfp4.spec import Backward, ExpertScopes, GlobalProduct
from triage_jax.nvfp4.split import split_of

MLP = ("gate", "up", "down")
ATTENTION = ("q", "k", "v", "o")
FUSED = (("q", "k", "v"), ("gate", "up"))
"""Weights that share their input, and that servers multiply as one matrix"""
NVFP4 = ("emulated", "scaled_matmul", "te")


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Numerics of one side's forward pass: what the two sides may do differently (docs/numerics.md lists the sources).

    Norms, attention scores, embedding and head are in the compute dtype on both sides.
    """

    execution: Execution = "emulated"
    """float32; bf16; emulated (exact NVFP4 W4A4 on any device); scaled_matmul (the same, native on Blackwell); te
    (Transformer Engine, on Blackwell)"""
    layers: Literal["mlp", "linear"] = "mlp"
    """Quantised products: mlp (gate, up, down; the reported recipe) or linear (attention projections too)"""
    high_precision_layers: int = 0
    """Last layers that stay in BF16"""
    weight: QuantSpec = field(default_factory=lambda: QuantSpec(tile="1x16", scope="tensor"))
    """How weights are quantised"""
    activation: QuantSpec = field(default_factory=lambda: QuantSpec(tile="1x16", scope="tensor"))
    """How activations are quantised"""
    quantize_activations: bool = True
    """False: W4A16, what servers do on devices without FP4 products"""
    fused_shards: bool = False
    """q, k, v and gate, up are quantised as one matrix each: they share a global scale, as in served checkpoints"""
    weight_source: Literal["bf16", "float32"] = "bf16"
    """What is quantised: the weights rounded to BF16, as a checkpoint has them, or the float32 masters"""
    router: Literal["float32", "bf16"] = "float32"
    """Precision of the router's logits; its softmax is float32"""
    expert_weighting: Literal["after", "before"] = "after"
    """Where a token's expert weight multiplies: the down projection's output, or its input before it is quantised"""
    expert_capacity: float | None = None
    """Of a mixture: rows of each expert's buffer over its even share, from 1; null: no limit (sorted rows, or with
    scaled_matmul and te room for every token). What an expert has no room for is counted (moe/overflow_fraction)"""
    expert_scopes: ExpertScopes = field(default_factory=ExpertScopes)
    """Of a mixture: whether the experts of a layer share a global scale"""
    split_k: int = 1
    """Runs in which a forward product sums its contraction, each in float32, added in order; emulated and bf16 only"""
    global_product: GlobalProduct = "decode"
    """Product of the two global scales: decode, fl(Dx*Dw); encode, fl(1/fl(Sx*Sw)), compressed-tensors' 1/(Gx*Gw)"""
    hidden_rounding: Literal["bf16", "none"] = "bf16"
    """Rounding of SwiGLU's output before it is quantised; fused kernels have none"""
    kv_cache: Literal["bf16", "fp8_e4m3"] = "bf16"
    """What attention reads keys and values as; fp8_e4m3 with a scale of 1"""
    backward: Backward = "bf16"
    """Gradient of the quantised products: bf16 (straight through), dequantized (by the forward's operands), nvfp4"""
    stochastic_rounding: bool = True
    """Of the gradients in backward nvfp4"""
    hadamard: bool = True
    """Random Hadamard rotation of the weight gradient's operands in backward nvfp4"""

    def __post_init__(self) -> None:
        if self.high_precision_layers < 0:
            raise ValueError(
                f"high_precision_layers is {self.high_precision_layers}; accepted: 0 or more of the last layers"
            )
        if self.expert_capacity is not None and not 1 <= self.expert_capacity < math.inf:
            raise ValueError(
                f"expert_capacity is {self.expert_capacity}; accepted: null, or 1 and more even shares"
            )
        split_of(self.recipe, self.execution)
        if self.execution in NVFP4:
            check_experts(self.recipe, self.execution)

    @property
    def recipe(self) -> DotRecipe:
        return DotRecipe(
            weight=self.weight,
            activation=self.activation,
            backward=self.backward,
            stochastic_rounding=self.stochastic_rounding,
            hadamard=self.hadamard,
            split_k=self.split_k,
            global_product=self.global_product,
            experts=self.expert_scopes,
        )

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float32 if self.execution == "float32" else jnp.bfloat16)

    @property
    def needs_key(self) -> bool:
        """Whether a gradient takes a random key."""
        return self.execution in NVFP4 and self.backward == "nvfp4" and self.stochastic_rounding

    @property
    def unquantised(self) -> "Numerics":
        """The same in BF16, for the layers that stay out."""
        return replace(self, execution="bf16") if self.execution in NVFP4 else self

    def quantized_names(self) -> tuple[str, ...]:
        """Names of the weights that run in NVFP4; empty unless the execution is a quantised one."""
        if self.execution not in NVFP4:
            return ()
        return MLP if self.layers == "mlp" else ATTENTION + MLP

    def execution_of(self, name: str) -> Execution:
        """Execution of the product with weight `name`: what is not quantised runs in BF16."""
        if self.execution in NVFP4 and (name not in self.quantized_names() or not self.quantize_activations):
            return "bf16"
        return self.execution

    def describe(self) -> str:
        """One line for the start-up summary."""
        split = f", sums in {self.split_k} runs" if self.split_k != 1 else ""
        if self.execution not in NVFP4:
            return self.execution + split
        weight, activation = self.weight, self.activation
        last = (
            f" of all but the last {self.high_precision_layers} layers" if self.high_precision_layers else ""
        )
        kind = "W4A4" if self.quantize_activations else "W4A16"
        room = "" if self.expert_capacity is None else f", experts' capacity {self.expert_capacity:g}"
        shared = ", fused shards share a scale" if self.fused_shards else ""
        if self.expert_scopes.weight == "layer":
            shared += ", experts too"
        scopes = self.expert_scopes.activation
        own = "" if scopes is None else f", of each {scopes}" if scopes == "expert" else ", of all experts"
        form = ", global scales joined as 1/(S·S)" if self.global_product == "encode" else ""
        return (
            f"NVFP4 {kind} {self.execution} on {'/'.join(self.quantized_names())}{last}; "
            f"weights {weight.tile} per {weight.scope} ({weight.rule}){shared}, "
            f"activations {activation.tile} per {activation.scope} ({activation.rule}){own}, "
            f"{self.backward} backward{room}{split}{form}; the rest BF16"
        )


def source_dtype(name: str, numerics: Numerics) -> jnp.dtype:
    """What a weight is rounded to before anything else happens to it."""
    exact = name in numerics.quantized_names() and numerics.weight_source == "float32"
    return jnp.dtype(jnp.float32) if exact else numerics.compute_dtype


def weight_of(leaf: Array | Operand, name: str, numerics: Numerics) -> Array | Operand:
    """A layer's weight as its product takes it; an operand as it is, the learner's master in the source dtype."""
    if isinstance(leaf, Operand):
        return leaf
    weight = leaf.astype(source_dtype(name, numerics))
    if name in numerics.quantized_names() and not numerics.quantize_activations:
        return _straight_through(weight, numerics)
    return weight


def fused_weight(
    leaves: Sequence[Array | Operand], name: str, numerics: Numerics
) -> Float[Array, "... N K"] | None:
    """Weights that share an input as one matrix, quantised with one scale; None where each has a product of its own.

    `name` is the first one's. A sampler's operands were quantised together already.
    """
    arrays = [leaf for leaf in leaves if not isinstance(leaf, Operand)]
    if (
        not numerics.fused_shards
        or name not in numerics.quantized_names()
        or len(arrays) < max(2, len(leaves))
    ):
        return None
    dtype = source_dtype(name, numerics)
    joined = weight_of(jnp.concatenate([leaf.astype(dtype) for leaf in arrays], axis=-2), name, numerics)
    assert not isinstance(joined, Operand)
    return joined


def _straight_through(weight: Float[Array, "... N K"], numerics: Numerics) -> Float[Array, "... N K"]:
    """The dequantised weight, with the gradient of the weight: its BF16 product has no quantiser of its own."""

    def rounded_to_codes(array: Array) -> Array:
        return dense(to_operand(array, numerics.weight))

    shared = numerics.expert_scopes.weight == "layer"
    rounded = rounded_to_codes(weight) if shared else _each_matrix(rounded_to_codes, weight)
    values = jax.lax.stop_gradient(rounded.astype(weight.dtype))
    return values + (weight - jax.lax.stop_gradient(weight))


def serving_params(params: Params, numerics: Numerics) -> Params:
    """Parameters as a sampler holds them: a tuple of layers, quantised weights as operands, the rest in compute dtype.

    Raises ValueError for a sampler's own, and for an execution that takes no operands.
    """
    if isinstance(params.layers, tuple):
        raise ValueError(
            "serving_params takes a learner's parameters, with stacked layers; these are a sampler's"
        )
    if numerics.execution in ("scaled_matmul", "te"):
        raise ValueError(
            f"the local sampler has no execution {numerics.execution!r}; accepted: float32, bf16, emulated"
        )
    if numerics.expert_capacity is not None:
        raise ValueError(
            f"the local sampler's experts have no limit: expert_capacity is {numerics.expert_capacity}; accepted: null"
        )
    masters: Any = params.layers
    # Copies, even where the dtype is right already: the learner gives its own buffers away at the next update.
    params = jax.tree.map(lambda leaf: jnp.array(leaf, numerics.compute_dtype, copy=True), params)
    layers: Any = params.layers
    source = masters if numerics.weight_source == "float32" else layers
    quantised = replace(layers, **_operands(source, numerics))
    count = layers.input_norm.shape[0]
    first_high = count - numerics.high_precision_layers
    return replace(
        params,
        layers=tuple(
            jax.tree.map(lambda leaf, i=i: leaf[i], quantised if i < first_high else layers)
            for i in range(count)
        ),
    )


def _operands(layers: LayerParams, numerics: Numerics) -> dict[str, Operand]:
    """Operands of the stacked weights that are quantised."""
    names = numerics.quantized_names()
    groups = [group for group in FUSED if numerics.fused_shards and set(group) <= set(names)]
    groups += [(name,) for name in names if not any(name in group for group in groups)]
    found: dict[str, Operand] = {}
    for group in groups:
        leaves = [getattr(layers, name) for name in group]
        joined = _quantised_layers(jnp.concatenate(leaves, axis=-2), numerics)
        start = 0
        for name, leaf in zip(group, leaves, strict=True):
            rows = slice(start, start + leaf.shape[-2])
            found[name] = _rows_of(joined, rows)
            start = rows.stop
    return found


def _quantised_layers(stack: Float[Array, "L *E N K"], numerics: Numerics) -> Operand:
    """Every layer's weight; global scales of each matrix, or where experts share them of each layer."""
    recipe = numerics.recipe
    if stack.ndim > 3:
        return jax.vmap(lambda experts: stacked_operand(experts, recipe))(stack)
    return _each_matrix(
        lambda matrix: to_operand(matrix, recipe.weight, keep_encode=recipe.keeps_encode), stack
    )


def _rows_of(joined: Operand, rows: slice) -> Operand:
    """The outputs of one weight among those that were quantised with it."""

    def part(leaf: Array) -> Array:
        # One scale per matrix, or one per row.
        return leaf if leaf.ndim < joined.values.ndim else leaf[..., rows, :]

    return jax.tree.map(part, joined)


def _each_matrix[Tree](function: Callable[[Array], Tree], stack: Array) -> Tree:
    """`function` of every matrix of a stack: each layer's and each expert's is a scope of its own."""
    for _ in range(stack.ndim - 2):
        function = jax.vmap(function)
    return function(stack)
