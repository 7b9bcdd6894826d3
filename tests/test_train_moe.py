"""Whole runs of a small mixture of experts, with the sampler's routes replayed and without."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import tiny_config, tiny_params
from triage_jax import train
from triage_jax.metrics import read_metrics
from triage_jax.model import load_model, save_model
from triage_jax.run import resolve_model


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    """Untrained experts behind the quickstart's tokenizer; a long prompt bucket keeps both sides' shapes apart."""
    source = resolve_model("quickstart")
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    config = tiny_config(
        architecture="qwen3_moe",
        vocab_size=vocabulary,
        num_experts=8,
        experts_per_token=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
    )
    path = tmp_path_factory.mktemp("mixture") / "model"
    save_model(path, tiny_params(config, seed=5), config, tokenizer_from=source)
    yield path
    shutil.rmtree(path)


def _run(out: Path, model: Path, *more: str) -> list[dict]:
    arguments = [
        *("--out", str(out), "--model.path", str(model), "--steps", "2", "--eval.problems", "0"),
        *("--rollout.prompts-per-step", "2", "--rollout.samples-per-prompt", "4"),
        *("--rollout.local.batch-size", "8", "--rollout.max-new-tokens", "16"),
        *("--objective.repair.scope", "whole", "--optimizer.learning-rate", "1e-3"),
        "--track.no-tensorboard",
        *more,
    ]
    assert train.main(arguments) == 0
    return [row for row in read_metrics(out / "metrics.jsonl") if "loss" in row]


def test_replay_leaves_the_residual_gap(tmp_path, mixture):
    free = _run(tmp_path / "free", mixture)
    replayed = _run(tmp_path / "replayed", mixture, "--rollout.replay-routing")
    assert all(row["optimizer/applied"] == 1 for row in free + replayed)
    # The first rollout is the same in both runs: only the learner's experts differ.
    before, after = free[0]["gap/abs_mean/token"], replayed[0]["residual_gap/abs_mean/token"]
    assert 0 < after < before
    assert not any(key.startswith("gap/") for key in replayed[0])
    start, _ = load_model(mixture)
    end, _ = load_model(tmp_path / "replayed/model")
    for name in ("router", "gate", "up", "down"):
        assert np.any(np.asarray(getattr(start.layers, name)) != np.asarray(getattr(end.layers, name))), name


def test_a_dense_model_has_no_routes_to_replay(tmp_path, capsys):
    assert train.main(["--out", str(tmp_path / "dense"), "--rollout.replay-routing"]) == 2
    assert "rollout.replay_routing = True: the model is dense" in capsys.readouterr().err


def test_a_tied_mixture_is_not_given_to_servers(tmp_path, mixture, capsys):
    arguments = ["--out", str(tmp_path / "tied"), "--model.path", str(mixture), "--rollout.engine", "sglang"]
    assert train.main(arguments) == 2
    assert "SGLang 0.5.23 ignores the tie" in capsys.readouterr().err
