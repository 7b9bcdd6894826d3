"""Model directories whose weights are stored in NVFP4: read for sampling or training, written for a refit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from triage_jax.model.config import ModelConfig, ModelError
from triage_jax.model.load import (
    EMBED,
    EXPERT,
    FINAL_NORM,
    HEAD,
    LAYER,
    WeightFiles,
    layer_tensors,
    load_config,
    read_json,
    tensor_names,
)
from triage_jax.model.numerics import Numerics
from triage_jax.model.params import LayerParams, Leaf, Params, abstract_params
from triage_jax.model.save import atomic_directory, copy_tokenizer, write_json
from triage_jax.model.selection import WEIGHT, grouped, ignored_modules, over_experts
from triage_jax.model.stream import write_configs, write_quantized
from triage_jax.model.tensors import Stored
from triage_jax.nvfp4 import Operand, QuantizedTensor, dequantize, from_quantized
from triage_jax.nvfp4.checkpoint import CODES, INPUT, STORABLE_SCOPES, from_tensors, layout_of, tensors_of

TOP = {"embed": EMBED, "final_norm": FINAL_NORM, "lm_head": HEAD}
FORMATS = "ModelOpt NVFP4 and compressed-tensors nvfp4-pack-quantized"
_IGNORED = (*INPUT.values(), ".k_scale", ".v_scale", "rotary_emb.inv_freq")
"""Scales of activations and of an FP8 cache: `Numerics` decides about both"""

type Weight = QuantizedTensor | np.ndarray
type Read = Callable[[str], Weight]


def load_quantized(path: str | Path) -> tuple[Params, ModelConfig]:
    """A sampler's parameters, as `serving_params` makes them, from the stored codes; and the model's settings.

    Reads ModelOpt's NVFP4 layout and compressed-tensors' `nvfp4-pack-quantized`. Quantised weights become operands, bit
    for bit what quantising in memory gives; the rest is BF16. Stored activation scales are not used. Raises ModelError
    naming file and tensor for anything missing, unexpected, misshapen or not finite, and for another quantisation.
    """
    layers: list[LayerParams] = []
    with _opened(path) as (config, read):
        for _, tensors in groupby(layer_tensors(config), key=lambda tensor: tensor[2][0]):
            leaves: dict[str, list[Operand | jax.Array]] = {}
            for name, field, _ in tensors:
                leaves.setdefault(field, []).append(_operand(read(name)))
            layers.append(LayerParams(**{field: _leaf(leaves.get(field), config, field) for field in LAYER}))
        top = {field: _operand(read(name)) for field, name in _top(config).items()}
    return Params(layers=tuple(layers), **{"lm_head": None, **top}), config


def load_dequantized(path: str | Path, dtype: DTypeLike = jnp.float32) -> tuple[Params, ModelConfig]:
    """A learner's parameters from the same directory: weights (code · block scale) · global scale, in `dtype`."""
    with _opened(path) as (config, read):
        shapes: Any = abstract_params(config, dtype)
        leaves: dict[str, np.ndarray] = {}
        for name, field, place in layer_tensors(config):
            if field not in leaves:
                leaves[field] = np.empty(getattr(shapes.layers, field).shape, dtype)
            leaves[field][place] = np.asarray(_floats(read(name), dtype))
        layers = LayerParams(
            **{field: jnp.asarray(leaves.pop(field)) if field in leaves else None for field in LAYER}
        )
        top = {field: _floats(read(name), dtype) for field, name in _top(config).items()}
    return Params(layers=layers, **{"lm_head": None, **top}), config


def served(params: Params, numerics: Numerics) -> Params:
    """A sampler's parameters as they are, checked to hold the operands that `serving_params` would make.

    A BF16 or float32 execution multiplies operands with activations that are not quantised, as servers do on devices
    without NVFP4 products, and is not checked. Raises ModelError naming the first layer and weight that differ.
    """
    if not isinstance(params.layers, tuple):
        raise ModelError("served takes a sampler's parameters, as load_quantized makes them, not a learner's")
    if numerics.execution in ("bf16", "float32"):
        return params
    for index, layer in enumerate(params.layers):
        quantised = index < len(params.layers) - numerics.high_precision_layers
        expected = numerics.quantized_names() if quantised else ()
        for field in LAYER:
            stored = isinstance(getattr(layer, field), Operand)
            if stored != (field in expected):
                raise ModelError(
                    f"layer {index}, {field}: the checkpoint holds it {'in NVFP4' if stored else 'unquantised'}, the "
                    f"numerics quantise {'/'.join(expected) or 'nothing'} of this layer; both must be the same"
                )
    return params


