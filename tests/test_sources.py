"""Shares of the gap: by hand on two vectors, one switch at a time, and the command on the quickstart model."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.tiny import tiny_config, tiny_params
from triage_jax.config import ConfigError
from triage_jax.model import Numerics, save_model
from triage_jax.model.presets import PRESETS
from triage_jax.nvfp4 import ExpertScopes, QuantSpec
from triage_jax.run import resolve_model
from triage_jax.sources import differences, main, overflow_warning, recipe_of, share


def test_statistics_by_hand():
    row = share("x", "a", "b", np.array([-1.0, -2.0, -3.0]), np.array([-1.0, -1.0, -4.0]))
    assert row.mean_abs == pytest.approx(2 / 3)
    assert row.k3 == pytest.approx((np.exp(-1) + np.exp(1) - 2) / 3)
    assert row.q05 == pytest.approx(-0.9)
    assert row.within == pytest.approx(1 / 3)


def test_every_difference_is_one_switch():
    learner, sampler = PRESETS["te_default"], PRESETS["sglang_per_token"]
    found = {source: switched for source, _, _, switched in differences(learner, sampler)}
    assert found.keys() == {
        "quantised layers",
        "weight tile",
        "weight arithmetic",
        "fused shards",
        "activation global scale",
        "activation arithmetic",
        "experts' activation scope",
    }
    dense = {source for source, *_ in differences(learner, sampler, experts=False)}
    assert found.keys() - dense == {"experts' activation scope"}
    assert found["weight tile"].weight == QuantSpec(tile="16x16", rule="modelopt")
    assert found["activation global scale"].activation == QuantSpec(scope="tensor", rule="flashinfer")
    assert found["fused shards"].fused_shards is False
    assert not list(differences(sampler, sampler))


def test_companions_move_together_and_impossible_ones_are_named():
    rows, static = PRESETS["sglang_per_token"], PRESETS["modelopt_static"]
    (change,) = differences(static, rows)
    assert change[3].activation == static.activation
    tiles = Numerics(activation=QuantSpec(tile="16x16"))
    alone = {source: switched for source, _, _, switched in differences(tiles, rows)}
    assert alone["activation tile"] is None, "a tile of sixteen rows cannot have a scale per row"


def test_the_command_measures_and_writes(tmp_path, capsys):
    figure, rows = tmp_path / "sources.png", tmp_path / "sources.json"
    arguments = ["--prompts", "8", "--new-tokens", "16", "--figure", str(figure), "--json", str(rows)]
    assert main(["quickstart", "--learner", "triage_reported", "--sampler", "parity", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "fused shards" in printed
    assert "the gap: learner minus sampler" in printed
    assert figure.read_bytes().startswith(b"\x89PNG")
    by_source = {row["source"]: row for row in json.loads(rows.read_text())}
    assert by_source["activation global scale"]["mean_abs"] > 1e-4
    assert by_source["the gap: learner minus sampler"]["within"] > 0.5


@pytest.mark.parametrize(
    ("source", "setting", "words"),
    [
        ("split-K accumulation", {"split_k": 4}, "4"),
        ("product of global scales", {"global_product": "encode"}, "encode"),
        ("experts' weight scope", {"expert_scopes": ExpertScopes(weight="layer")}, "layer"),
        ("experts' activation scope", {"expert_scopes": ExpertScopes(activation="expert")}, "expert"),
        ("experts' capacity", {"expert_capacity": 1.5}, "1.5"),
    ],
)
def test_one_switch_alone(source, setting, words):
    learner = replace(PRESETS["triage_reported"], **setting)
    ((name, ours, _, switched),) = differences(learner, PRESETS["triage_reported"])
    assert (name, ours) == (source, words)
    assert switched == learner


def test_a_recipe_of_the_command_is_read_as_in_a_configuration():
    text = "{preset: te_default, split_k: 4, expert_scopes: {weight: layer}}"
    scopes = ExpertScopes(weight="layer", activation="expert")
    expected = replace(PRESETS["te_default"], split_k=4, expert_scopes=scopes)
    assert recipe_of("learner", text) == expected
    assert recipe_of("sampler", "parity") == PRESETS["parity"]
    for wrong, message in (
        ("te_defualt", "--learner: 'te_defualt' is no recipe; accepted: bf16, te_default"),
        ("{preset: bf16, split: 2}", r"--learner\.split: unknown field; did you mean --learner\.split_k\?"),
        ("{", "--learner: not valid YAML"),
    ):
        with pytest.raises(ConfigError, match=message):
            recipe_of("learner", wrong)


def test_experts_without_room_are_reported(tmp_path, capsys):
    source = resolve_model("quickstart")
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    config = tiny_config(
        architecture="qwen3_moe",
        vocab_size=vocabulary,
        num_experts=4,
        experts_per_token=1,
        max_position_embeddings=128,
    )
    params = tiny_params(config, seed=5)
    # The router prefers one expert, which has room for 128 rows of one even share.
    router = params.layers.router.at[:, 0].multiply(8.0)
    params = replace(params, layers=replace(params.layers, router=router))
    save_model(tmp_path / "model", params, config, tokenizer_from=source)
    learner = "{preset: triage_reported, expert_capacity: 1.0, expert_scopes: {activation: expert}}"
    arguments = [
        "--learner",
        learner,
        "--sampler",
        "triage_reported",
        "--prompts",
        "16",
        "--new-tokens",
        "12",
    ]
    assert main([str(tmp_path / "model"), *arguments, "--json", str(tmp_path / "rows.json")]) == 0
    printed = capsys.readouterr().out
    assert "no room" in printed
    rows = {row["source"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    lost = rows["experts' capacity"]["overflow"]
    assert 0 < lost < 1
    assert (
        f"warning: experts had no room for up to {max(r['overflow'] or 0 for r in rows.values()):.2%}"
        in printed
    )
    assert rows["the gap: learner minus sampler"]["overflow"] > 0
    own = rows["experts' activation scope"]
    assert own["overflow"] is None
    assert own["mean_abs"] > 0


def test_no_limit_no_warning():
    row = share("x", "a", "b", np.zeros(3), np.ones(3))
    assert overflow_warning([row, replace(row, overflow=0.0)]) is None
    assert "up to 12.50% of their tokens" in overflow_warning([row, replace(row, overflow=0.125)])


def test_wrong_model(capsys):
    assert main(["nowhere"]) == 2
    assert "holds no config.json" in capsys.readouterr().err
