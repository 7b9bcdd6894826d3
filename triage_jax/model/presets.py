"""Numerics by name: what the frameworks and servers of the field compute (numerics.md §0.3, §1, §2)."""

from triage_jax.model.numerics import Numerics
from triage_jax.nvfp4 import QuantSpec
from triage_jax.nvfp4.spec import ExpertScopes

PRESETS: dict[str, Numerics] = {
    "bf16": Numerics(execution="bf16"),
    # Transformer Engine's NVFP4BlockScaling: every linear layer, 2-D weights, one scale per tensor (each expert is
    # one), FP4 gradients.
    "te_default": Numerics(
        layers="linear",
        weight=QuantSpec(tile="16x16"),
        expert_scopes=ExpertScopes(activation="expert"),
        backward="nvfp4",
        stochastic_rounding=True,
        hadamard=True,
    ),
    # The learner of the reported runs: 1-D scaling of the MLPs, Hadamard and stochastic rounding on.
    "triage_reported": Numerics(backward="nvfp4", stochastic_rounding=True, hadamard=True),
    # A ModelOpt checkpoint with input_scale 1: a static range of 2688, block scales at run time.
    "modelopt_static": Numerics(
        weight=QuantSpec(rule="modelopt"),
        activation=QuantSpec(scope="static", static_amax=2688.0, rule="flashinfer"),
        fused_shards=True,
    ),
    # The same checkpoint with one activation scale per token, exact quantiser maths.
    "sglang_per_token": Numerics(
        weight=QuantSpec(rule="modelopt"),
        activation=QuantSpec(scope="row", rule="flashinfer"),
        fused_shards=True,
    ),
    # SGLang's own quantisation at load: 4-over-6 by squared error; activations per token.
    "nvfp4_online": Numerics(
        weight=QuantSpec(four_over_six="mse"),
        activation=QuantSpec(scope="row", rule="flashinfer"),
        fused_shards=True,
        hidden_rounding="none",
    ),
    # Both sides alike: 1-D weights with shared scales, per-token activations, gradients by the forward's operands.
    "parity": Numerics(
        activation=QuantSpec(scope="row"),
        fused_shards=True,
        backward="dequantized",
        stochastic_rounding=False,
        hadamard=False,
    ),
}
