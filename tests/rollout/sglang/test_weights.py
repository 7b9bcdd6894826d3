"""Versions on disk: what is written is what the learner holds, and every defect is found before a server sees it."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.tiny import tiny_config, tiny_model, tiny_params
from triage_jax.model import load_model, load_quantized, serving_params
from triage_jax.model.presets import PRESETS
from triage_jax.rollout import EngineError
from triage_jax.rollout.sglang import SglangConfig, SglangEngine
from triage_jax.rollout.sglang.errors import RefitFailed
from triage_jax.rollout.sglang.weights import MANIFEST, WeightStore, validate

CONFIG = tiny_config()
PARAMS = tiny_params(CONFIG)
OTHERS = tiny_params(CONFIG, seed=1)
TENSOR = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def store(tmp_path):
    store = WeightStore(tmp_path / "weights", keep=2)
    yield store
    store.close()


def test_a_version_holds_the_rounded_weights(store, tmp_path):
    snapshot = store.write(PARAMS, CONFIG, 3, tiny_model(tmp_path))
    assert snapshot.path == tmp_path / "weights" / "step-3"
    assert (snapshot.path / "tokenizer.json").is_file()
    loaded, config = load_model(snapshot.path)
    assert config == CONFIG
    np.testing.assert_array_equal(loaded.layers.up, PARAMS.layers.up.astype(jnp.bfloat16).astype(jnp.float32))
    manifest = json.loads((snapshot.path / MANIFEST).read_text())
    assert manifest[TENSOR]["shape"] == [64, 32]
    assert manifest[TENSOR]["dtype"] == "bfloat16"
    # Embedding, final norm, and per layer 4 attention, 3 MLP, 4 norm tensors.
    assert len(manifest) == 2 + 2 * 11
    # 32*32 + 32 + 2 * (32*32 + 2*16*32 + 32*32 + 2*16 + 2*32 + 3*64*32) numbers of two bytes
    assert snapshot.size == 2 * (1056 + 2 * (1024 + 1024 + 1024 + 32 + 64 + 6144))


def test_the_digest_follows_the_rounded_weights_and_nothing_else(store):
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), PARAMS)
    first = store.write(rounded, CONFIG, 0)
    # An eighth of the distance to the next BF16 number: rounds back.
    nearby = jax.tree.map(lambda leaf: leaf * (1 + 2**-12), rounded)
    assert store.write(nearby, CONFIG, 1).digest == first.digest
    changed = replace(rounded, final_norm=rounded.final_norm.at[5].set(1.5))
    assert store.write(changed, CONFIG, 2).digest != first.digest


def test_a_version_of_an_earlier_run_is_replaced(store, tmp_path):
    first = store.write(PARAMS, CONFIG, 7)
    store.close()
    resumed = WeightStore(tmp_path / "weights", keep=2)
    second = resumed.write(OTHERS, CONFIG, 7)
    assert first.path == second.path
    assert first.digest != second.digest
    validate(second.path)
    assert sorted(path.name for path in second.path.parent.iterdir()) == [".lock", "step-7"]
    resumed.close()


def test_within_a_run_a_version_names_one_set_of_weights(store):
    first = store.write(PARAMS, CONFIG, 7)
    written = (first.path / "model.safetensors").stat().st_mtime_ns
    assert store.write(PARAMS, CONFIG, 7) == first
    with pytest.raises(
        EngineError, match=r"version 7 names other weights already.*accepted: a version above 7"
    ):
        store.write(OTHERS, CONFIG, 7)
    # A server that comes back may load it at any time.
    assert (first.path / "model.safetensors").stat().st_mtime_ns == written
    validate(first.path)


def _flip(path):
    tensors = load_file(path / "model.safetensors")
    tensors[TENSOR][3, 4] += 1
    save_file(tensors, path / "model.safetensors")


def _without(path):
    tensors = load_file(path / "model.safetensors")
    del tensors[TENSOR]
    save_file(tensors, path / "model.safetensors")


def _extra(path):
    save_file({"model.extra": np.zeros(3, np.float32)}, path / "more.safetensors")


def _twice(path):
    save_file({TENSOR: np.zeros(3, np.float32)}, path / "more.safetensors")


def _reshaped(path):
    tensors = load_file(path / "model.safetensors")
    tensors[TENSOR] = tensors[TENSOR].T.copy()
    save_file(tensors, path / "model.safetensors")


def _widened(path):
    tensors = load_file(path / "model.safetensors")
    tensors[TENSOR] = tensors[TENSOR].astype(np.float32)
    save_file(tensors, path / "model.safetensors")


def _truncated(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _no_manifest(path):
    (path / MANIFEST).write_text("{")


DEFECTS = {
    "flip": (_flip, f"{TENSOR}: sha256"),
    "missing": (_without, f"1 tensors missing, first {TENSOR}"),
    "extra": (_extra, "1 tensors unexpected, first model.extra"),
    "twice": (_twice, f"{TENSOR} is also in model.safetensors"),
    "shape": (_reshaped, rf"{TENSOR}: shape is \[32, 64\], the manifest says \[64, 32\]"),
    "dtype": (_widened, f"{TENSOR}: dtype is float32, the manifest says bfloat16"),
    "truncated": (_truncated, "cannot be read as safetensors"),
    "manifest": (_no_manifest, "manifest.json cannot be read"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_named(store, defect):
    spoil, message = DEFECTS[defect]
    path = store.write(PARAMS, CONFIG, 0).path
    validate(path)
    spoil(path)
    with pytest.raises(RefitFailed, match=message):
        validate(path)


def test_a_value_that_is_not_finite_is_found_even_if_the_manifest_agrees(store):
    path = store.write(PARAMS, CONFIG, 0).path
    tensors = load_file(path / "model.safetensors")
    tensors[TENSOR] = np.full((64, 32), np.inf, ml_dtypes.bfloat16)
    save_file(tensors, path / "model.safetensors")
    manifest = json.loads((path / MANIFEST).read_text())
    with pytest.raises(RefitFailed) as caught:
        validate(path)
    manifest[TENSOR]["sha256"] = str(caught.value).split("sha256 is ")[1].split(",")[0]
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(RefitFailed, match=f"{TENSOR} holds a value that is not finite"):
        validate(path)


def test_weights_that_are_not_finite_leave_nothing_behind(store, tmp_path):
    broken = replace(PARAMS, embed=PARAMS.embed.at[0, 0].set(jnp.nan))
    with pytest.raises(
        RefitFailed, match=r"version 4 .*model.embed_tokens.weight holds a value that is not finite"
    ):
        store.write(broken, CONFIG, 4)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == [".lock"]


def test_old_versions_go_unless_they_are_needed(store):
    for version in (1, 2, 9, 10, 11):
        store.write(PARAMS, CONFIG, version)
    store.release({2})
    assert store.versions() == [2, 10, 11]
    store.release(())
    assert store.versions() == [10, 11]


def test_one_writer_per_directory(store, tmp_path):
    with pytest.raises(EngineError, match="another run writes its weights here"):
        WeightStore(tmp_path / "weights", keep=2)
    store.close()
    (tmp_path / "weights" / ".step-5.new").mkdir()
    reopened = WeightStore(tmp_path / "weights", keep=2)
    assert not (tmp_path / "weights" / ".step-5.new").exists()
    reopened.close()


def test_the_learners_own_codes_as_servers_read_them(store):
    """ModelOpt's layout; what reads back is what the learner multiplies, and a changed code is found."""
    numerics = PRESETS["parity"]
    snapshot = store.write(PARAMS, CONFIG, 4, numerics=numerics)
    stored, config = load_quantized(snapshot.path)
    assert config == CONFIG
    for ours, theirs in zip(
        jax.tree.leaves(serving_params(PARAMS, numerics)), jax.tree.leaves(stored), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    manifest = json.loads((snapshot.path / MANIFEST).read_text())
    packed = manifest["model.layers.0.mlp.gate_proj.weight"]
    assert (packed["dtype"], packed["shape"]) == ("uint8", [64, 16])
    assert manifest["model.layers.0.mlp.gate_proj.weight_scale"]["dtype"] == "float8_e4m3fn"
    assert snapshot.digest == store.write(PARAMS, CONFIG, 5).digest, "the same weights, whatever the layout"

    file = snapshot.path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(RefitFailed, match="sha256"):
        validate(snapshot.path)


def test_numerics_that_a_server_would_read_otherwise_are_refused(store, tmp_path):
    apart = replace(PRESETS["parity"], fused_shards=False)
    with pytest.raises(RefitFailed, match="fused_shards is False"):
        store.write(PARAMS, CONFIG, 0, numerics=apart)
    settings = SglangConfig(checkpoint="modelopt")
    with pytest.raises(ValueError, match="fused_shards is False"):
        SglangEngine(settings, CONFIG, apart, tmp_path / "w")
    with pytest.raises(ValueError, match="nothing is quantised"):
        SglangEngine(settings, CONFIG, PRESETS["bf16"], tmp_path / "w")