def save_quantized(
    path: str | Path,
    params: Params,
    config: ModelConfig,
    numerics: Numerics,
    *,
    for_servers: bool = True,
    input_scale: float = 1.0,
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write a learner's parameters in ModelOpt's layout, with the codes that `numerics` multiplies in its forward pass.

    A 16×16 tile's scale is repeated over its rows, which is a legal scale of 1×16 blocks, so a server multiplies the
    very same numbers (numerics.md §0.4). Servers run q/k/v and gate/up as one product with one global scale; where the
    numerics keep those apart, `for_servers` refuses to write what a server would read as other weights, and only
    `load_quantized` may have the file. Weights are quantised group by group. The directory appears complete or not at
    all. Raises as `save_model` does, and ModelError where `numerics` quantise nothing or ask for global scales that the
    layout has no place for.
    """
    check_storable(numerics, for_servers=for_servers)
    leaves = _leaves(params, config)
    count = config.num_layers - numerics.high_precision_layers
    modules = [
        name.removesuffix(WEIGHT)
        for name, field, place in layer_tensors(config)
        if field in numerics.quantized_names() and place[0] < count
    ]
    if not modules:
        raise ModelError(
            f"numerics.high_precision_layers is {numerics.high_precision_layers} of {config.num_layers} layers: "
            "nothing is quantised; use save_model"
        )
    groups = grouped(modules) if numerics.fused_shards else [(module,) for module in modules]
    if numerics.expert_scopes.weight == "layer":
        groups = over_experts(groups)
    shapes = {name: leaf.shape[len(place) :] for name, (leaf, place) in leaves.items()}
    masters = {module + WEIGHT for module in modules} if numerics.weight_source == "float32" else set()

    def read(name: str) -> jax.Array:
        leaf, place = leaves[name]
        return jnp.asarray(leaf[place], jnp.float32 if name in masters else jnp.bfloat16)

    with atomic_directory(path, overwrite=overwrite) as directory:
        write_quantized(
            directory,
            {name: Stored("BF16", shape) for name, shape in shapes.items()},
            groups,
            read,
            numerics.weight,
            input_scale=input_scale,
            max_shard_bytes=max_shard_bytes,
            weight_dtype=jnp.float32 if masters else jnp.bfloat16,
        )
        write_configs(directory, config.to_hf(), ignored_modules(shapes, groups))
        write_json(directory / "generation_config.json", config.generation_to_hf())
        if tokenizer_from is not None:
            copy_tokenizer(Path(tokenizer_from), directory)


def check_storable(numerics: Numerics, *, for_servers: bool = True) -> None:
    """Raise ModelError unless ModelOpt's layout holds what `numerics` multiply, as servers read it."""
    names, scope = numerics.quantized_names(), numerics.weight.scope
    if not names:
        raise ModelError(
            f"numerics.execution is {numerics.execution!r}: nothing is quantised; use save_model"
        )
    if scope not in STORABLE_SCOPES:
        raise ModelError(
            f"numerics.weight.scope is {scope!r}: a checkpoint stores one global scale per weight; "
            f"accepted are {', '.join(STORABLE_SCOPES)}"
        )
    if for_servers and not numerics.fused_shards and scope != "static":
        raise ModelError(
            "numerics.fused_shards is False: gate and up have global scales of their own, and servers take the larger "
            "for both; set it, or write with for_servers=False for load_quantized alone"
        )


def _leaves(params: Params, config: ModelConfig) -> dict[str, tuple[Leaf, tuple[int, ...]]]:
    """Leaf, and place in it, of every tensor in reading order; checks every shape."""
    expected: Any = abstract_params(config, jnp.float32)

    def leaf_of(label: str, leaf: Leaf, spec: Leaf) -> Leaf:
        shapes = (getattr(leaf, "shape", None), getattr(spec, "shape", None))
        if shapes[0] != shapes[1]:
            raise ModelError(f"params.{label} has shape {shapes[0]}, the settings imply {shapes[1]}")
        return leaf

    top = {
        name: leaf_of(field, getattr(params, field), getattr(expected, field)) for field, name in TOP.items()
    }
    layers = {
        field: leaf_of(f"layers.{field}", getattr(params.layers, field), getattr(expected.layers, field))
        for field in LAYER
    }
    places = {name: (layers[field], place) for name, field, place in layer_tensors(config)}
    return {name: places.get(name) or (top[name], ()) for name in tensor_names(config)}


def _top(config: ModelConfig) -> dict[str, str]:
    """Field and name of every tensor outside the layers."""
    return {field: name for field, name in TOP.items() if name != HEAD or not config.tie_embeddings}


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[ModelConfig, Read]]:
    """Settings, and a reader of weights by name, of a directory whose tensors are all accounted for."""
    directory = Path(path)
    config = load_config(directory, quantized=True)
    _check_format(directory)
    expected: Any = abstract_params(config, jnp.bfloat16)
    shapes = {name: getattr(expected, field).shape for field, name in _top(config).items()}
    for name, field, place in layer_tensors(config):
        shapes[name] = getattr(expected.layers, field).shape[len(place) :]
    with ExitStack() as stack:
        files = WeightFiles(directory, stack)
        _check_names(files, config)
        _check_tied_head(files, config)
        yield config, lambda name: _read_weight(files, name, shapes[name])


