"""Whole runs of the tiny model: what is written, what repeats, what survives, what is refused."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.golden import DATA, ROOT
from tests.tiny import tiny_config, tiny_params
from triage_jax import train
from triage_jax.characterize.dumps import dump_path, read_dump
from triage_jax.learner import Checkpoints, group_advantages
from triage_jax.metrics import read_metrics, repeatable
from triage_jax.model import load_model, save_model
from triage_jax.rollout import Capabilities, LocalEngine
from triage_jax.run import resolve_model
from triage_jax.tasks.tokenizer import TextCodec, save_tokenizer

STEPS = 6
QUICKSTART = resolve_model("quickstart")


def _arguments(out: Path, *more: str) -> list[str]:
    """The quickstart model on a batch of eight; rewards differ within groups, so that every step learns."""
    return [
        *("--out", str(out), "--steps", str(STEPS)),
        *("--rollout.prompts-per-step", "2", "--rollout.samples-per-prompt", "4"),
        *("--rollout.local.batch-size", "8"),
        *("--eval.problems", "6", "--checkpoint.every", "2", "--optimizer.learning-rate", "1e-4"),
        *("--track.dumps", "3"),
        *more,
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    assert train.main(_arguments(out)) == 0
    return out


def _rows(out: Path) -> list[dict]:
    return [repeatable(row) for row in read_metrics(out / "metrics.jsonl")]


def test_a_run_leaves_everything_behind(finished):
    rows = read_metrics(finished / "metrics.jsonl")
    steps = [row for row in rows if "reward/mean/response" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "eval/right" in row] == [0, STEPS]
    assert all(row.keys() == steps[0].keys() for row in steps)
    for row in steps:
        assert row["rollout/weight_version"] == row["step"] - 1
        assert row["time/rollout"] > 0
        assert sum(row[key] for key in row if key.startswith("verdict/")) == 8
    assert (finished / "report.png").read_bytes().startswith(b"\x89PNG")
    assert list((finished / "tensorboard").glob("events.*"))
    assert sorted(path.name for path in (finished / "dumps").iterdir()) == [
        "step_000003.npz",
        "step_000006.npz",
    ]
    for step in (3, 6):
        dump = read_dump(dump_path(finished, step))
        gap = (dump.learner_logp - dump.sampler_logp)[dump.mask]
        assert np.abs(gap).mean() == pytest.approx(steps[step - 1]["gap/abs_mean/token"], rel=1e-4)
    assert Checkpoints(finished / "checkpoints", keep=2).steps == [STEPS - 2, STEPS]

    before, config = load_model(QUICKSTART)
    after, config_after = load_model(finished / "model")
    assert config_after == config
    assert not np.array_equal(before.layers.gate, after.layers.gate)
    assert (finished / "model/tokenizer.json").read_text() == (QUICKSTART / "tokenizer.json").read_text()


def test_every_step_learns(finished):
    """What follows compares runs bit by bit: that shows something only where gradients are not zero."""
    steps = [row for row in _rows(finished) if "loss" in row]
    assert all(row["optimizer/applied"] == 1 for row in steps)
    assert sum(row["optimizer/grad_norm"] > 0 for row in steps) >= STEPS - 1
    assert len({row["loss"] for row in steps}) >= STEPS - 1
    assert all(row["gap/abs_mean/token"] > 1e-4 for row in steps)


def test_the_metric_list_is_complete(finished):
    row = next(row for row in read_metrics(finished / "metrics.jsonl") if "loss" in row)
    listed = {
        "loss", "loss/policy", "loss/repair", "gap/mean/token", "gap/abs_mean/token", "gap/max_abs",
        "gap/k1/token", "gap/k3_sampler_learner/token", "gap/k3_learner_sampler/token", "tis/ess/token",
        "tis/clip_fraction/token", "tis/abs/token", "ppo/clip_fraction/token", "ppo/approx_kl/token",
        "quadrant/q1/mass", "quadrant/q2/mass", "quadrant/q3/mass", "quadrant/q4/mass", "rho_asym/raw",
        "rho_asym/length_normalised", "gate/weight_mean/token", "gate/trigger_rate/mean_mild/segment",
        "gate/trigger_rate/mean_severe/segment", "gate/trigger_rate/tail_one/segment",
        "gate/trigger_rate/tail_full/segment", "repair/loss", "repair/active_fraction/segment",
        "repair/force_mean/segment", "entropy/token", "time/rollout", "time/learner", "time/refit",
        "throughput/tokens_per_second", "optimizer/grad_norm", "response/truncated",
    }  # fmt: skip
    assert listed <= row.keys()


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(finished, tmp_path):
    assert train.main(_arguments(tmp_path / "again")) == 0
    assert _rows(tmp_path / "again") == _rows(finished)
    ours, theirs = (load_file(out / "model/model.safetensors") for out in (finished, tmp_path / "again"))
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs[name])
    assert train.main(_arguments(tmp_path / "other", "--seed", "1")) == 0
    assert _rows(tmp_path / "other") != _rows(finished)


def _start(arguments: list[str]) -> subprocess.Popen:
    # As many devices as this process has: XLA cuts a reduction by the threads a device gets, which moves the last bit.
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(jax.device_count())}
    environment = {**os.environ, **devices, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "triage_jax.train", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _wait_for_step(out: Path, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        path = out / "metrics.jsonl"
        rows = read_metrics(path) if path.exists() else []
        if any("loss" in row and row["step"] >= step for row in rows):
            return
        if process.poll() is not None:
            break
        time.sleep(0.005)
    pytest.fail(f"step {step} was not reached; the process printed: {process.communicate()[0]}")


@pytest.mark.parametrize("step", [1, 4])
def test_kill_and_resume_gives_the_bits_of_an_uninterrupted_run(finished, tmp_path, step):
    out = tmp_path / "killed"
    process = _start(_arguments(out))
    _wait_for_step(out, step, process)
    process.kill()
    process.communicate()
    assert train.main(_arguments(out, "--resume")) == 0
    assert _rows(out) == _rows(finished)


def test_sigterm_saves_and_exits_0(finished, tmp_path):
    out = tmp_path / "stopped"
    process = _start(_arguments(out, "--checkpoint.every", "0", "--steps", "500"))
    _wait_for_step(out, 2, process)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert "SIGTERM: saved step" in printed
    saved = Checkpoints(out / "checkpoints", keep=2).steps
    assert len(saved) == 1
    assert 2 <= saved[0] < 500
    extended = str(saved[0] + 1)
    assert train.main(_arguments(out, "--resume", "--steps", extended)) == 0
    steps = [row for row in _rows(out) if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, saved[0] + 2))
    assert steps[:STEPS] == [row for row in _rows(finished) if "loss" in row][: len(steps)]


def test_resuming_a_finished_run_trains_no_step(finished, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    assert train.main(_arguments(out, "--resume")) == 0
    assert _rows(out) == _rows(finished)


def test_damaged_and_half_written_checkpoints_are_passed_over(finished, tmp_path, caplog):
    out = tmp_path / "damaged"
    shutil.copytree(finished, out)
    newest = out / "checkpoints" / str(STEPS)
    for path in newest.rglob("*"):
        if path.is_file() and path.stat().st_size > 200:
            path.write_bytes(path.read_bytes()[:100])
    shutil.copytree(out / "checkpoints" / str(STEPS - 2), out / "checkpoints" / "99.orbax-checkpoint-tmp")
    with caplog.at_level(logging.WARNING):
        assert train.main(_arguments(out, "--resume")) == 0
    assert f"checkpoint of step {STEPS} is damaged, trying the one before" in caplog.text
    assert _rows(out) == _rows(finished)


def test_a_full_disk_is_one_clear_error_and_loses_nothing(tmp_path, capsys, monkeypatch):
    out = tmp_path / "full"
    real = Checkpoints.__init__

    def failing(self, directory, keep):
        real(self, directory, keep)
        save = self._manager.save

        def full(step, **kwargs):
            if step == 4:
                raise OSError(28, "No space left on device")
            return save(step, **kwargs)

        monkeypatch.setattr(self._manager, "save", full)

    monkeypatch.setattr(Checkpoints, "__init__", failing)
    assert train.main(_arguments(out)) == 1
    error = capsys.readouterr().err
    assert "checkpoint of step 4 could not be written" in error
    assert "No space left on device" in error
    assert "the newest complete one is step 2" in error


def test_resume_refuses_what_cannot_change_and_says_what_differs(finished, tmp_path, capsys):
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    changed = ("--optimizer.learning-rate", "3e-2", "--objective.gate.scope", "whole")
    assert train.main(_arguments(out, "--resume", *changed)) == 2
    error = capsys.readouterr().err
    assert "objective.gate.scope: 'q3' -> 'whole'" in error
    assert "optimizer.learning_rate: 0.0001 -> 0.03" in error
    assert "steps" not in error.split("resume:")[1].split("Set them")[0]


def test_a_run_is_never_overwritten_unasked(finished, tmp_path, capsys):
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    assert train.main(_arguments(out)) == 2
    assert "already holds a run: pass --resume" in capsys.readouterr().err
    assert _rows(out) == _rows(finished)
    assert train.main(_arguments(out, "--overwrite", "--steps", "1")) == 0
    assert len(_rows(out)) == 3


def test_overwrite_never_deletes_what_is_not_a_run(tmp_path, capsys):
    for _ in range(2):
        (tmp_path / "thesis.txt").write_text("four years")
        assert train.main(_arguments(tmp_path, "--overwrite", "--steps", "0")) == 0
        assert (tmp_path / "thesis.txt").read_text() == "four years"


def test_two_processes_never_share_a_directory(tmp_path, capsys):
    out = tmp_path / "shared"
    process = _start(_arguments(out, "--steps", "100000"))
    try:
        _wait_for_step(out, 1, process)
        assert train.main(_arguments(out, "--resume", "--steps", "100000")) == 2
        assert "another process is training here" in capsys.readouterr().err
    finally:
        process.kill()
        process.communicate()


def test_updates_that_are_not_finite_stop_the_run_with_the_batch_kept(tmp_path, capsys, monkeypatch):
    def poisoned(rewards, group_size, **options):
        result = group_advantages(rewards, group_size, **options)
        result.advantages[:] = np.nan
        return result

    monkeypatch.setattr(train, "group_advantages", poisoned)
    out = tmp_path / "nan"
    assert train.main(_arguments(out, "--learner.max-skipped", "2")) == 1
    assert (
        "2 updates in a row were skipped, the last one because: loss or gradient not finite"
        in capsys.readouterr().err
    )
    kept = sorted((out / "skipped").glob("*.npz"))
    assert [path.name for path in kept] == ["step_000001.npz", "step_000002.npz"]
    with np.load(kept[0]) as batch:
        assert np.isnan(batch["advantages"]).all()
        assert batch["sampler_logp"].shape == batch["learner_logp"].shape == batch["mask"].shape == (8, 28)
    steps = [row for row in _rows(out) if "loss" in row]
    assert [row["optimizer/applied"] for row in steps] == [0, 0]
    assert steps[-1]["optimizer/skipped"] == 2


def test_prompts_that_are_too_long_are_counted_and_skipped(tmp_path):
    files = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "1+2+3+4+5+6=", "answer": "21"}]
    files.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ("--task.name", "jsonl", "--task.jsonl.files", str(files), "--task.jsonl.heldout-fraction", "0")
    data = (*data, "--eval.problems", "0", "--rollout.max-prompt-tokens", "8")
    out = tmp_path / "long"
    assert train.main(_arguments(out, *data, "--steps", "2")) == 0
    steps = [row for row in _rows(out) if "loss" in row]
    # Every epoch of two problems holds one that fits: four taken, and three or four passed over.
    assert sum(row["prompts/too_long"] for row in steps) in (3, 4)


def test_gsm8k_runs(tmp_path):
    """Real problems through a byte-level tokenizer and the mathematical verifier."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(["<eos>", *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    codec = TextCodec(tokenizer=tokenizer, eos_ids=(0,), pad_id=0, special_tokens={"eos_token": "<eos>"})
    save_tokenizer(codec, tmp_path / "tokenizer")
    config = tiny_config(vocab_size=272, max_position_embeddings=1024, eos_token_ids=(0,))
    save_model(tmp_path / "model", tiny_params(config), config, tokenizer_from=tmp_path / "tokenizer")
    source = next((DATA / "math").glob("gsm8k_test*.jsonl"))
    out = tmp_path / "gsm8k"
    arguments = _arguments(
        out, "--model.path", str(tmp_path / "model"), "--task.name", "jsonl", "--task.jsonl.files", str(source),
        "--task.jsonl.prompt-fields", "question", "--task.jsonl.answer-pattern", r"#### (.+)",
        "--task.jsonl.heldout-fraction", "0.2", "--rollout.max-prompt-tokens", "400",
        "--rollout.local.prompt-bucket", "400", "--steps", "2",
    )  # fmt: skip
    assert train.main(arguments) == 0
    steps = [row for row in _rows(out) if "loss" in row]
    assert len(steps) == 2
    assert all(row["verdict/error"] == row["verdict/timeout"] == 0 for row in steps)


