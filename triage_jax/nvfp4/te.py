"""NVFP4 products by NVIDIA's Transformer Engine, imported when first used.

Its JAX side at this version is narrower than our recipes, and ignores in silence what it cannot do. Everything it
would ignore or trip over is refused here before it is called. Source: transformer_engine/jax of release 2.20.2
(dense.py, quantize/helper.py, cpp_extensions/{amax,gemm,quantization}.py).
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh
from jaxtyping import Array, BFloat16

from triage_jax.nvfp4.experts import check_experts
from triage_jax.nvfp4.spec import DotRecipe, QuantSpec
from triage_jax.nvfp4.split import split_of

VERSION = "2.20.2"
ELSEWHERE = "execution 'scaled_matmul' can"


class TransformerEngineError(RuntimeError):
    """Transformer Engine cannot be used here: the message says why, and what else computes the same."""


def te_dot(
    x: BFloat16[Array, "... K"], w: BFloat16[Array, "N K"], recipe: DotRecipe, key: Array | None = None
) -> BFloat16[Array, "... N"]:
    """x · wᵀ with x, w and both gradients' products in NVFP4, on Blackwell GPUs.

    `key` feeds the gradient's stochastic rounding, where the recipe has it; the same key rounds alike. On several
    devices, forward and gradient must be traced inside `te_mesh(mesh)`, and the activation's scope must be "shard":
    each device scales its own rows. Raises ValueError for a recipe, shape or transform that Transformer Engine lacks,
    TransformerEngineError where it cannot be used at all.
    """
    check_recipe(recipe)
    if w.ndim != 2:
        raise ValueError(
            f"te: w has shape {w.shape}; Transformer Engine {VERSION} has no grouped NVFP4 product in JAX, "
            f"{ELSEWHERE} multiply a stack [experts, N, K] at once"
        )
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
        raise ValueError(f"te: x and w must be bfloat16, got {x.dtype} and {w.dtype}")
    if recipe.stochastic_rounding and key is None:
        raise ValueError("te: a recipe with stochastic_rounding needs a random key")
    engine = load()
    devices = engine.mesh_devices()
    check_shards(recipe, devices)
    check_sizes(x.size // x.shape[-1], w.shape[0], w.shape[1], recipe, devices)
    # Transformer Engine wants [K, N], and stores what it quantised of it as [N, K].
    kernel = jnp.swapaxes(_unbatched(w), 0, 1)
    return engine.dense(
        _unbatched(x),
        kernel,
        contracting_dims=((x.ndim - 1,), (0,)),
        quantizer_set=engine.quantizers(recipe, key if recipe.stochastic_rounding else None, devices),
    )


def check_recipe(recipe: DotRecipe) -> None:
    """Raises ValueError for every setting that Transformer Engine would ignore or cannot follow."""
    specs = {"activation": recipe.activation, "weight": recipe.weight, "gradient": recipe.gradient}
    scopes = {"activation": ("tensor", "shard"), "weight": ("tensor",), "gradient": ("tensor",)}
    for name, spec in specs.items():
        where = f"te: {name}"
        if spec.scope not in scopes[name]:
            accepted = " or ".join(map(repr, scopes[name]))
            reason = "; row scaling is not wired in JAX" if spec.scope == "row" else ""
            raise ValueError(f"{where}.scope is {spec.scope!r}, accepted {accepted}{reason}; {ELSEWHERE}")
        if spec.rule != "te":
            raise ValueError(f"{where}.rule is {spec.rule!r}, accepted 'te'; {ELSEWHERE}")
        for field in ("chain", "scale_floor", "four_over_six"):
            if (value := getattr(spec, field)) is not None:
                raise ValueError(f"{where}.{field} is {value!r}, which would be ignored; {ELSEWHERE}")
        if spec.nan != "spread":
            raise ValueError(f"{where}.nan is {spec.nan!r}, which would be ignored; {ELSEWHERE}")
        if spec.tile == "16x16" and name != "weight":
            raise ValueError(
                f"{where}.tile is '16x16', accepted '1x16': only weights have tiles; {ELSEWHERE}"
            )
    if recipe.backward != "nvfp4":
        raise ValueError(
            f"te: backward is {recipe.backward!r}, accepted 'nvfp4': Transformer Engine's backward_override is ignored "
            f"in JAX; {ELSEWHERE}"
        )
    split_of(recipe, "te")
    check_experts(recipe, "te")
    if recipe.global_product != "decode":
        raise ValueError(
            f"te: global_product is {recipe.global_product!r}, accepted 'decode': Transformer Engine multiplies the "
            f"decode scales; {ELSEWHERE}"
        )


def check_shards(recipe: DotRecipe, devices: int) -> None:
    """Raises ValueError unless the activation's scope says how many devices scale their own rows."""
    spec: QuantSpec = recipe.activation
    declared = spec.shards if spec.scope == "shard" else 1
    if declared != devices:
        accepted = "'tensor'" if devices == 1 else f"'shard' with shards {devices}"
        raise ValueError(
            f"te: activation.scope is {spec.scope!r} with {declared} shard(s) on {devices} device(s), accepted "
            f"{accepted}: each device takes the largest magnitude of its own rows, {ELSEWHERE} take one over all"
        )


