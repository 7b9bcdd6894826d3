"""Transformer Engine: what is refused before it is called, and what the call becomes, without a GPU.

Tracing, lowering and compiling need its pure-Python package only (`te_stand_in.py`); nothing here runs its kernels.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.nvfp4 import te_stand_in
from tests.tiny import tiny_config
from triage_jax import aot
from triage_jax.learner import Learner, LearnerConfig, MeshConfig
from triage_jax.model import Numerics
from triage_jax.nvfp4 import DotRecipe, QuantSpec, quantized_dot, te
from triage_jax.nvfp4.hadamard import SIGNS
from triage_jax.nvfp4.stacked import stacked_dot

NATIVE = DotRecipe(weight=QuantSpec(tile="16x16"), activation=QuantSpec(), backward="nvfp4")
PLAIN = replace(NATIVE, weight=QuantSpec(), hadamard=False, stochastic_rounding=False)
M, N, K = 256, 384, 512
X, W = jax.ShapeDtypeStruct((M, K), jnp.bfloat16), jax.ShapeDtypeStruct((N, K), jnp.bfloat16)
KEY = jax.eval_shape(lambda: jax.random.key(0))

needs_package = pytest.mark.skipif(
    te.installed_version() != te.VERSION,
    reason="runs once scripts/aot_packages.sh has made .aot (0.4 GB, no GPU needed), as it is in CI",
)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    te.load.cache_clear()
    yield
    te.load.cache_clear()


@pytest.fixture
def stand_in() -> Iterator[None]:
    with te_stand_in.installed():
        yield


@pytest.fixture(scope="session")
def compiler() -> None:
    if reason := aot.unavailable():
        pytest.skip(f"runs once scripts/aot_packages.sh has made .aot, as it is in CI: {reason}")
    te_stand_in.register_custom_calls()


def loss(x, w, key, recipe: DotRecipe):
    return jnp.sum(te.te_dot(x, w, recipe, key).astype(jnp.float32) ** 2)


def calls(recipe: DotRecipe) -> dict[str, list[str]]:
    """Attributes and operand types of every custom call of forward and gradient, lowered for CUDA."""
    gradient = jax.jit(jax.grad(lambda x, w, key: loss(x, w, key, recipe), (0, 1)))
    text = gradient.trace(X, W, KEY).lower(lowering_platforms=("cuda",)).as_text()
    found: dict[str, list[str]] = {}
    for name, rest in re.findall(r"custom_call @te_(\w+)_ffi(.*)", text):
        found.setdefault(name, []).append(rest)
    return found


def modes(quantizers: list[str]) -> Counter[tuple[int, bool, bool]]:
    """(scaling mode, rotated, stochastic) of each; 4 is 1x16 blocks, 5 is 16x16 tiles."""
    pattern = r"scaling_mode = (\d).*stochastic_rounding = (\w+), use_rht = (\w+)"
    found = [re.search(pattern, text).groups() for text in quantizers]
    return Counter((int(mode), rotated == "true", drawn == "true") for mode, drawn, rotated in found)


@needs_package
@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("tile", ["16x16", "1x16"])
@pytest.mark.parametrize("hadamard", [True, False])
@pytest.mark.parametrize("stochastic", [True, False])
def test_the_recipe_reaches_every_quantiser(tile, hadamard, stochastic):
    recipe = replace(NATIVE, weight=QuantSpec(tile=tile), hadamard=hadamard, stochastic_rounding=stochastic)
    found = calls(recipe)
    assert modes(found["dbias_quantize"]) == Counter(
        [(4, hadamard, False), (5 if tile == "16x16" else 4, False, False), (4, hadamard, stochastic)]
    )
    assert len(found.get("rht_amax", [])) == (2 if hadamard else 0)


@needs_package
@pytest.mark.usefixtures("stand_in")
def test_all_three_products_are_fp4():
    """fprop [M, N], dgrad [M, K], wgrad [K, N]: E2M1 codes and E4M3 scales in, BF16 out, each once."""
    products = calls(NATIVE)["gemm_v2"]
    shapes = [
        re.findall(r"tensor<(\d+)x(\d+)x(f4E2M1FN|bf16)>", text.rpartition(" : (")[2]) for text in products
    ]
    assert sorted(shapes) == sorted(
        [(str(a), str(k), "f4E2M1FN"), (str(b), str(k), "f4E2M1FN"), (str(a), str(b), "bf16")]
        for a, b, k in ((M, N, K), (M, K, N), (K, N, M))
    )
    for text in products:
        assert text.count("f8E4M3FN") == 2


@needs_package
@pytest.mark.usefixtures("stand_in")
def test_its_rotation_has_our_signs():
    """The mask's bit i is set where row i of the rotation is negated."""
    masks = {re.search(r"sign_mask_t = (\d+)", text).group(1) for text in calls(NATIVE)["rht_amax"]}
    assert masks == {str(sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0))}


