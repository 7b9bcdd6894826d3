"""Which weights are quantised, which are listed as left alone: by names only."""

import json
import os
import subprocess

import pytest

from tests.golden import ROOT
from triage_jax.model.config import ModelError
from triage_jax.model.selection import Selection, ignored_modules, unit_of
from triage_jax.nvfp4.checkpoint import hf_quant_config, quantization_config

ATTENTION = {"q_proj": (64, 32), "k_proj": (32, 32), "v_proj": (32, 32), "o_proj": (32, 64)}
MLP = {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}


def dense(layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (100, 32)}
    for index in range(layers):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (32,)
        shapes |= {f"{layer}.self_attn.{name}.weight": shape for name, shape in ATTENTION.items()}
        shapes[f"{layer}.self_attn.q_norm.weight"] = (16,)
        shapes |= {f"{layer}.mlp.{name}.weight": shape for name, shape in MLP.items()}
    return shapes | {"model.norm.weight": (32,), "lm_head.weight": (100, 32)}


def experts(layers: int, count: int = 2) -> dict[str, tuple[int, ...]]:
    shapes = {name: shape for name, shape in dense(layers).items() if ".mlp." not in name}
    for index in range(layers):
        mlp = f"model.layers.{index}.mlp"
        shapes[f"{mlp}.gate.weight"] = (count, 32)
        shapes |= {
            f"{mlp}.experts.{e}.{name}.weight": shape for e in range(count) for name, shape in MLP.items()
        }
    return shapes


def modules(groups) -> list[str]:
    return [module for group in groups for module in group]


def test_mlp_takes_gate_and_up_together_and_down_alone():
    shapes = dense(2)
    groups = Selection().select(shapes)
    assert groups == [
        group
        for mlp in ("model.layers.0.mlp", "model.layers.1.mlp")
        for group in ((f"{mlp}.gate_proj", f"{mlp}.up_proj"), (f"{mlp}.down_proj",))
    ]
    assert ignored_modules(shapes, groups) == [
        "lm_head",
        "model.layers.0.self_attn*",
        "model.layers.1.self_attn*",
    ]


def test_linear_adds_attention_with_q_k_v_together():
    shapes = dense(1)
    groups = Selection(layers="linear").select(shapes)
    attention = "model.layers.0.self_attn"
    assert groups[0] == tuple(f"{attention}.{name}_proj" for name in "qkv")
    assert groups[1] == (f"{attention}.o_proj",)
    assert len(modules(groups)) == 7
    assert ignored_modules(shapes, groups) == ["lm_head"]


def test_every_expert_has_a_group_and_the_router_stays():
    shapes = experts(1)
    groups = Selection(layers="experts").select(shapes)
    mlp = "model.layers.0.mlp"
    assert groups == [
        group
        for e in (0, 1)
        for group in (
            (f"{mlp}.experts.{e}.gate_proj", f"{mlp}.experts.{e}.up_proj"),
            (f"{mlp}.experts.{e}.down_proj",),
        )
    ]
    assert groups == Selection(layers="mlp").select(shapes)
    assert set(ignored_modules(shapes, groups)) == {"lm_head", f"{mlp}.gate", "model.layers.0.self_attn*"}


def test_experts_leaves_a_dense_layer_alone():
    shapes = experts(1) | {
        name.replace("layers.0", "layers.1"): shape for name, shape in dense(1).items() if ".layers." in name
    }
    groups = Selection(layers="experts").select(shapes)
    assert {module.split(".")[2] for module in modules(groups)} == {"0"}
    assert "model.layers.1.mlp*" in ignored_modules(shapes, groups)


def test_last_layers_and_globs_stay():
    shapes = dense(12)
    kept = Selection(high_precision_layers=1, exclude=("model.layers.1.*",)).select(shapes)
    assert {module.split(".")[2] for module in modules(kept)} == {str(i) for i in range(11)} - {"1"}
    listed = ignored_modules(shapes, kept)
    # Patterns of layer 1 must not reach layers 10 and 11.
    assert "model.layers.1.mlp*" in listed
    assert "model.layers.11.mlp*" in listed
    assert not [name for name in listed if name.startswith("model.layers.10.mlp")]


