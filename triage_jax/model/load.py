"""Loading a Hugging Face model directory into `Params`."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from triage_jax.model.config import ModelConfig, ModelError
from triage_jax.model.params import LayerParams, Params, abstract_params
from triage_jax.model.tensors import MappedFile, Stored

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBED, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LAYER = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "post_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
}
"""Module of each leaf of `LayerParams` in a layer; of a mixture, `mlp.` is `mlp.experts.<n>.` for every expert"""
EXPERT = ("gate", "up", "down")
FLOATS = ("F64", "F32", "F16", "BF16")


def layer_name(index: int, field: str, expert: int | None = None) -> str:
    """Name in the file of one layer's (and expert's) part of the stacked leaf `LayerParams.<field>`."""
    module = LAYER[field]
    if expert is not None:
        module = module.replace("mlp.", f"mlp.experts.{expert}.")
    return f"model.layers.{index}.{module}.weight"


def layer_tensors(config: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, field and place in the stacked leaf, (layer,) or (layer, expert), of every tensor of the layers."""
    layers = abstract_params(config, jnp.float32).layers
    fields = [field for field in LAYER if getattr(layers, field) is not None]
    for index in range(config.num_layers):
        for field in fields:
            if config.num_experts and field in EXPERT:
                for expert in range(config.num_experts):
                    yield layer_name(index, field, expert), field, (index, expert)
            else:
                yield layer_name(index, field), field, (index,)


def tensor_names(config: ModelConfig) -> Iterator[str]:
    """Every tensor a file of this model holds, in reading order."""
    yield EMBED
    yield from (name for name, _, _ in layer_tensors(config))
    yield FINAL_NORM
    if not config.tie_embeddings:
        yield HEAD


