"""Kills and signals: what is kept, what is drawn again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from tests.evaluate.inputs import BATCH, PROBLEMS, SAMPLES, arguments, records
from tests.golden import ROOT
from triage_jax.evaluate.__main__ import main
from triage_jax.rollout import LocalEngine

TOTAL = PROBLEMS * SAMPLES
MANY = 30
"""Samples per problem of runs that must not end before they are interrupted"""


def start(command: list[str]) -> subprocess.Popen:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(jax.device_count())}
    return subprocess.Popen(
        [sys.executable, "-m", "triage_jax.evaluate", *command],
        env=environment | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_samples(out: Path, count: int, process: subprocess.Popen) -> None:
    path, deadline = out / "samples.jsonl", time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.002)
    pytest.fail(f"{count} samples were not reached; the process printed: {process.communicate()[0]}")


def test_kill_at_any_moment_loses_no_finished_sample(file, finished, tmp_path, capsys):
    out, many = tmp_path / "killed", ("--samples", str(MANY))
    process = start(arguments(out, file, *many))
    wait_for_samples(out, 6, process)
    process.kill()
    process.communicate()
    path = out / "samples.jsonl"
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    kept = whole.count(b"\n")
    assert 6 <= kept < PROBLEMS * MANY
    path.write_bytes(whole + b'{"problem": "sums:1", "sam')
    assert main(arguments(out, file, *many)) == 0
    printed = capsys.readouterr().out
    assert "cut off a half-written line of 26 bytes" in printed
    assert f"{kept} of {PROBLEMS * MANY} samples are there already" in printed
    assert path.read_bytes().startswith(whole)
    ours = records(out)
    assert len(ours) == PROBLEMS * MANY
    assert all(ours[key].seed == record.seed for key, record in records(finished).items())


def test_sigterm_stops_cleanly(file, tmp_path):
    out = tmp_path / "stopped"
    process = start(arguments(out, file, "--samples", str(MANY)))
    wait_for_samples(out, BATCH, process)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert "SIGTERM: every finished sample is in" in printed
    assert BATCH <= len(records(out)) < PROBLEMS * MANY
    assert (out / "samples.jsonl").read_bytes().endswith(b"\n")


def test_an_interrupt_keeps_the_batch_that_was_running(finished, file, tmp_path, capsys, monkeypatch):
    out, original = tmp_path / "stopped", LocalEngine.generate

    def interrupted(self, requests, sampling, progress=None):
        samples = original(self, requests, sampling, progress)
        signal.raise_signal(signal.SIGINT)
        return samples

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "generate", interrupted)
        assert main(arguments(out, file)) == 0
    assert "SIGINT: every finished sample is in" in capsys.readouterr().out
    assert len(records(out)) == BATCH
    assert f"Incomplete: {TOTAL - BATCH} samples are missing" in (out / "table.md").read_text()
    assert main(arguments(out, file)) == 0
    assert records(out) == records(finished), "the batches were cut where they would have been anyway"
