"""Shares of the gap: by hand on two vectors, one switch at a time, and the command on the quickstart model."""

import json

import numpy as np
import pytest

from triage_jax.model import Numerics
from triage_jax.model.presets import PRESETS
from triage_jax.nvfp4 import QuantSpec
from triage_jax.sources import differences, main, share


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
    }
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


def test_wrong_model(capsys):
    assert main(["nowhere"]) == 2
    assert "holds no config.json" in capsys.readouterr().err
