"""Model directories: what is read, what is written, and the one error for everything broken."""

import dataclasses
import json
import os
import shutil
import stat
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.golden import golden_path
from triage_jax.model.config import ModelConfig, ModelError
from triage_jax.model.load import load_model
from triage_jax.model.params import Params
from triage_jax.model.save import save_model

NAMES = ("qwen3_tied", "qwen3_untied", "llama_tied")
NORM, HEAD = "model.norm.weight", "lm_head.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture(params=NAMES)
def source(request) -> Path:
    return golden_path(f"hf_tiny/{request.param}")


@pytest.fixture
def broken(tmp_path) -> Path:
    """A copy of a tied model, to be damaged."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copyfile(golden_path("hf_tiny/qwen3_tied") / name, directory / name)
    return directory


def edit_tensors(directory: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Replace, add or (None) drop tensors."""
    tensors = load_file(directory / "model.safetensors") | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, directory / "model.safetensors")


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_identical(left: tuple[Params, ModelConfig], right: tuple[Params, ModelConfig]) -> None:
    assert left[1] == right[1]
    left, right = left[0], right[0]
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# Reading


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_leaf_is_its_tensor(source, dtype):
    params, config = load_model(source, dtype)
    tensors = {name: array.astype(dtype) for name, array in load_file(source / "model.safetensors").items()}
    expect = {
        "model.embed_tokens.weight": params.embed,
        "model.norm.weight": params.final_norm,
        "model.layers.0.input_layernorm.weight": params.layers.input_norm[0],
        "model.layers.1.post_attention_layernorm.weight": params.layers.post_norm[1],
        "model.layers.0.self_attn.q_proj.weight": params.layers.q[0],
        "model.layers.1.self_attn.k_proj.weight": params.layers.k[1],
        "model.layers.1.self_attn.v_proj.weight": params.layers.v[1],
        "model.layers.1.self_attn.o_proj.weight": params.layers.o[1],
        "model.layers.1.mlp.gate_proj.weight": params.layers.gate[1],
        "model.layers.0.mlp.up_proj.weight": params.layers.up[0],
        "model.layers.0.mlp.down_proj.weight": params.layers.down[0],
    }
    if config.qk_norm:
        expect["model.layers.1.self_attn.q_norm.weight"] = params.layers.q_norm[1]
        expect["model.layers.1.self_attn.k_norm.weight"] = params.layers.k_norm[1]
    for name, leaf in expect.items():
        assert leaf.dtype == dtype
        np.testing.assert_array_equal(np.asarray(leaf), tensors[name], err_msg=name)
    assert (params.layers.q_norm is None) == (config.architecture == "llama")
    assert (params.lm_head is None) == config.tie_embeddings
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == sum(array.size for array in tensors.values())


@pytest.mark.parametrize("stored", [np.float32, np.float16, np.float64])
def test_other_source_dtypes_round_to_the_target(broken, stored):
    wide = np.linspace(-3, 3, 64).astype(stored)
    edit_tensors(broken, {NORM: wide})
    params, _ = load_model(broken, jnp.float32)
    np.testing.assert_array_equal(np.asarray(params.final_norm), wide.astype(np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NORM: None}, f"model.safetensors: 1 tensors missing, first.*{NORM}"),
        ({"model.norm.bias": np.zeros(64, np.float32)}, "model.safetensors: 1 unexpected.*model.norm.bias"),
        ({NORM: np.zeros(63, np.float32)}, rf"{NORM} has shape \[63\].*implies \[64\]"),
        ({NORM: np.zeros(64, np.int8)}, f"{NORM} has dtype I8, accepted are"),
        (
            {NORM: np.full(64, np.nan, np.float32)},
            f"{NORM} holds a value that is not finite",
        ),
        ({NORM: np.full(64, 1e39)}, f"{NORM} holds a value .* not finite as float32"),
        (
            {GATE: np.full((192, 64), np.inf, np.float32)},
            f"{GATE} holds a value that is not finite",
        ),
    ],
)
def test_a_bad_tensor_is_named_with_its_file(broken, change, message):
    edit_tensors(broken, change)
    with pytest.raises(ModelError, match=message) as raised:
        load_model(broken)
    assert str(broken / "model.safetensors") in str(raised.value)


def test_rotary_frequencies_of_old_exports_are_ignored(broken):
    edit_tensors(broken, {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)})
    load_model(broken)


def test_tied_model_with_a_head_needs_it_equal(broken):
    embed = load_file(broken / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(broken, {HEAD: embed})
    params, _ = load_model(broken)
    assert params.lm_head is None
    edit_tensors(broken, {HEAD: -embed})
    with pytest.raises(ModelError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_model(broken)


def test_untied_model_without_a_head_says_what_to_set(broken):
    edit_json(broken / "config.json", tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"missing, first \['lm_head.weight'\] \(tied weights need"):
        load_model(broken)


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_truncated_file(broken, keep):
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model.safetensors: cannot be read as safetensors"):
        load_model(broken)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_unreadable_settings(broken, name, text):
    (broken / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=name):
        load_model(broken)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_absent_file(broken, name):
    (broken / name).unlink()
    with pytest.raises(ModelError, match=name):
        load_model(broken)


def test_absent_directory(tmp_path):
    with pytest.raises(ModelError, match="not a directory"):
        load_model(tmp_path / "nowhere")


# Shards


@pytest.fixture
def sharded(tmp_path) -> Path:
    params, config = load_model(golden_path("hf_tiny/qwen3_tied"))
    save_model(tmp_path / "sharded", params, config, max_shard_bytes=60_000)
    return tmp_path / "sharded"


def test_shards_respect_the_limit_and_read_back(sharded):
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    for shard in shards:
        assert sum(array.nbytes for array in load_file(shard).values()) <= 60_000
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        array.nbytes for shard in shards for array in load_file(shard).values()
    )
    assert_identical(load_model(sharded), load_model(golden_path("hf_tiny/qwen3_tied")))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../model.safetensors", "a plain file name is required"),
        ("/etc/model.safetensors", "a plain file name is required"),
        ("..", "a plain file name is required"),
        ("a\\b.safetensors", "a plain file name is required"),
        ("weights.bin", "a plain file name is required"),
        (7, "a plain file name is required"),
        ("absent.safetensors", "does not exist"),
    ],
)
def test_index_may_name_plain_neighbours_only(sharded, file, message):
    index = sharded / "model.safetensors.index.json"
    edit_json(index, weight_map=json.loads(index.read_text())["weight_map"] | {NORM: file})
    with pytest.raises(ModelError, match=f"index.json: {NORM} is placed in.*{message}"):
        load_model(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, []])
