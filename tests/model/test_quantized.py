"""Quantised directories: read as other writers left them, written with the learner's own codes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.golden import DATA, golden_path
from tests.tiny import CHARACTERS, tiny_config, tiny_params
from triage_jax.model import (
    KVCache,
    ModelError,
    Numerics,
    Params,
    forward_cached,
    load_dequantized,
    load_model,
    load_quantized,
    logits_of,
    save_model,
    save_quantized,
    served,
    serving_params,
)
from triage_jax.model.shards import ShardWriter
from triage_jax.model.tensors import DTYPES, MappedFile, Stored
from triage_jax.nvfp4 import Operand, QuantSpec, from_quantized, quantize, to_operand
from triage_jax.nvfp4.checkpoint import from_tensors
from triage_jax.tasks.tokenizer import char_codec, save_tokenizer

LAYOUTS = ("modelopt", "compressed_tensors")
MLP = ("gate", "up", "down")
SERVING = jax.jit(serving_params, static_argnames="numerics")
TILES = Numerics(weight=QuantSpec(tile="16x16"), fused_shards=True)
UP, K = "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.k_proj"


def assert_same(left: Params, right: Params) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def tensors_in(directory: Path) -> dict[str, np.ndarray]:
    content = (directory / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    mapped = MappedFile(directory / "model.safetensors")
    return {name: np.array(mapped[name]) for name in header if name != "__metadata__"}


def rewrite(directory: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Replace, add or (None) drop tensors of a directory of one file."""
    tensors = {name: value for name, value in (tensors_in(directory) | changes).items() if value is not None}
    names = {dtype: name for name, dtype in DTYPES.items()}
    plan = {name: Stored(names[value.dtype], value.shape) for name, value in tensors.items()}
    with ShardWriter(directory, plan, 10**9) as writer:
        for name, value in tensors.items():
            writer.write(name, value)


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def written(tmp_path) -> tuple[Path, Params]:
    """A learner's parameters and the directory they were written to, with tiles of 16×16."""
    params, config = tiny_params(tiny_config()), tiny_config()
    save_quantized(tmp_path / "model", params, config, TILES)
    return tmp_path / "model", params


# Reading what others wrote


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_those_of_the_layouts_own_reader(layout):
    params, config = load_dequantized(DATA / "checkpoint" / layout)
    read = load_file(DATA / "checkpoint" / f"values_{layout}.safetensors")[f"{K}.weight"]
    # The order of the two scales' products differs, and compressed-tensors divides where we multiply by 1/scale.
    np.testing.assert_allclose(np.asarray(params.layers.k[1]), read, rtol=2**-22, atol=0)
    source, source_config = load_model(golden_path("hf_tiny/qwen3_tied"))
    assert config == source_config
    for field in ("q", "o", "gate", "down"):
        weight = np.asarray(getattr(source.layers, field))
        error = np.asarray(getattr(params.layers, field)) - weight
        assert np.sqrt(np.mean(error**2)) < 0.12 * weight.std()
    np.testing.assert_array_equal(np.asarray(params.embed), np.asarray(source.embed))
    np.testing.assert_array_equal(np.asarray(params.layers.q_norm), np.asarray(source.layers.q_norm))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_are_the_stored_codes(layout):
    params, config = load_quantized(DATA / "checkpoint" / layout)
    tensors = tensors_in(DATA / "checkpoint" / layout)
    assert len(params.layers) == config.num_layers
    for layer, prefix in zip(params.layers, ("model.layers.0", "model.layers.1"), strict=True):
        for field, module in (("q", "self_attn.q_proj"), ("up", "mlp.up_proj")):
            expected = from_quantized(from_tensors(f"{prefix}.{module}", tensors))
            operand = getattr(layer, field)
            assert operand.values.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(operand.values), np.asarray(expected.values))
            assert operand.scale == expected.scale
        assert layer.input_norm.dtype == jnp.bfloat16
    floats, _ = load_dequantized(DATA / "checkpoint" / layout)
    first = params.layers[0].down
    product = np.asarray(first.values, np.float32) * np.asarray(first.scale)
    np.testing.assert_array_equal(np.asarray(floats.layers.down[0]), product)