def check_sizes(rows: int, outputs: int, inputs: int, recipe: DotRecipe, devices: int = 1) -> None:
    """Raises ValueError unless rows (tokens), N and K fit the kernels of all three products."""
    rows_step, features_step = (64, 128) if recipe.hadamard else (32, 32)
    for name, size, step in (
        ("rows (tokens)", rows, rows_step * devices),
        ("N", outputs, features_step),
        ("K", inputs, features_step),
    ):
        if size % step:
            per = (
                f" ({rows_step} on each of {devices} devices)" if step != rows_step and "rows" in name else ""
            )
            why = "with" if recipe.hadamard else "without"
            raise ValueError(
                f"te: {name} = {size}, accepted multiples of {step}{per} {why} hadamard; pad, or {ELSEWHERE} take it"
            )


@contextlib.contextmanager
def te_mesh(mesh: Mesh) -> Iterator[None]:
    """Tell Transformer Engine of the mesh, axes `data` and `fsdp`; both split rows, `fsdp` splits weights too."""
    engine = load()
    resource = engine.mesh_resource(dp_resource="data", fsdp_resource="fsdp")
    with jax.set_mesh(mesh), engine.shard_guard(resource):
        yield


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What is used of Transformer Engine."""

    dense: Callable[..., Array]
    mesh_devices: Callable[[], int]
    mesh_resource: Callable[..., Any]
    shard_guard: Callable[..., contextlib.AbstractContextManager[Any]]
    supported: Callable[[], tuple[bool, str]]
    recipes: Any
    quantize: Any

    def quantizers(self, recipe: DotRecipe, key: Array | None, devices: int) -> Any:
        """The quantizer set of one dense layer; gradients are rounded at random if there is a key."""
        settings = self.recipes.NVFP4BlockScaling(
            disable_rht=not recipe.hadamard,
            disable_stochastic_rounding=key is None,
            disable_2d_quantization=recipe.weight.tile == "1x16",
        )
        meta, gradient = self.quantize.QuantizeMeta, {}
        if key is not None:
            gradient["stochastic_rounding_rng_state"] = jax.random.bits(key, (devices, 4), jnp.uint32)
        return self.quantize.QuantizerFactory.create_set(
            fp8_recipe=settings,
            quantize_meta_set=self.quantize.QuantizeMetaSet(
                x=meta(use_rht=recipe.hadamard),
                kernel=meta(),
                grad=meta(use_rht=recipe.hadamard, **gradient),
            ),
        )


@cache
def load() -> Engine:
    """Import Transformer Engine. Raises TransformerEngineError with what is missing."""
    found = installed_version()
    if found is None:
        raise TransformerEngineError(
            f"Transformer Engine is not installed: pip install --no-build-isolation transformer-engine[jax]=={VERSION} "
            f"into an environment that has jax[cuda13]; {ELSEWHERE} do without"
        )
    if found != VERSION:
        raise TransformerEngineError(
            f"Transformer Engine {found} is installed, {VERSION} is needed: what it ignores differs between versions"
        )
    try:
        quantize, dense, sharding, recipes = (
            importlib.import_module(f"transformer_engine.{name}")
            for name in ("jax.quantize", "jax.dense", "jax.sharding", "common.recipe")
        )
    except (ImportError, OSError, RuntimeError) as error:
        raise TransformerEngineError(
            f"Transformer Engine {found} cannot be imported ({type(error).__name__}: {error}); {ELSEWHERE} do without"
        ) from error
    mode = quantize.ScalingMode.NVFP4_1D_SCALING
    return Engine(
        dense=dense.dense,
        mesh_devices=lambda: int(sharding.get_num_devices_in_mesh()),
        mesh_resource=sharding.MeshResource,
        shard_guard=sharding.global_shard_guard,
        supported=lambda: quantize.is_scaling_mode_supported(mode),
        recipes=recipes,
        quantize=quantize,
    )


def installed_version() -> str | None:
    """Version of the package, without importing it."""
    try:
        return metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return None


def unavailable() -> str | None:
    """Why `te_dot` cannot run on this machine's devices; None where it can."""
    try:
        works, reason = load().supported()
    except TransformerEngineError as error:
        return str(error)
    return None if works else f"Transformer Engine: {reason}"


def _unbatched(x: Array) -> Array:
    """x, and a plain error under `vmap` in place of Transformer Engine's obscure one."""
    return _unbatched_p.bind(x)


def _refuse_vmap(args: Any, axes: Any, **_: Any) -> Any:
    raise ValueError(
        f"te: under vmap; Transformer Engine {VERSION} has no batched NVFP4 product in JAX. Use jax.lax.map, or "
        f"{ELSEWHERE} be vmapped"
    )


_unbatched_p = Primitive("te_unbatched")
_unbatched_p.def_impl(lambda x: x)
_unbatched_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_unbatched_p, lambda _, x: [x])
ad.deflinear2(_unbatched_p, lambda cotangent, _: [cotangent])
batching.primitive_batchers[_unbatched_p] = _refuse_vmap