def test_index_without_a_map(sharded, weight_map):
    edit_json(sharded / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(ModelError, match="weight_map must be a non-empty object"):
        load_model(sharded)


def test_index_and_shards_must_agree(sharded):
    index = sharded / "model.safetensors.index.json"
    right = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=right | {"extra.weight": right[NORM]})
    with pytest.raises(ModelError, match=r"lacks extra.weight"):
        load_model(sharded)
    edit_json(index, weight_map=right | {NORM: right["model.embed_tokens.weight"]})
    with pytest.raises(ModelError, match=f"holds {NORM}, which .* places in model-00001"):
        load_model(sharded)


# Writing


def test_round_trip_is_exact(source, tmp_path):
    loaded = load_model(source)
    save_model(tmp_path / "a" / "copy", *loaded)
    copy = tmp_path / "a" / "copy"
    assert_identical(load_model(copy), loaded)
    assert load_file(copy / "model.safetensors")[NORM].dtype == jnp.bfloat16
    for file in (copy, *copy.iterdir()):
        assert file.stat().st_mode & stat.S_IRUSR
        assert file.stat().st_mode & 0o077 == (tmp_path / "a").stat().st_mode & 0o077 & file.stat().st_mode
    assert os.listdir(tmp_path / "a") == ["copy"], "a temporary directory stayed behind"


def test_float32_round_trip_is_exact(tmp_path):
    params, config = load_model(golden_path("hf_tiny/llama_tied"))
    noise = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: leaf + noise.normal(size=leaf.shape).astype(np.float32), params)
    save_model(tmp_path / "exact", params, config, jnp.float32)
    assert_identical(load_model(tmp_path / "exact"), (params, config))
    save_model(tmp_path / "rounded", params, config)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert_identical(load_model(tmp_path / "rounded", jnp.bfloat16), (rounded, config))


def test_existing_target_is_kept_unless_told(tmp_path):
    first = load_model(golden_path("hf_tiny/qwen3_tied"))
    second = load_model(golden_path("hf_tiny/llama_tied"))
    target = tmp_path / "model"
    save_model(target, *first)
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        save_model(target, *second)
    assert_identical(load_model(target), first)
    save_model(target, *second, overwrite=True)
    assert_identical(load_model(target), second)
    assert os.listdir(tmp_path) == ["model"]


def test_only_a_model_directory_is_ever_replaced(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("years")
    with pytest.raises(FileExistsError, match=r"only a directory with a config.json"):
        save_model(tmp_path / "notes", *load_model(golden_path("hf_tiny/qwen3_tied")), overwrite=True)
    assert (tmp_path / "notes" / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize("value", [np.nan, np.inf, 3.4e38])
def test_a_failed_save_leaves_the_old_model(tmp_path, value):
    good = load_model(golden_path("hf_tiny/qwen3_tied"))
    save_model(tmp_path / "model", *good)
    params, config = good
    spoiled = dataclasses.replace(params, final_norm=params.final_norm.at[3].set(value))
    with pytest.raises(ModelError, match=f"{NORM} holds a value that is not finite as bfloat16"):
        save_model(tmp_path / "model", spoiled, config, overwrite=True)
    assert_identical(load_model(tmp_path / "model"), good)
    assert os.listdir(tmp_path) == ["model"]


def test_leaves_must_fit_the_settings(tmp_path):
    params, config = load_model(golden_path("hf_tiny/qwen3_tied"))
    with pytest.raises(ModelError, match=r"params.final_norm has shape \(63,\), the settings imply \(64,\)"):
        save_model(tmp_path / "m", dataclasses.replace(params, final_norm=params.final_norm[1:]), config)
    with pytest.raises(ModelError, match=r"params.lm_head has shape None"):
        save_model(tmp_path / "m", params, dataclasses.replace(config, tie_embeddings=False))
    with pytest.raises(ModelError, match="dtype = int8"):
        save_model(tmp_path / "m", params, config, jnp.int8)
    assert not os.listdir(tmp_path)


def test_tokenizer_files_come_along(tmp_path):
    model = load_model(golden_path("hf_tiny/qwen3_tied"))
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    with pytest.raises(ModelError, match=r"no tokenizer.json"):
        save_model(tmp_path / "model", *model, tokenizer_from=tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "secret.txt"):
        (tokenizer / name).write_text(name)
    save_model(tmp_path / "model", *model, tokenizer_from=tokenizer)
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert (tmp_path / "model" / "chat_template.jinja").read_text() == "chat_template.jinja"
