"""The quantise command: its bytes against Model-Optimizer's, its care for the disk, its refusals."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.golden import DATA, golden_path
from tests.tiny import tiny_model
from triage_jax.model import ModelError, load_dequantized, load_model, load_quantized
from triage_jax.model.selection import Selection
from triage_jax.model.tensors import MappedFile
from triage_jax.nvfp4 import QuantSpec, dequantize, quantize
from triage_jax.nvfp4.checkpoint import from_tensors
from triage_jax.quantize import QuantizeConfig, main, quantize_checkpoint

MOE = "model.layers.0.mlp"


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of a directory, sharded or not."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        header = file.read_bytes()
        names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
        mapped = MappedFile(file)
        found |= {name: mapped[name] for name in names if name != "__metadata__"}
    return found


def mixture(directory: Path, dtype: type = ml_dtypes.bfloat16) -> Path:
    """A directory with the tensor names of Qwen3-MoE: one layer, two experts, the second ten times larger."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (24, 32),
        "model.layers.0.input_layernorm.weight": (32,),
        f"{MOE}.gate.weight": (2, 32),
    }
    for expert in (0, 1):
        for name in ("gate_proj", "up_proj", "down_proj"):
            shapes[f"{MOE}.experts.{expert}.{name}.weight"] = (32, 48) if name == "down_proj" else (48, 32)
    tensors = {
        name: (rng.normal(size=shape) * (10 if ".experts.1." in name else 1)).astype(dtype)
        for name, shape in shapes.items()
    }
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 2}')
    return directory


@pytest.fixture
def model(tmp_path) -> Path:
    return tiny_model(tmp_path)


def test_every_byte_is_that_of_model_optimizer(tmp_path):
    config = QuantizeConfig(select=Selection(layers="linear"))
    quantize_checkpoint(golden_path("hf_tiny/qwen3_tied"), tmp_path / "out", config)
    ours, theirs = tensors_of(tmp_path / "out"), tensors_of(DATA / "checkpoint" / "modelopt")
    assert ours.keys() == theirs.keys()
    assert len([name for name in ours if name.endswith(".weight_scale_2")]) == 14
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        if name.endswith(".input_scale"):  # theirs is calibrated
            assert ours[name] == 1.0
        else:
            assert ours[name].tobytes() == tensor.tobytes(), name
    description = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    expected = json.loads((DATA / "checkpoint" / "modelopt" / "config.json").read_text())[
        "quantization_config"
    ]
    for key in ("quant_method", "quant_algo", "config_groups"):
        assert description[key] == expected[key]


def test_model_optimizer_reads_our_tiles_as_we_do(tmp_path):
    config = QuantizeConfig(select=Selection(layers="linear"), rule="te", tile="16x16")
    quantize_checkpoint(golden_path("hf_tiny/qwen3_tied"), tmp_path / "out", config)
    params, _ = load_dequantized(tmp_path / "out")
    read = load_file(DATA / "checkpoint" / "values_ours_te_16x16.safetensors")
    expected = read["model.layers.1.self_attn.k_proj.weight"]
    # They round block scale · global scale first, we code · block scale (exactly): an ulp apart.
    np.testing.assert_allclose(np.asarray(params.layers.k[1]), expected, rtol=2**-22, atol=0)


@pytest.mark.parametrize("rule", ["te", "modelopt"])
def test_gate_and_up_share_a_scale_in_each_expert(tmp_path, rule):
    source = mixture(tmp_path / "in")
    quantize_checkpoint(source, tmp_path / "out", QuantizeConfig(rule=rule))
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    scales = {}
    for expert in (0, 1):
        names = {part: f"{MOE}.experts.{expert}.{part}_proj" for part in ("gate", "up", "down")}
        gate, up = (jnp.asarray(before[f"{names[part]}.weight"]) for part in ("gate", "up"))
        together = quantize(jnp.concatenate([gate, up]), QuantSpec(rule=rule))
        for part, rows in (("gate", slice(0, 48)), ("up", slice(48, 96))):
            q = from_tensors(names[part], after)
            np.testing.assert_array_equal(q.codes, together.codes[rows])
            np.testing.assert_array_equal(q.scales, together.scales[rows])
            assert q.global_scale == together.global_scale
        down = quantize(jnp.asarray(before[f"{names['down']}.weight"]), QuantSpec(rule=rule))
        np.testing.assert_array_equal(from_tensors(names["down"], after).codes, down.codes)
        scales[expert] = after[f"{names['gate']}.weight_scale_2"]
    assert scales[1] > 5 * scales[0]
    for name in ("model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", f"{MOE}.gate.weight"):
        assert after[name].tobytes() == before[name].tobytes()
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignore == ["lm_head", f"{MOE}.gate"]


