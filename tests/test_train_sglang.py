"""Whole runs whose samples come over HTTP, from the tests' small server: identity, death, resumption, staleness."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rollout.sglang.fake_server import FakeServer
from triage_jax import train
from triage_jax.learner import Checkpoints
from triage_jax.metrics import read_metrics, repeatable

STEPS = 5


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    server.server_info["max_req_input_len"] = 250
    yield server
    server.kill()


def _arguments(out: Path, server: FakeServer, *more: str) -> list[str]:
    return [
        *("--out", str(out), "--steps", str(STEPS), "--eval.problems", "0"),
        *("--rollout.prompts-per-step", "2", "--rollout.samples-per-prompt", "4"),
        *("--rollout.engine", "sglang", "--rollout.sglang.urls", server.url),
        *("--rollout.sglang.request-timeout", "5", "--rollout.sglang.startup-timeout", "5"),
        *("--rollout.sglang.retries", "2", "--rollout.sglang.backoff", "0.01"),
        *("--numerics.learner.execution", "bf16", "--optimizer.learning-rate", "1e-3"),
        # The hashes of the server earn no reward; Repair over all tokens moves the weights at every step.
        *("--objective.repair.scope", "whole", "--checkpoint.every", "2"),
        *("--track.no-tensorboard", "--checkpoint.no-export"),
        *more,
    ]


def _steps(out: Path) -> list[dict]:
    return [row for row in read_metrics(out / "metrics.jsonl") if "loss" in row]


def _repeatable(out: Path) -> list[dict]:
    """Without times and without what the engine says of itself."""
    return [
        {key: value for key, value in repeatable(row).items() if not key.startswith("engine/")}
        for row in _steps(out)
    ]


def test_every_step_is_drawn_with_its_own_weights(tmp_path, server):
    assert train.main(_arguments(tmp_path / "run", server)) == 0
    rows = _steps(tmp_path / "run")
    assert [row["rollout/weight_version"] for row in rows] == [0, 1, 2, 3, 4]
    assert list(server.history) == [f"step-{step}" for step in range(STEPS + 1)]
    assert len(set(server.history.values())) == STEPS + 1, "every refit brought new weights"
    generated = [body for route, body in server.calls if route == "/generate"]
    sampled = [body for body in generated if body["sampling_params"]["max_new_tokens"] > 0]
    assert len({body["rid"] for body in sampled}) == len(sampled) >= STEPS * 8
    for row in rows:
        assert row["engine/servers_live"] == 1
        assert row["engine/probe_gap_mean"] > 0
        assert row["gap/staleness_abs_mean/token"] == 0
    kept = sorted(path.name for path in (tmp_path / "run/weights").iterdir() if path.is_dir())
    assert len(kept) <= 2


def test_a_run_whose_server_died_resumes_where_it_was(tmp_path, server, capsys):
    assert train.main(_arguments(tmp_path / "whole", server)) == 0

    out = tmp_path / "cut"
    server.history.clear()
    original = server._update_weights_from_disk

    def update(body):
        if body["weight_version"] == "step-3":
            server.fault("/generate", "silent", times=10_000)
            server.fault("/model_info", "silent", times=10_000)
            server.fault("/ready", "silent", times=10_000)
        return original(body)

    server._update_weights_from_disk = update
    assert train.main(_arguments(out, server)) == 1
    error = capsys.readouterr().err
    assert server.url in error
    assert "--resume" in error
    saved = Checkpoints(out / "checkpoints", keep=2).steps[-1]
    assert saved == len(_steps(out)) == 3, "what was learned before the server died is kept"

    server._update_weights_from_disk = original
    server._faults.clear()
    server.kill()
    server.restart()
    assert train.main(_arguments(out, server, "--resume")) == 0
    assert _repeatable(out) == _repeatable(tmp_path / "whole"), "nothing lost, nothing trained twice"


def test_one_step_ahead_over_http(tmp_path, server):
    server.token_seconds = 0.005
    assert train.main(_arguments(tmp_path / "run", server, "--rollout.max-staleness", "1")) == 0
    rows = _steps(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["step"] - 2 <= row["rollout/weight_version"] <= row["step"] - 1
    assert any(row["rollout/weight_version"] == row["step"] - 2 for row in rows)
    # The server's log-probabilities come from a hash: the numeric part dwarfs the staleness, and both are there.
    assert all(row["gap/numerics_abs_mean/token"] > 0.1 for row in rows)
    stale = [row["gap/staleness_abs_mean/token"] for row in rows]
    assert stale[0] == 0
    assert max(stale) > 0
    assert any(row["time/wait"] < 0.9 * row["time/rollout"] for row in rows[1:]), (
        "sampling overlapped learning"
    )