def _check_format(directory: Path) -> None:
    """Raises unless `config.json`, or in its place `hf_quant_config.json`, names a format that is read here."""
    place = directory / "config.json"
    quantization = read_json(place).get("quantization_config")
    if quantization is None and (legacy := directory / "hf_quant_config.json").is_file():
        place, quantization = legacy, read_json(legacy).get("quantization")
    if not isinstance(quantization, dict):
        raise ModelError(f"{place}: no quantization_config; load_model reads weights that are not quantised")
    named = quantization.get("quant_algo"), quantization.get("format")
    if "NVFP4" not in named and "nvfp4-pack-quantized" not in named:
        raise ModelError(f"{place}: quant_algo {named[0]!r}, format {named[1]!r}; accepted are {FORMATS}")


def _check_names(files: WeightFiles, config: ModelConfig) -> None:
    """Raises unless the files hold every weight, quantised or not, and nothing that is neither read nor known."""
    expected: set[str] = set()
    for name in tensor_names(config):
        module = name.removesuffix(WEIGHT)
        layout = layout_of(module, files.files)
        expected.update((name,) if layout is None else tensors_of(module, layout))
    known = {name for name in files.files if name.endswith(_IGNORED)}
    files.check_names(expected | known, tied=config.tie_embeddings)


def _check_tied_head(files: WeightFiles, config: ModelConfig) -> None:
    """As `load_model`: a tied model may hold its head a second time, but no other."""
    tied = config.tie_embeddings and HEAD in files.files
    if tied and not np.array_equal(files.raw(HEAD), files.raw(EMBED)):
        raise ModelError(
            f"{files.files[HEAD]}: {HEAD} differs from {EMBED} although config.json says tie_word_embeddings"
        )


def _read_weight(files: WeightFiles, name: str, shape: tuple[int, ...]) -> Weight:
    module = name.removesuffix(WEIGHT)
    layout = layout_of(module, files.files)
    if layout is None:
        return files.read(name, shape, np.dtype(jnp.bfloat16))
    file = files.files[module + CODES[layout]]
    try:
        q = from_tensors(module, {part: files.raw(part) for part in tensors_of(module, layout)})
    except ValueError as error:
        raise ModelError(f"{file}: {error}") from error
    if q.codes.shape != shape:
        raise ModelError(
            f"{file}: {module} has shape {list(q.codes.shape)}, config.json implies {list(shape)}"
        )
    return q


_operand_of = jax.jit(from_quantized)
_dequantize = jax.jit(dequantize, static_argnames="dtype")


def _operand(weight: Weight) -> Operand | jax.Array:
    return _operand_of(weight) if isinstance(weight, QuantizedTensor) else jnp.asarray(weight)


def _leaf(
    parts: Sequence[Operand | jax.Array] | None, config: ModelConfig, field: str
) -> Operand | jax.Array | None:
    """A layer's leaf from its tensors: none, one, or one per expert."""
    if parts is None:
        return None
    if not (config.num_experts and field in EXPERT):
        return parts[0]
    if len({type(expert) for expert in parts}) > 1:
        raise ModelError(
            f"{field}: some experts of a layer are quantised and some are not; accepted: all or none"
        )
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)


def _floats(weight: Weight, dtype: DTypeLike) -> jax.Array:
    if isinstance(weight, QuantizedTensor):
        return _dequantize(weight, dtype=np.dtype(dtype))
    return jnp.asarray(weight, dtype)
