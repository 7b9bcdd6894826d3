"""The metrics file: crashes, resumes, what JSON cannot hold."""

import json

import numpy as np
import pytest

from triage_jax.metrics import MetricLog, TensorBoard, read_metrics, repeatable, write_atomically


class _Recorder:
    def __init__(self):
        self.rows = []

    def log(self, row, step):
        self.rows.append((step, row))

    def close(self):
        self.rows.append("closed")


def test_rows_are_on_disk_when_log_returns_and_reach_the_trackers(tmp_path):
    path, tracker = tmp_path / "metrics.jsonl", _Recorder()
    log = MetricLog(path, [tracker])
    log.log({"loss": 0.5, "tokens": 3}, step=1)
    assert read_metrics(path) == [{"step": 1, "loss": 0.5, "tokens": 3}]
    log.close()
    assert tracker.rows == [(1, {"step": 1, "loss": 0.5, "tokens": 3}), "closed"]


def test_what_is_not_finite_is_null(tmp_path):
    log = MetricLog(tmp_path / "m.jsonl", [])
    log.log({"a": float("nan"), "b": float("inf"), "c": None, "d": True}, step=1)
    log.close()
    line = (tmp_path / "m.jsonl").read_text()
    assert json.loads(line) == {"step": 1, "a": None, "b": None, "c": None, "d": True}
    assert "NaN" not in line


def test_float32_values_survive_to_the_bit(tmp_path):
    values = np.random.default_rng(0).normal(size=200).astype(np.float32)
    log = MetricLog(tmp_path / "m.jsonl", [])
    log.log({str(i): value for i, value in enumerate(values)}, step=1)
    log.close()
    row = read_metrics(tmp_path / "m.jsonl")[0]
    assert [np.float32(row[str(i)]) for i in range(200)] == list(values)


def test_resuming_drops_later_rows_and_a_line_cut_short(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0, "eval/right": 1}\n{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    log = MetricLog(path, [], keep_steps=1)
    assert log.has("eval/right", 0)
    assert not log.has("eval/right", 1)
    log.log({"again": 1}, step=2)
    log.close()
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]
    assert read_metrics(path)[-1] == {"step": 2, "again": 1}


def test_resuming_before_the_first_checkpoint_starts_over(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0, "eval/right": 1}\n{"step": 1}\n')
    log = MetricLog(path, [], keep_steps=-1)
    assert not log.has("eval/right", 0)
    log.close()
    assert path.read_text() == ""


@pytest.mark.parametrize("line", ["not json", "[1]", '{"loss": 1}', '{"step": "x"}'])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl:2: not a metrics row"):
        read_metrics(path)


def test_repeatable_leaves_out_wall_clock_figures():
    row = {"step": 1, "loss": 2, "time/step": 3, "throughput/tokens_per_second": 4}
    assert repeatable(row) == {"step": 1, "loss": 2}


def test_an_atomic_write_replaces_and_leaves_nothing_beside(tmp_path):
    path = tmp_path / "config.yaml"
    for text in ("one", "two"):
        write_atomically(path, text)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_tensorboard_files_hold_the_scalars(tmp_path):
    board = TensorBoard(tmp_path)
    board.log({"step": 3, "reward": 0.25, "note": "x", "none": None}, 3)
    board.close()
    written = b"".join(file.read_bytes() for file in tmp_path.glob("events.*"))
    assert b"reward" in written
    assert b"note" not in written