@needs_package
@pytest.mark.parametrize("hadamard", [False, True])
def test_equals_the_emulated_product_and_gradient(hadamard, monkeypatch):
    """Its own pure-JAX operations, run on the CPU, against ours. They are spared one cast, a no-op on the grid of E4M3:
    `reduce_precision(x, 4, 3)` would make NaN of every block scale above 240."""
    reduce = jax.lax.reduce_precision

    def mended(x, exponent_bits, mantissa_bits):
        return x if x.dtype == jnp.float8_e4m3fn else reduce(x, exponent_bits, mantissa_bits)

    monkeypatch.setattr(jax.lax, "reduce_precision", mended)
    recipe = replace(PLAIN, hadamard=hadamard)
    shapes = ((64, 128), (256, 128), (64, 256))
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def compiled(dot):
        def run(x, w, g):
            y, pull = jax.vjp(dot, x, w)
            return y, *pull(g)

        return jax.jit(run).lower(*structs).compile()

    with te_stand_in.installed(pure=True), jax.numpy_rank_promotion("allow"):
        theirs = compiled(lambda x, w: te.te_dot(x, w, recipe))
    ours = compiled(lambda x, w: quantized_dot(x, w, recipe, "emulated"))
    rng = np.random.default_rng()
    equal = []
    for _ in range(4):
        args = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
        pairs = [
            (np.asarray(a, np.float32), np.asarray(b, np.float32))
            for a, b in zip(theirs(*args), ours(*args), strict=True)
        ]
        # Unrotated, dw would be 0.19 away.
        assert all(np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b) for a, b in pairs)
        equal.append([np.mean(a == b) for a, b in pairs])
    # Its scales are E4M3(S·(b/6)) where the kernels', and ours, are E4M3(b·(S/6)): in one draw out of forty, those
    # of many blocks round otherwise. All others agree in nearly every bit of y, dx and dw.
    assert np.all(np.max(equal, axis=0) > 0.99)


@needs_package
@pytest.mark.usefixtures("compiler", "stand_in")
def test_compiles_for_blackwell():
    compiled = aot.compile_for(
        jax.grad(lambda x, w, key: loss(x, w, key, NATIVE), (0, 1)), (X, W, KEY), aot.target_devices(aot.B200)
    )
    found = aot.custom_calls(compiled)
    assert {name: found[f"te_{name}_ffi"] for name in ("gemm_v2", "dbias_quantize", "rht_amax")} == {
        "gemm_v2": 3,
        "dbias_quantize": 3,
        "rht_amax": 2,
    }


