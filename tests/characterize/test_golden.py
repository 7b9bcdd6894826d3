"""Against the `rho` and `localization` rows that an independent float64 program recorded."""

import numpy as np
import pytest

from tests.golden import load
from triage_jax.characterize import (
    gap_of,
    localization,
    regions,
    tail_segments,
)

GOLDEN = load("triage_golden.npz")
BATCHES = ("b11", "b12", "b13")


def batch(name):
    mask = GOLDEN[f"{name}/mask"] > 0
    return gap_of(GOLDEN[f"{name}/old"], GOLDEN[f"{name}/samp"], mask), GOLDEN[f"{name}/adv"], mask


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("per_token", [False, True])
def test_rho_asym(name, per_token):
    gap, advantages, mask = batch(name)
    if per_token:
        advantages = np.broadcast_to(advantages[:, None], gap.shape)
    found = regions(gap, advantages, mask)
    values = [found.rho_asym(weighing) for weighing in ("raw", "length_normalised", "effective")]
    np.testing.assert_allclose(values, GOLDEN[f"{name}/rho"], rtol=1e-13)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("segment", [64, 128])
def test_localisation(name, segment):
    found = localization(tail_segments(*batch(name), threshold=-0.1, segment=segment))
    values = [found.r_amp, found.heavy_share, found.concentration, found.adjacency, found.segments]
    np.testing.assert_allclose(values, GOLDEN[f"{name}/localization{segment}"], rtol=1e-13)