def test_real_mixture_of_experts(tmp_path):
    source = golden_path("hf_tiny/qwen3_moe")
    plan = quantize_checkpoint(source, tmp_path / "out", QuantizeConfig(select=Selection(layers="experts")))
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    chosen = [module for group in plan.groups for module in group]
    assert len(chosen) == 3 * 8 * 2
    assert all(".mlp.experts." in module for module in chosen)
    for module in chosen:
        weight = np.asarray(before[f"{module}.weight"], np.float32)
        error = np.asarray(dequantize(from_tensors(module, after))) - weight
        assert np.sqrt(np.mean(error**2)) < 0.12 * weight.std()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_wider_sources_are_rounded_to_bf16_first_and_the_rest_is_copied(tmp_path, dtype):
    source = mixture(tmp_path / "in", dtype)
    quantize_checkpoint(source, tmp_path / "out")
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    name = f"{MOE}.experts.0.down_proj"
    weight = jnp.asarray(before[f"{name}.weight"].astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(
        from_tensors(name, after).codes, quantize(weight, QuantSpec(rule="modelopt")).codes
    )
    assert after[f"{MOE}.gate.weight"].dtype == dtype


def test_shards_hold_the_same_tensors(model, tmp_path):
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    quantize_checkpoint(model, whole)
    quantize_checkpoint(model, sharded, QuantizeConfig(max_shard_bytes=4_000))
    files = sorted(sharded.glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 4_000 + 4_000 for file in files)
    left, right = tensors_of(whole), tensors_of(sharded)
    assert left.keys() == right.keys()
    assert all(left[name].tobytes() == right[name].tobytes() for name in left)
    for a, b in zip(load_quantized(whole)[0].layers, load_quantized(sharded)[0].layers, strict=True):
        np.testing.assert_array_equal(np.asarray(a.gate.values), np.asarray(b.gate.values))


def test_the_command_line(model, tmp_path, capsys):
    target = tmp_path / "out"
    arguments = [str(model), str(target), "--layers", "linear", "--rule", "te", "--tile", "16x16"]
    assert main([*arguments, "--dry-run"]) == 0
    assert not target.exists()
    assert "stays: lm_head" in capsys.readouterr().out
    assert main([*arguments, "--high-precision-layers", "1", "--input-scale", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "NVFP4 (te, 16x16): 7 weights of 1 layers in 4 groups" in out
    assert "sizes that are no multiple of 32" in out
    assert f"wrote {target}" in out
    tensors = tensors_of(target)
    assert tensors["model.layers.0.mlp.up_proj.input_scale"] == 0.5
    assert tensors["model.layers.1.mlp.up_proj.weight"].dtype == ml_dtypes.bfloat16
    assert (target / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert (target / "generation_config.json").is_file()
    assert json.loads((target / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "NVFP4"
    kept = json.loads((model / "config.json").read_text())
    assert kept.items() <= json.loads((target / "config.json").read_text()).items()

    assert main(arguments) == 2
    assert "exists: pass overwrite=True" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    assert "model.layers.1.mlp.up_proj.weight_scale" in tensors_of(target)
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments, "--tiles", "16x16"])
    assert exit_info.value.code == 2


def test_what_fails_leaves_nothing_behind(model, tmp_path, capsys):
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    save_file(tensors, model / "model.safetensors")
    before = {path.name for path in tmp_path.iterdir()}
    assert main([str(model), str(tmp_path / "out")]) == 2
    assert "model.layers.1.mlp.up_proj.weight holds a value that is not finite" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_copied_tensor_is_checked_too(model, tmp_path):
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = -np.inf
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds a value that is not finite"):
        quantize_checkpoint(model, tmp_path / "out")


def test_a_full_disk_is_noticed_before_anything_is_read(model, tmp_path, monkeypatch, capsys):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 1000, 1000))
    assert main([str(model), str(tmp_path / "out")]) == 1
    assert "are needed, 1.0 kB are free" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_old_directory_survives_a_failed_replacement(model, tmp_path):
    quantize_checkpoint(model, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = np.nan
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError, match="not finite"):
        quantize_checkpoint(model, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_refusals(model, tmp_path):
    with pytest.raises(ModelError, match="absent: not a directory"):
        quantize_checkpoint(tmp_path / "absent", tmp_path / "out")
    with pytest.raises(ModelError, match="is the source itself"):
        quantize_checkpoint(model, model, overwrite=True)
    quantize_checkpoint(model, tmp_path / "out")
    with pytest.raises(ModelError, match="is quantised already"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "again")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError):
        quantize_checkpoint(model, tmp_path / "file", overwrite=True)
    for settings, message in (
        ({"input_scale": 0.0}, "input_scale is 0.0"),
        ({"max_shard_bytes": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            QuantizeConfig(**settings)
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = np.zeros(tensors[name].shape, np.uint8)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError, match=rf"{name} has dtype U8, accepted are F64, F32, F16, BF16"):
        quantize_checkpoint(model, tmp_path / "other")


def test_progress_counts_every_byte_of_the_source(model, tmp_path):
    told: list[int] = []
    plan = quantize_checkpoint(model, tmp_path / "out", progress=told.append)
    assert sum(told) == plan.source_bytes
    assert plan.source_bytes == sum(tensor.nbytes for tensor in tensors_of(model).values())
    assert plan.output_bytes == sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values())


def test_a_quantised_directory_is_no_directory_for_load_model(model, tmp_path):
    quantize_checkpoint(model, tmp_path / "out")
    with pytest.raises(ModelError, match="quantization_config"):
        load_model(tmp_path / "out")