@needs_package
@pytest.mark.usefixtures("compiler", "stand_in")
def test_compiles_over_eight_devices():
    """Rows split over all devices, weights over `fsdp`: gathered once, their gradient summed over devices."""
    mesh = Mesh(
        np.asarray(aot.target_devices(aot.B200, 8)).reshape(2, 4),
        ("data", "fsdp"),
        axis_types=(AxisType.Auto,) * 2,
    )
    recipe = replace(NATIVE, activation=QuantSpec(scope="shard", shards=8))

    def struct(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    key = jax.ShapeDtypeStruct((), KEY.dtype, sharding=NamedSharding(mesh, P()))
    args = struct((8, 64, K), P(("data", "fsdp"))), struct((N, K), P(None, "fsdp")), key
    with te.te_mesh(mesh):
        compiled = aot.compile_for(
            jax.grad(lambda *a: loss(*a, recipe), (0, 1)), args, tuple(mesh.devices.flat)
        )
    assert aot.custom_calls(compiled)["te_gemm_v2_ffi"] == 3
    found = aot.collectives(compiled)
    assert found["all-gather"] >= 1
    assert found["all-reduce"] + found["reduce-scatter"] >= 1


@needs_package
@pytest.mark.usefixtures("stand_in")
def test_vmap_is_refused():
    x, w = (jax.ShapeDtypeStruct((2, *s.shape), s.dtype) for s in (X, W))
    with pytest.raises(
        ValueError, match=r"te: under vmap; .* Use jax\.lax\.map, or execution 'scaled_matmul'"
    ):
        jax.eval_shape(jax.jit(jax.vmap(lambda x, w: te.te_dot(x, w, PLAIN))), x, w)
    out = jax.eval_shape(lambda x, w: jax.lax.map(lambda pair: te.te_dot(*pair, PLAIN), (x, w)), x, w)
    assert out.shape == (2, M, N)


@needs_package
def test_a_hopper_gpu_is_refused_and_a_blackwell_one_is_not():
    with te_stand_in.installed(90):
        assert "10.0 or higher required for NVFP4" in te.unavailable()
    te.load.cache_clear()
    with te_stand_in.installed(103):
        assert te.unavailable() is None


@needs_package
@pytest.mark.usefixtures("stand_in")
def test_each_device_scales_its_own_rows_and_the_recipe_must_say_so():
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    with te.te_mesh(mesh), pytest.raises(ValueError, match=r"on 4 device.*accepted 'shard' with shards 4"):
        jax.eval_shape(lambda x, w: te.te_dot(x, w, PLAIN), X, W)
    split = replace(PLAIN, activation=QuantSpec(scope="shard", shards=4))
    with te.te_mesh(mesh):
        jax.eval_shape(lambda x, w: te.te_dot(x, w, split), X, W)
    with pytest.raises(ValueError, match=r"on 1 device.*accepted 'tensor'"):
        jax.eval_shape(lambda x, w: te.te_dot(x, w, split), X, W)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"activation": QuantSpec(scope="row")},
            "activation.scope is 'row'.*row scaling is not wired in JAX",
        ),
        ({"activation": QuantSpec(scope="static", static_amax=1.0)}, "activation.scope is 'static'"),
        ({"activation": QuantSpec(tile="16x16")}, "activation.tile is '16x16'"),
        (
            {"activation": QuantSpec(four_over_six="mae")},
            "activation.four_over_six is 'mae', which would be ignored",
        ),
        ({"activation": QuantSpec(nan="six")}, "activation.nan is 'six', which would be ignored"),
        ({"weight": QuantSpec(scope="row")}, "weight.scope is 'row'"),
        ({"weight": QuantSpec(rule="modelopt")}, "weight.rule is 'modelopt', accepted 'te'"),
        ({"weight": QuantSpec(chain="decode")}, "weight.chain is 'decode'"),
        ({"gradient": QuantSpec(scope="row")}, "gradient.scope is 'row'"),
        ({"backward": "bf16"}, "backward is 'bf16', accepted 'nvfp4'"),
        ({"backward": "dequantized"}, "backward_override is ignored"),
    ],
)
def test_what_it_would_ignore_is_refused(change, message):
    te.check_recipe(NATIVE)
    with pytest.raises(ValueError, match=f"(?s)^te: .*{message}.*; execution 'scaled_matmul' can$"):
        te.check_recipe(replace(NATIVE, **change))


@pytest.mark.parametrize(
    ("sizes", "recipe", "devices", "message"),
    [
        ((96, 128, 128), NATIVE, 1, r"rows \(tokens\) = 96, accepted multiples of 64 with hadamard"),
        ((192, 128, 128), NATIVE, 2, r"= 192, accepted multiples of 128 \(64 on each of 2 devices\)"),
        ((64, 192, 128), NATIVE, 1, "N = 192, accepted multiples of 128"),
        ((64, 128, 64), NATIVE, 1, "K = 64, accepted multiples of 128"),
        ((48, 32, 32), PLAIN, 1, "= 48, accepted multiples of 32 without hadamard"),
        ((32, 48, 32), PLAIN, 1, "N = 48"),
        ((32, 32, 16), PLAIN, 1, "K = 16"),
    ],
)
def test_sizes_it_has_no_kernel_for_are_refused(sizes, recipe, devices, message):
    with pytest.raises(ValueError, match=message):
        te.check_sizes(*sizes, recipe, devices)