def test_part_of_a_block_is_listed_by_name_with_the_fused_product():
    shapes = dense(1)
    groups = Selection(layers="linear", exclude=("*.down_proj", "*.[qkv]_proj")).select(shapes)
    attention = "model.layers.0.self_attn"
    assert set(ignored_modules(shapes, groups)) == {
        "lm_head",
        "model.layers.0.mlp.down_proj",
        *(f"{attention}.{name}" for name in ("q_proj", "k_proj", "v_proj", "qkv_proj")),
    }


def test_experts_of_a_left_out_layer_are_one_pattern():
    shapes = experts(2) | {"model.layers.0.mlp.shared_expert.down_proj.weight": (32, 48)}
    groups = Selection(exclude=("model.layers.0.mlp.experts.*",)).select(shapes)
    assert "model.layers.0.mlp.experts*" in ignored_modules(shapes, groups)
    assert "model.layers.0.mlp.shared_expert.down_proj" in modules(groups)


@pytest.mark.parametrize(
    ("shapes", "settings", "message"),
    [
        (dense(1), {"exclude": ("*.up_proj",)}, r"mlp\.gate_up_proj: .*up_proj would stay BF16 and .*gate_proj"),
        (
            dense(1),
            {"layers": "linear", "exclude": ("*.k_proj",)},
            r"self_attn\.qkv_proj: .*one product; exclude all of them or none",
        ),
        (experts(1), {"exclude": ("*.experts.1.*",)}, r"mlp\.experts: .*experts\.1\.gate_proj would stay BF16"),
        (experts(1), {"exclude": ("*.experts.*.down_proj",)}, r"mlp\.experts: "),
        (dense(1), {"exclude": ("model.layer.*",)}, r"exclude 'model\.layer\.\*': matches no projection"),
        (dense(2), {"high_precision_layers": 2}, "nothing is left to quantise among 14 projections in 2 layers"),
        (dense(1), {"layers": "experts"}, "layers 'experts', .* nothing is left"),
        ({}, {}, "nothing is left to quantise among 0 projections"),
        (
            dense(1) | {"model.layers.0.mlp.down_proj.weight": (32, 40)},
            {},
            r"down_proj\.weight has shape \[32, 40\].*multiple of 16",
        ),
        (dense(1) | {"model.layers.0.mlp.down_proj.weight": (32,)}, {}, r"shape \[32\]"),
        (
            {"model.layers.0.mlp.experts.gate_up_proj": (2, 96, 32)},
            {},
            "experts.gate_up_proj: stacked experts; accepted is one tensor per expert",
        ),
    ],
)  # fmt: skip
def test_refusals_name_the_weight(shapes, settings, message):
    with pytest.raises(ModelError, match=message):
        Selection(**settings).select(shapes)


def test_bad_settings():
    with pytest.raises(ValueError, match="high_precision_layers is -1"):
        Selection(high_precision_layers=-1)


@pytest.mark.sglang
def test_sglang_quantises_what_was_selected():
    python = ROOT / ".venv-sglang" / "bin" / "python"
    if not python.exists():
        pytest.skip("runs once scripts/sglang_cpu_env.sh has made .venv-sglang (3 GB, minutes)")
    dense_part = {name.replace("layers.", "layers.2"): shape for name, shape in dense(10).items()}
    shapes = experts(2) | dense_part
    selection = Selection(
        layers="linear", high_precision_layers=1, exclude=("model.layers.0.*", "*.21.*_proj", "*.down_proj")
    )
    # All experts of layer 1 would be split by the last glob.
    shapes = {name: shape for name, shape in shapes.items() if "experts" not in name or "down" not in name}
    groups = selection.select(shapes)
    ignore, producer = ignored_modules(shapes, groups), {"name": "triage_jax", "version": "0"}
    configs = [quantization_config(ignore, producer), hf_quant_config(ignore, producer)]
    linear = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if len(shape) == 2 and "embed" not in name and not name.endswith("mlp.gate.weight")
    ]
    units = dict.fromkeys(unit_of(module) for module in linear)
    run = subprocess.run(
        [python, ROOT / "tests" / "model" / "sglang_reads.py"],
        input=json.dumps({"configs": configs, "modules": list(units)}),
        env=os.environ
        | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(ROOT / "scripts" / "sglang_cpu" / "stand_ins")},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    chosen = {unit_of(module): None for module in modules(groups)}
    expected = [unit for unit in units if unit in chosen]
    assert json.loads(run.stdout.splitlines()[-1]) == [expected, expected]
    assert "model.layers.1.mlp.experts" in chosen
    assert len(chosen) < len(units)
