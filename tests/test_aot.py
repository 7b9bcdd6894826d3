"""Programs compiled for GPUs that are not here: FP4 products where the hardware has them, collectives, memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scripts.aot_memory import MODELS, measure, parse, show
from tests.tiny import tiny_config
from triage_jax import aot
from triage_jax.learner import Learner, LearnerConfig, MeshConfig
from triage_jax.model import Numerics
from triage_jax.model.params import abstract_params
from triage_jax.nvfp4 import DotRecipe, QuantSpec, quantize, quantized_dot
from triage_jax.nvfp4.native import block_scaled_product

FP4 = "__cudnn$blockScaledDot"
QUICK = {"xla_gpu_autotune_level": "0"}
"""Without a device there is nothing to time"""
ROW = QuantSpec(scope="row")
NATIVE = DotRecipe(weight=QuantSpec(), activation=ROW, backward="nvfp4", stochastic_rounding=False)


@pytest.fixture(scope="session")
def compiler() -> None:
    if reason := aot.unavailable():
        pytest.skip(f"runs once scripts/aot_packages.sh has made .aot, as it is in CI: {reason}")


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def product(x, w):
    return block_scaled_product(quantize(x, ROW), quantize(w, QuantSpec()))


def compiled_product(target: aot.GpuTarget, *shapes: jax.ShapeDtypeStruct):
    args = shapes or (struct(256, 512), struct(384, 512))
    return aot.compile_for(product, args, aot.target_devices(target), QUICK)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("target", [aot.B200, aot.B300])
def test_one_fp4_product_on_blackwell(target):
    assert aot.custom_calls(compiled_product(target))[FP4] == 1


@pytest.mark.usefixtures("compiler")
def test_the_same_program_dequantises_on_hopper():
    compiled = compiled_product(aot.H200)
    assert FP4 not in aot.custom_calls(compiled)
    text = compiled.as_text()
    assert "f4e2m1fn" in text
    assert " dot(" in text or "__cublas" in text


@pytest.mark.usefixtures("compiler")
def test_a_stack_of_experts_is_one_product():
    assert aot.custom_calls(compiled_product(aot.B200, struct(8, 64, 256), struct(8, 128, 256)))[FP4] == 1


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("cudnn", "products"), [("", 0), ("9.9.0", 0), ("9.10.0", 1)])
def test_an_old_cudnn_dequantises_in_silence(cudnn, products):
    """What the doctor's smallest cuDNN rests on."""
    assert aot.custom_calls(compiled_product(replace(aot.B200, cudnn=cudnn)))[FP4] == products


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("backward", "products"), [("nvfp4", 3), ("bf16", 1)])
def test_forward_and_gradient(backward, products):
    """fprop, dgrad and wgrad, the last on rotated operands; or the forward product alone."""
    recipe = replace(NATIVE, backward=backward)

    def loss(x, w):
        return jnp.sum(quantized_dot(x, w, recipe, "scaled_matmul").astype(jnp.float32) ** 2)

    args = struct(256, 512), struct(384, 512)
    compiled = aot.compile_for(jax.grad(loss, (0, 1)), args, aot.target_devices(aot.B200), QUICK)
    assert aot.custom_calls(compiled)[FP4] == products


@pytest.mark.usefixtures("compiler")
def test_experts_over_eight_devices():
    """Two experts on each of four devices, rows over two: no collective but the scope's maximum."""
    mesh = Mesh(
        np.asarray(aot.target_devices(aot.B200, 8)).reshape(4, 2),
        ("expert", "row"),
        axis_types=(AxisType.Auto,) * 2,
    )
    x, w = (
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec))
        for s, spec in ((struct(8, 64, 256), P("expert", "row")), (struct(8, 128, 256), P("expert")))
    )
    compiled = aot.compile_for(product, (x, w), tuple(mesh.devices.flat), QUICK)
    assert aot.custom_calls(compiled)[FP4] == 1
    assert set(aot.collectives(compiled)) == {"all-reduce"}


EXPERTS = {"architecture": "qwen3_moe", "num_experts": 8, "experts_per_token": 2, "norm_topk_prob": True}
COLLECTIVES = {"all-gather", "reduce-scatter", "all-reduce"}
ROWS, PROMPT, RESPONSE = 16, 32, 96


def learner(numerics: Numerics, **model) -> Learner:
    """Two kv heads, which do not divide over the four devices that share the parameters."""
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 8,
        "num_kv_heads": 2,
        "vocab_size": 512,
    }
    return Learner(
        model=tiny_config(**(sizes | model)),
        numerics=numerics,
        settings=LearnerConfig(micro_batch=8, mesh=MeshConfig(data=2, fsdp=4)),
    )