def load_model(path: str | Path, dtype: jax.typing.DTypeLike = jnp.float32) -> tuple[Params, ModelConfig]:
    """Parameters and settings from a directory with `config.json` and safetensors, in one file or sharded.

    Sources may be F64, F32, F16 or BF16; weights are rounded to `dtype`. Tensors are read one at a time, so
    the peak is the model in `dtype` plus one stacked leaf. A tied model whose file also holds a head loads
    only if that head equals the embedding: two different heads are no tied model. Raises ModelError naming
    file and tensor for anything missing, unexpected, truncated, misshapen or not finite.
    """
    directory = Path(path)
    config = load_config(directory)
    shapes = abstract_params(config, dtype)
    with ExitStack() as stack:
        weights = WeightFiles(directory, stack)
        weights.check_names(set(tensor_names(config)), tied=config.tie_embeddings)

        def whole(name: str, spec: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.asarray(weights.read(name, spec.shape, spec.dtype))

        places: dict[str, dict[tuple[int, ...], str]] = {}
        for name, field, place in layer_tensors(config):
            places.setdefault(field, {})[place] = name

        def stacked(field: str, spec: jax.ShapeDtypeStruct | None) -> jax.Array | None:
            if spec is None:
                return None
            layers = np.empty(spec.shape, spec.dtype)
            for place, name in places[field].items():
                layers[place] = weights.read(name, spec.shape[len(place) :], spec.dtype)
            return jnp.asarray(layers)

        params = Params(
            embed=whole(EMBED, shapes.embed),
            layers=LayerParams(**{field: stacked(field, getattr(shapes.layers, field)) for field in LAYER}),
            final_norm=whole(FINAL_NORM, shapes.final_norm),
            lm_head=None if shapes.lm_head is None else whole(HEAD, shapes.lm_head),
        )
        if config.tie_embeddings and HEAD in weights.files:
            head = weights.read(HEAD, shapes.embed.shape, shapes.embed.dtype)
            if not np.array_equal(head, params.embed):
                raise ModelError(
                    f"{weights.files[HEAD]}: {HEAD} differs from {EMBED} although config.json says "
                    "tie_word_embeddings; set it to false to use both"
                )
    return params, config


def load_config(path: str | Path, *, quantized: bool = False) -> ModelConfig:
    """Settings of a model directory; raises ModelError naming the file and the field.

    `quantized` accepts a directory of quantised weights, which `model.quantized` reads.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(f"{directory}: not a directory; a Hugging Face model directory is required")
    generation = directory / "generation_config.json"
    try:
        config = dict(read_json(directory / "config.json"))
        if quantized:
            config.pop("quantization_config", None)
        return ModelConfig.from_hf(config, read_json(generation) if generation.exists() else None)
    except ModelError as error:
        raise ModelError(f"{directory / 'config.json'}: {error}") from error


def read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds a {type(content).__name__}; an object is required")
    return content


class WeightFiles:
    """The open safetensors files of a directory, and which file holds which tensor."""

    def __init__(self, directory: Path, stack: ExitStack):
        self.directory = directory
        self.files: dict[str, Path] = {}
        self._handles: dict[Path, safe_open] = {}
        self._maps: dict[Path, MappedFile] = {}
        single, index = directory / SINGLE, directory / INDEX
        listed = {}
        if not single.exists() and index.exists():
            listed = _weight_map(index)
        for file in [directory / name for name in sorted(set(listed.values()))] or [single]:
            try:
                self._handles[file] = stack.enter_context(safe_open(file, framework="numpy"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file}: cannot be read as safetensors: {error}") from error
            for name in self._handles[file].keys():  # noqa: SIM118 - not a mapping
                if listed and listed.get(name) != file.name:
                    raise ModelError(f"{file}: holds {name}, which {INDEX} places in {listed.get(name)}")
                self.files[name] = file
        if absent := sorted(listed.keys() - self.files.keys()):
            raise ModelError(f"{directory / listed[absent[0]]}: lacks {absent[0]}, listed in {INDEX}")

    def check_names(self, expected: set[str], *, tied: bool) -> None:
        """Raises unless the files hold exactly the expected tensors (and ignorable leftovers)."""
        where = next(iter(self.files.values()), self.directory)
        if missing := sorted(expected - self.files.keys()):
            hint = " (tied weights need tie_word_embeddings in config.json)" if missing == [HEAD] else ""
            raise ModelError(f"{where}: {len(missing)} tensors missing, first {missing[:3]}{hint}")
        # Older exports store the rotary frequencies, a constant of the configuration.
        extra = {name for name in self.files.keys() - expected if not name.endswith("rotary_emb.inv_freq")}
        if extra := sorted(extra - ({HEAD} if tied else set())):
            raise ModelError(f"{self.files[extra[0]]}: {len(extra)} unexpected tensors, first {extra[:3]}")

    def stored(self, name: str) -> Stored:
        """Dtype and shape of a tensor; raises ModelError for a dtype that no model has."""
        try:
            return self._mapped(name).stored(name)
        except ValueError as error:
            raise ModelError(f"{self.files[name]}: {name}: {error}") from error

    def raw(self, name: str) -> np.ndarray:
        """A tensor as it is stored: a view of the mapped file, read when it is touched."""
        return self._mapped(name)[name]

    def _mapped(self, name: str) -> MappedFile:
        file = self.files[name]
        if file not in self._maps:
            self._maps[file] = MappedFile(file)
        return self._maps[file]

    def read(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """One tensor, checked and rounded to `dtype`."""
        file = self.files[name]
        part = self._handles[file].get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise ModelError(
                f"{file}: {name} has shape {part.get_shape()}, config.json implies {list(shape)}"
            )
        if part.get_dtype() not in FLOATS:
            raise ModelError(f"{file}: {name} has dtype {part.get_dtype()}, accepted are {', '.join(FLOATS)}")
        with np.errstate(over="ignore"):  # reported below, by name
            tensor = self._handles[file].get_tensor(name).astype(dtype, copy=False)
        if not np.isfinite(tensor).all():
            raise ModelError(f"{file}: {name} holds a value that is not finite as {np.dtype(dtype).name}")
        return tensor


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name to file name; only plain names of existing files beside the index are accepted."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ModelError(f"{index}: weight_map must be a non-empty object of tensor name to file name")
    for name, file in listed.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and not set(file) & set("/\\\0")
        if not plain or Path(file).name != file:
            raise ModelError(f"{index}: {name} is placed in {file!r}; a plain file name is required")
        if not (index.parent / file).is_file():
            raise ModelError(f"{index}: {name} is placed in {file}, which does not exist")
    return listed