def test_dry_run_plans_and_writes_nothing(tmp_path, capsys):
    out = tmp_path / "dry"
    assert train.main(_arguments(out, "--dry-run")) == 0
    printed = capsys.readouterr().out
    assert "2 prompts x 4 samples = 8 responses" in printed
    assert "learning_rate: 0.0001" in printed
    assert "Adam moments" in printed
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model.path", "nowhere"), "model.path: nowhere holds no config.json"),
        (("--rollout.max-new-tokens", "510"), "= 574; the model's context holds 512"),
        (("--learner.mesh.data", "16", "--rollout.samples-per-prompt", "8"), "needs 16 devices"),
        (("--task.name", "jsonl"), "task: a JSONL task needs files"),
        (("--task.arithmetic.prompt", "~{expression}"), "the tokenizer cannot write the prompt"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(tmp_path, capsys, flags, message):
    assert train.main(_arguments(tmp_path / "x", *flags)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_sides_that_speak_of_different_distributions_are_refused(tmp_path, capsys, monkeypatch):
    untempered = Capabilities(
        logprobs_follow_temperature=False, deterministic=True, overlaps=False, description="a server"
    )
    monkeypatch.setattr(LocalEngine, "capabilities", untempered)
    arguments = _arguments(tmp_path / "x", "--rollout.temperature", "0.7")
    assert train.main(arguments) == 2
    assert "returns log-probabilities at temperature 1 whatever" in capsys.readouterr().err


@pytest.mark.parametrize("mesh", [("8", "1"), ("2", "4")])
def test_a_run_on_eight_devices_follows_the_run_on_one(tmp_path, mesh):
    """In float32, where rounding is not magnified."""
    plain = ("--numerics.learner.execution", "float32", "--numerics.sampler.execution", "float32")
    mild = (*plain, "--optimizer.learning-rate", "1e-4", "--steps", "3")
    devices = ("--learner.mesh.data", mesh[0], "--learner.mesh.fsdp", mesh[1])
    assert train.main(_arguments(tmp_path / "one", *mild)) == 0
    assert train.main(_arguments(tmp_path / "eight", *mild, *devices)) == 0
    one, eight = ([row for row in _rows(tmp_path / name) if "loss" in row] for name in ("one", "eight"))
    for ours, theirs in zip(one, eight, strict=True):
        for key in ("reward/mean/response", "optimizer/grad_norm", "entropy/token", "gap/mean/token"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key


def test_one_step_ahead_splits_the_gap(tmp_path):
    """With the same BF16 numerics on both sides, what an older policy adds is the gap's staleness part."""
    bf16 = ("--numerics.learner.execution", "bf16", "--numerics.sampler.execution", "bf16")
    rate = ("--optimizer.learning-rate", "3e-3", "--optimizer.warmup-steps", "0")
    assert train.main(_arguments(tmp_path / "ahead", *bf16, *rate, "--rollout.max-staleness", "1")) == 0
    steps = [row for row in read_metrics(tmp_path / "ahead/metrics.jsonl") if "loss" in row]
    assert [row["rollout/weight_version"] for row in steps] == [0, 0, 1, 2, 3, 4]
    first, *later = steps
    assert first["gap/staleness_abs_mean/token"] == 0
    assert first["gap/numerics_abs_mean/token"] == pytest.approx(first["gap/abs_mean/token"], rel=1e-5)
    for row in later:
        stale, numeric = row["gap/staleness_abs_mean/token"], row["gap/numerics_abs_mean/token"]
        assert stale > 3 * numeric
        assert abs(row["gap/abs_mean/token"] - stale) <= numeric * 1.001


def test_tokens_older_than_allowed_are_not_trained_on(tmp_path, monkeypatch, capsys):
    def late(self, params, version):
        if version != 2:
            put(self, params, version)

    put = LocalEngine.update_weights
    monkeypatch.setattr(LocalEngine, "update_weights", late)
    assert train.main(_arguments(tmp_path / "late")) == 1
    assert "was drawn with weights 1 to 1; step 2 accepts 2 to 2" in capsys.readouterr().err
    assert Checkpoints(tmp_path / "late/checkpoints", keep=2).steps == [2]


@pytest.mark.parametrize("name", ["triage_calibrated", "bapo"])
def test_other_objectives_train(tmp_path, name):
    # So many prompts that two updates show some features' tails whatever the last bits, and so the samples, are.
    window = ("--objective.calibration.updates", "2", "--learner.micro-batch", "4", "--objective.name", name)
    assert train.main(_arguments(tmp_path / "run", *window, "--rollout.prompts-per-step", "16")) == 0
    rows = [row for row in read_metrics(tmp_path / "run/metrics.jsonl") if "loss" in row]
    assert [row["optimizer/applied"] for row in rows] == [1] * STEPS
    frozen = tmp_path / "run/gate_calibration.json"
    assert frozen.exists() == (name == "triage_calibrated")
    if frozen.exists():
        assert json.loads(frozen.read_text())["updates"] == 2
