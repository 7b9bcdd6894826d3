"""The calibrated Gate's thresholds from dumps, and the trainer's configuration that comes of them."""

import numpy as np
import pytest

from triage_jax.calibrate import from_dumps, main
from triage_jax.characterize import dump_path, write_dump
from triage_jax.config import TrainConfig, from_dict, laid_over, load_yaml
from triage_jax.objective import CalibrationConfig, GateConfig, ReferenceUpdate, TriageConfig, calibrate
from triage_jax.objective import calibration_from_json as read


@pytest.fixture
def run(tmp_path):
    """A run of four dumped updates, and their arrays."""
    rng, updates = np.random.default_rng(), []
    for step in (1, 2, 3, 10):
        sampler = rng.uniform(-4, -1, (8, 48)).astype(np.float32)
        learner = np.minimum(sampler + rng.normal(-0.05, 0.2, sampler.shape), 0).astype(np.float32)
        mask = np.arange(48) < rng.integers(8, 49, 8)[:, None]
        mask[0] = True  # a dump cuts off what no response fills
        advantages = rng.choice([-1.0, 1.0], 8).astype(np.float32)
        advantages[0] = -1
        write_dump(
            dump_path(tmp_path, step),
            step=step,
            learner_logp=learner,
            sampler_logp=sampler,
            mask=mask,
            advantages=advantages,
        )
        updates.append(ReferenceUpdate(learner - sampler, advantages, mask))
    return tmp_path, updates


def settings(updates: int) -> TriageConfig:
    return TriageConfig(gate=GateConfig(segment=8), calibration=CalibrationConfig(updates=updates))


def test_dumps_give_the_thresholds_of_their_earliest_updates(run):
    path, updates = run
    assert from_dumps([path], settings(3)) == calibrate(updates[:3], settings(3))
    assert from_dumps([path], settings(4)) == calibrate(updates, settings(4))
    with pytest.raises(ValueError, match=r"4 updates in the dumps; calibration.updates asks for 5"):
        from_dumps([path], settings(5))


def test_the_command_writes_json_and_a_configuration_that_the_trainer_takes(run, capsys):
    path, updates = run
    out = path / "gate.json"
    assert main([str(path), "--out", str(out), "--segment", "8", "--updates", "4"]) == 0
    expected = calibrate(updates, settings(4))
    assert read(out.read_text()) == expected
    laid = laid_over(load_yaml(path / "gate.yaml"), {"steps": 3})
    objective = from_dict(TrainConfig, laid, "gate.yaml").objective
    assert objective.name == "triage_calibrated"
    assert not objective.awaits_calibration
    assert objective.calibration.thresholds == expected.thresholds
    assert objective.gate.segment == 8
    assert "gate.yaml" in capsys.readouterr().out


def test_an_empty_directory_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("calibrate: ")