def test_an_export_that_describes_itself_only_in_hf_quant_config(tmp_path):
    shutil.copytree(DATA / "checkpoint" / "modelopt", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert_same(load_quantized(tmp_path / "model")[0], load_quantized(DATA / "checkpoint" / "modelopt")[0])
    (tmp_path / "model" / "hf_quant_config.json").unlink()
    with pytest.raises(ModelError, match=r"no quantization_config; load_model reads weights"):
        load_quantized(tmp_path / "model")


# Writing


@pytest.mark.parametrize(
    "settings",
    [
        {"layers": "mlp"},
        {"layers": "linear", "weight": QuantSpec(tile="16x16"), "fused_shards": True},
        {"layers": "linear", "high_precision_layers": 1, "weight": QuantSpec(rule="modelopt")},
        {"weight_source": "float32", "fused_shards": True},
    ],
    ids=["mlp", "linear", "last-layer", "masters"],
)
def test_codes_are_those_of_the_forward_pass(tmp_path, settings):
    numerics = Numerics(**settings)
    config = tiny_config(tie_embeddings=False)
    params = tiny_params(config, seed=3)
    save_quantized(tmp_path / "model", params, config, numerics, for_servers=numerics.fused_shards)
    loaded, loaded_config = load_quantized(tmp_path / "model")
    assert loaded_config == config
    assert_same(served(loaded, numerics), SERVING(params, numerics))
    assert isinstance(loaded.layers[0].up, Operand)
    assert isinstance(loaded.layers[1].up, Operand) == (numerics.high_precision_layers == 0)


def test_shared_codes_are_those_of_the_fused_weights(written):
    directory, params = written
    loaded, _ = load_quantized(directory)
    for index, layer in enumerate(loaded.layers):
        gate, up, down = (getattr(params.layers, name)[index].astype(jnp.bfloat16) for name in MLP)
        fused = to_operand(jnp.concatenate([gate, up]), TILES.weight)
        np.testing.assert_array_equal(np.asarray(layer.gate.values), np.asarray(fused.values[: len(gate)]))
        np.testing.assert_array_equal(np.asarray(layer.up.values), np.asarray(fused.values[len(gate) :]))
        assert layer.gate.scale == layer.up.scale == fused.scale
        np.testing.assert_array_equal(
            np.asarray(layer.down.values), np.asarray(to_operand(down, TILES.weight).values)
        )
        assert not isinstance(layer.q, Operand)


def test_a_tiles_scale_is_on_each_of_its_rows(written):
    directory, params = written
    tensors = tensors_in(directory)
    scales = tensors[f"{UP}.weight_scale"].view(np.uint8)
    assert scales.shape == (64, 2)
    tiles = scales.reshape(4, 16, 2)
    assert (tiles == tiles[:, :1]).all()
    assert len(np.unique(tiles[:, 0])) > 1
    # Read as ordinary 1×16 blocks the codes mean what the learner's tiles mean.
    q = from_tensors(UP, tensors)
    whole = jnp.concatenate([params.layers.gate[0], params.layers.up[0]]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(q.codes, quantize(whole, TILES.weight).codes[64:])


def test_the_rest_is_bf16_and_the_description_lists_it(written, tmp_path):
    directory, params = written
    tensors = tensors_in(directory)
    embed = np.asarray(params.embed).astype(ml_dtypes.bfloat16)
    assert tensors["model.embed_tokens.weight"].tobytes() == embed.tobytes()
    assert "lm_head.weight" not in tensors
    description = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert description["ignore"] == ["lm_head", "model.layers.0.self_attn*", "model.layers.1.self_attn*"]
    save_tokenizer(char_codec(CHARACTERS), tmp_path / "tokenizer")
    with pytest.raises(FileExistsError):
        save_quantized(directory, params, tiny_config(), TILES)
    save_quantized(
        directory,
        params,
        tiny_config(),
        TILES,
        overwrite=True,
        tokenizer_from=tmp_path / "tokenizer",
        max_shard_bytes=3000,
        input_scale=0.125,
    )
    assert (directory / "tokenizer.json").is_file()
    assert (directory / "model.safetensors.index.json").is_file()
    loaded, config = load_quantized(directory)
    assert config == tiny_config()
    assert isinstance(loaded.layers[1].down, Operand)


def test_a_learner_on_several_devices_writes_the_same(written):
    directory, params = written
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    spec = jax.sharding.PartitionSpec(None, "fsdp")
    sharded = jax.device_put(params.layers.up, jax.sharding.NamedSharding(mesh, spec))
    spread = replace(params, layers=replace(params.layers, up=sharded))
    save_quantized(directory.with_name("sharded"), spread, tiny_config(), TILES)
    left, right = tensors_in(directory), tensors_in(directory.with_name("sharded"))
    assert {name: value.tobytes() for name, value in left.items()} == {
        name: value.tobytes() for name, value in right.items()
    }


def test_a_sampler_computes_the_same_from_the_file_as_from_memory(written, tmp_path):
    _, params = written
    config, numerics = tiny_config(), Numerics(activation=QuantSpec(scope="row"))
    save_quantized(tmp_path / "own", params, config, numerics, for_servers=False)
    tokens, valid = jnp.arange(12).reshape(2, 6), jnp.ones((2, 6), bool)

    @jax.jit
    def logits(weights: Params) -> jax.Array:
        cache = KVCache.empty(config, 2, 6, numerics.compute_dtype)
        hidden, _ = forward_cached(weights, tokens, valid, cache, config, numerics)
        return logits_of(weights, hidden, numerics)

    from_file = logits(served(load_quantized(tmp_path / "own")[0], numerics))
    np.testing.assert_array_equal(np.asarray(from_file), np.asarray(logits(SERVING(params, numerics))))
    assert jnp.abs(from_file).max() > 0.1


# Mixtures of experts


def test_each_expert_keeps_its_codes(tmp_path):
    config = tiny_config(architecture="qwen3_moe", num_experts=3, experts_per_token=2)
    params = tiny_params(config, seed=5)
    save_quantized(tmp_path / "own", params, config, TILES)
    loaded, loaded_config = load_quantized(tmp_path / "own")
    assert loaded_config == config
    assert_same(served(loaded, TILES), SERVING(params, TILES))
    assert loaded.layers[0].gate.scale.shape == (3,)


def test_gate_and_up_of_one_expert_share_a_scale(tmp_path):
    config = tiny_config(architecture="qwen3_moe", num_experts=3, experts_per_token=2)
    params = tiny_params(config, seed=6)
    save_quantized(tmp_path / "model", params, config, TILES)
    loaded, _ = load_quantized(tmp_path / "model")
    gate, up = (
        np.abs(np.asarray(leaf[1].astype(jnp.bfloat16), np.float32))
        for leaf in (params.layers.gate, params.layers.up)
    )
    amax = np.maximum(gate.max(axis=(1, 2)), up.max(axis=(1, 2)))
    np.testing.assert_array_equal(np.asarray(loaded.layers[1].gate.scale), amax / np.float32(2688))
    np.testing.assert_array_equal(np.asarray(loaded.layers[1].up.scale), amax / np.float32(2688))
    assert len(set(amax)) == 3
    assert loaded.layers[1].router.dtype == jnp.bfloat16
    ignore = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.1.mlp.gate" in ignore
    floats, _ = load_dequantized(tmp_path / "model")
    error = np.asarray(floats.layers.down) - np.asarray(params.layers.down)
    assert floats.layers.down.shape == params.layers.down.shape
    assert np.sqrt(np.mean(error**2)) < 0.13 * np.asarray(params.layers.down).std()


def test_experts_must_be_alike(tmp_path):
    config = tiny_config(architecture="qwen3_moe", num_experts=2, experts_per_token=1)
    save_quantized(tmp_path / "model", tiny_params(config), config, TILES)
    module = "model.layers.0.mlp.experts.1.down_proj"
    plain = np.ones((32, 64), ml_dtypes.bfloat16)
    rewrite(
        tmp_path / "model",
        {f"{module}.weight": plain, f"{module}.weight_scale": None, f"{module}.weight_scale_2": None},
    )
    with pytest.raises(ModelError, match="down: some experts of a layer are quantised and some are not"):
        load_quantized(tmp_path / "model")


# Refusals


def test_served_wants_the_layers_that_the_numerics_quantise(written):
    loaded, _ = load_quantized(written[0])
    assert served(loaded, Numerics(execution="bf16")) is loaded
    with pytest.raises(
        ModelError, match=r"layer 0, q: the checkpoint holds it unquantised, the numerics quantise q/k"
    ):
        served(loaded, Numerics(layers="linear"))
    with pytest.raises(
        ModelError, match=r"layer 1, gate: .* in NVFP4, the numerics quantise nothing of this layer"
    ):
        served(loaded, replace(TILES, high_precision_layers=1))
    plain = replace(loaded.layers[1], down=loaded.layers[1].q)
    with pytest.raises(ModelError, match="layer 1, down: the checkpoint holds it unquantised"):
        served(replace(loaded, layers=(loaded.layers[0], plain)), TILES)
    odd = replace(loaded.layers[0], o=loaded.layers[0].down)
    with pytest.raises(ModelError, match="layer 0, o: the checkpoint holds it in NVFP4"):
        served(replace(loaded, layers=(odd, loaded.layers[1])), TILES)
    with pytest.raises(ModelError, match="not a learner's"):
        served(written[1], TILES)


def test_what_cannot_be_written(tmp_path):
    config = tiny_config()
    params = tiny_params(config)
    with pytest.raises(ModelError, match=r"execution is 'bf16': nothing is quantised; use save_model"):
        save_quantized(tmp_path / "model", params, config, Numerics(execution="bf16"))
    with pytest.raises(
        ModelError, match=r"fused_shards is False: gate and up have global scales of their own"
    ):
        save_quantized(tmp_path / "model", params, config, Numerics())
    none = Numerics(high_precision_layers=2, fused_shards=True)
    with pytest.raises(ModelError, match=r"high_precision_layers is 2 of 2 layers: nothing is quantised"):
        save_quantized(tmp_path / "model", params, config, none)
    with pytest.raises(ModelError, match=r"weight\.scope is 'row'.*accepted are tensor, static"):
        save_quantized(tmp_path / "model", params, config, Numerics(weight=QuantSpec(scope="row")))
    with pytest.raises(
        ModelError, match=r"params\.layers\.gate has shape \(2, 64, 32\), the settings imply \(2, 80, 32\)"
    ):
        save_quantized(tmp_path / "model", params, tiny_config(intermediate_size=80), TILES)
    broken = replace(params, layers=replace(params.layers, up=params.layers.up.at[1, 2, 3].set(jnp.inf)))
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight holds a value that is not finite"):
        save_quantized(tmp_path / "model", broken, config, TILES)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{UP}.weight_scale": None}, rf"1 tensors missing, first \['{UP}.weight_scale'\]"),
        ({f"{UP}.weight_scale_2": None}, "unexpected tensors|has dtype U8"),
        ({"model.norm.weight": None}, r"1 tensors missing, first \['model\.norm\.weight'\]"),
        ({f"{UP}.pre_quant_scale": np.ones(32, np.float32)}, rf"unexpected tensors, first \['{UP}.pre_quant"),
        (
            {f"{UP}.weight": np.zeros((64, 16), np.float32)},
            rf"{UP}\.weight: has dtype float32; accepted is uint8",
        ),
        (
            {f"{UP}.weight_scale_2": np.array(np.nan, np.float32)},
            rf"model\.safetensors: {UP}\.weight_scale_2: is nan",
        ),
        (
            {
                f"{UP}.weight": np.zeros((64, 8), np.uint8),
                f"{UP}.weight_scale": np.zeros((64, 1), ml_dtypes.float8_e4m3fn),
            },
            rf"{UP} has shape \[64, 16\], config.json implies \[64, 32\]",
        ),
        (
            {"lm_head.weight": np.ones((32, 32), ml_dtypes.bfloat16)},
            "lm_head.weight differs from model.embed_tokens.weight",
        ),
    ],
)
def test_damage_is_named_with_its_file(written, changes, message):
    rewrite(written[0], changes)
    with pytest.raises(ModelError, match=message):
        load_quantized(written[0])


def test_scales_of_a_cache_and_a_repeated_head_are_ignored(written):
    before, _ = load_quantized(written[0])
    extra = {f"{K}.k_scale": np.ones((), np.float32), f"{UP}.input_scale": None}
    embed = tensors_in(written[0])["model.embed_tokens.weight"]
    rewrite(written[0], extra | {"lm_head.weight": embed})
    assert_same(load_quantized(written[0])[0], before)


def test_other_formats_are_named(written, tmp_path):
    edit_json(written[0] / "config.json", quantization_config={"quant_method": "fp8", "quant_algo": "FP8"})
    with pytest.raises(
        ModelError, match=r"config\.json: quant_algo 'FP8', format None; accepted are ModelOpt NVFP4"
    ):
        load_quantized(written[0])
    save_model(tmp_path / "plain", tiny_params(tiny_config()), tiny_config())
    with pytest.raises(ModelError, match="no quantization_config; load_model reads"):
        load_quantized(tmp_path / "plain")
    with pytest.raises(ModelError, match="not a directory"):
        load_quantized(tmp_path / "absent")
