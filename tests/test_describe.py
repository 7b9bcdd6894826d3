"""What a step's metrics say beside the objective's own."""

from dataclasses import replace

import pytest

from triage_jax.describe import parts_in_force
from triage_jax.objective import GateConfig, RepairConfig, TriageConfig

WAITING = TriageConfig(name="triage_calibrated")
CALIBRATED = replace(WAITING, calibration=replace(WAITING.calibration, thresholds=(1.0, 0.5, 1.0, 2.0, 4.0)))


@pytest.mark.parametrize(
    ("config", "gate", "calibrated", "repair", "tis"),
    [
        (TriageConfig(), 1, 0, 1, 1),
        (TriageConfig(gate=GateConfig(enabled=False)), 0, 0, 1, 1),
        (TriageConfig(name="triage_no_repair"), 1, 0, 0, 1),
        (TriageConfig(name="grpo"), 0, 0, 0, 0),
        (TriageConfig(name="tis_token"), 0, 0, 0, 1),
        (WAITING, 0, 0, 0, 1),
        (CALIBRATED, 1, 1, 1, 1),
    ],
)
def test_flags_tell_which_parts_act(config, gate, calibrated, repair, tis):
    flags = parts_in_force(config)
    keys = ("gate/enabled", "gate/calibrated", "repair/enabled", "tis/enabled")
    assert tuple(flags[key] for key in keys) == (gate, calibrated, repair, tis)


def test_scope_and_schedule_are_the_configurations():
    flags = parts_in_force(TriageConfig(gate=GateConfig(scope="whole"), repair=RepairConfig(start_step=300)))
    assert (flags["gate/whole_scope"], flags["repair/start_step"]) == (1, 300)