def compiled_update(learner: Learner):
    return aot.compile_update(
        learner, aot.B200, rows=ROWS, prompt_tokens=PROMPT, new_tokens=RESPONSE, options=QUICK
    )


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("execution", "products"),
    [
        ("scaled_matmul", 7),
        pytest.param("emulated", 0, marks=pytest.mark.slow),
        pytest.param("bf16", 0, marks=pytest.mark.slow),
    ],
)
def test_an_update_over_eight_gpus(execution, products):
    """Four products a layer, q/k/v and gate/up joined; recomputed for the gradient, but the last, whose result it
    never uses. Rows stay where they are: weights are gathered, gradients summed, and nothing else travels.
    """
    made = learner(Numerics(execution=execution, layers="linear", activation=ROW, fused_shards=True))
    compiled = compiled_update(made)
    assert aot.custom_calls(compiled)[FP4] == products
    found = aot.collectives(compiled)
    assert set(found) <= COLLECTIVES
    assert found["all-gather"] > 0  # a layer's weights
    assert found["reduce-scatter"] + found["all-reduce"] > 0  # their gradient
    memory = aot.device_memory(compiled)
    # Float32 weights and two moments over four devices; tokens, masks and two log-probabilities over eight.
    model = made.model
    matrices = 512 * 128 + 2 * (128 * (2 * 128 + 2 * 32) + 3 * 128 * 256)
    batch = ROWS * ((PROMPT + RESPONSE) * (4 + 1) + RESPONSE * (1 + 4 + 4) + 4) / 8
    assert model.num_layers == 2
    assert memory["arguments"] == pytest.approx(12 * matrices / 4 + batch, rel=0.05)
    assert memory["total"] == sum(size for name, size in memory.items() if name != "total")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("backward", "products"), [("dequantized", 4), pytest.param("nvfp4", 8, marks=pytest.mark.slow)]
)
def test_experts_of_an_update_over_eight_gpus(backward, products):
    """gate/up and down, and again for the gradient; with FP4 gradients two more of each. No row leaves its device."""
    numerics = Numerics(
        execution="scaled_matmul",
        expert_capacity=2.0,
        fused_shards=True,
        backward=backward,
        stochastic_rounding=False,
    )
    compiled = compiled_update(learner(numerics, **EXPERTS))
    assert aot.custom_calls(compiled)[FP4] == products
    assert set(aot.collectives(compiled)) <= COLLECTIVES


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-30b-a3b"])
def test_an_update_of_a_whole_model_fits_eight_b300s(name, capsys):
    """No weights, no device: what the compiled program says that each GPU needs."""
    config = f"configs/{name.replace('-', '_')}_nvfp4.yaml"
    report = measure(parse([config, "--model", name, "--target", "b300"]))
    with capsys.disabled():
        show(report)
    assert report["target"].startswith("8 x ")
    assert FP4 in report["library_calls"]
    parts = report["bytes_per_device"]
    # At least its eighth of master weights and two moments, in float32.
    parameters = sum(leaf.size for leaf in jax.tree.leaves(abstract_params(MODELS[name], jnp.float32)))
    assert 12 * parameters / 8 < parts["total"] < report["device_bytes"]


def test_a_missing_compiler_is_named(monkeypatch):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda\nand more")

    monkeypatch.setattr(aot.topologies, "get_topology_desc", missing)
    target = replace(aot.H200, name="H200 of this test")
    with pytest.raises(
        aot.AotError, match=rf"\(topology not implemented for cuda\).*jax-cuda13-pjrt=={jax.__version__}"
    ):
        aot.target_devices(target, 2)


def test_a_missing_ptxas_is_named():
    class Lowered:
        def compile(self, compiler_options):
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: No PTX compilation provider is available. Neither")

    def fn():
        """A function that looks jitted."""

    fn.lower = Lowered
    with pytest.raises(aot.AotError, match="nvidia-cuda-nvcc"):
        aot.compile_for(fn, (), jax.devices())


def test_collectives_and_calls_are_read_off_the_program():
    class Program(jax.stages.Compiled):
        def __init__(self) -> None:
            """Nothing was compiled."""

        def as_text(self) -> str:
            return """
            %a = f32[8] all-gather-start(%x), %b = f32[8] all-gather-done(%a), %c = f32[8]{0} all-reduce(%b)
            %d = f32[8]{0} ragged-all-to-all(%c), %e = f32[8]{0} all-to-all(%d)
            %f = f32[8] custom-call(%e), custom_call_target="__cudnn$blockScaledDot"
            """

    assert aot.collectives(Program()) == {
        "all-gather": 1,
        "all-reduce": 1,
        "ragged-all-to-all": 1,
        "all-to-all": 1,
    }
    assert aot.custom_calls(Program()) == {FP4: 1}


@pytest.mark.parametrize("target", aot.TARGETS.values())
def test_descriptions_are_well_formed(target):
    """Braces in pairs, and what XLA decides the FP4 product by."""
    text = target.description()
    assert text.count("{") == text.count("}") == 2
    major, minor = target.compute_capability
    assert f"cuda_compute_capability {{ major: {major} minor: {minor} }}" in text
    assert 'dnn_version: "9.28.0"' in text