def test_sizes_it_has_kernels_for_pass():
    te.check_sizes(64, 128, 256, NATIVE)
    te.check_sizes(128, 128, 256, NATIVE, 2)
    te.check_sizes(32, 96, 160, PLAIN)


@pytest.mark.usefixtures("unchecked")
def test_operands_it_cannot_take_are_refused():
    x, w = jnp.zeros((64, 128), jnp.bfloat16), jnp.zeros((128, 128), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"w has shape \(2, 128, 128\).*no grouped NVFP4.*'scaled_matmul' can multiply"
    ):
        te.te_dot(x, jnp.stack([w, w]), NATIVE, jax.random.key(0))
    with pytest.raises(ValueError, match="must be bfloat16, got float32 and bfloat16"):
        te.te_dot(x.astype(jnp.float32), w, NATIVE, jax.random.key(0))
    with pytest.raises(ValueError, match="stochastic_rounding needs a random key"):
        te.te_dot(x, w, NATIVE)


def test_absence_is_said_plainly(monkeypatch):
    def absent(_: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", absent)
    assert te.installed_version() is None
    with pytest.raises(
        te.TransformerEngineError, match=r"is not installed: pip install .*'scaled_matmul' can do without"
    ):
        te.load()
    assert "is not installed" in te.unavailable()


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: "2.19.0")
    with pytest.raises(te.TransformerEngineError, match=r"2\.19\.0 is installed, 2\.20\.2 is needed"):
        te.load()


@needs_package
def test_a_package_without_its_libraries_says_what_is_missing():
    """The Python package alone, as pip leaves it without the extra [jax]."""
    with pytest.raises(
        te.TransformerEngineError, match=r"cannot be imported \(\w+: .*'scaled_matmul' can do without"
    ):
        te.load()


@needs_package
@pytest.mark.usefixtures("stand_in")
def test_experts_are_multiplied_one_after_the_other():
    """A loop whose body holds the three products once, forward and gradient, whatever the number of experts."""
    x, w = (jax.ShapeDtypeStruct((8, *s.shape), s.dtype) for s in (X, W))

    def loss(x, w, key):
        return jnp.sum(stacked_dot(x, w, NATIVE, "te", key).astype(jnp.float32) ** 2)

    assert jax.eval_shape(partial(stacked_dot, recipe=NATIVE, execution="te"), x, w, key=KEY).shape == (
        8,
        M,
        N,
    )
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(x, w, KEY)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @te_gemm_v2_ffi") == 3


@needs_package
@pytest.mark.usefixtures("compiler", "stand_in")
def test_an_update_of_experts_compiles_over_eight_devices():
    """gate, up and down, again for the gradient but for what it does not need, and two gradients of each."""
    learner = Learner(
        model=tiny_config(
            architecture="qwen3_moe",
            num_experts=8,
            experts_per_token=2,
            hidden_size=128,
            intermediate_size=256,
            num_heads=8,
            num_kv_heads=2,
            vocab_size=512,
        ),
        numerics=Numerics(
            execution="te",
            expert_capacity=2.0,
            activation=QuantSpec(scope="shard", shards=8),
            weight=QuantSpec(tile="16x16"),
            backward="nvfp4",
        ),
        settings=LearnerConfig(mesh=MeshConfig(data=2, fsdp=4)),
    )
    mesh = aot.target_mesh(aot.B200, learner.settings.mesh)
    with te.te_mesh(mesh):
        compiled = aot.compile_update(learner, aot.B200, rows=8, prompt_tokens=32, new_tokens=96)
    assert aot.custom_calls(compiled)["te_gemm_v2_ffi"] == 12
    assert "all-to-all" not in aot.collectives(compiled)
