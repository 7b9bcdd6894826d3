"""Against the recorded float64 values of an independent program (`triage_golden.npz`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden import load
from triage_jax.objective import (
    GateConfig,
    RepairConfig,
    TokenBatch,
    TriageConfig,
    finalize,
    gate_weights,
    mismatch_metrics,
    repair_loss,
    triage_loss,
)

GOLDEN = load("triage_golden.npz")
BATCHES = sorted({str(case).split("/")[0] for case in GOLDEN["cases"]})
CASES = sorted({str(case).split("/", 1)[1] for case in GOLDEN["cases"]})


def config_of(case):
    reduction, gate, repair = case.split("/")
    return TriageConfig(reduction=reduction, gate=GateConfig(scope=gate), repair=RepairConfig(scope=repair))


def batch_of(name, dtype):
    new, old, sampler, advantages = (
        jnp.asarray(GOLDEN[f"{name}/{key}"], dtype) for key in ("new", "old", "samp", "adv")
    )
    return new, TokenBatch(old, sampler, advantages, jnp.asarray(GOLDEN[f"{name}/mask"], dtype))


def evaluate(logp, batch, config):
    def scalar(logp):
        loss, metrics = triage_loss(logp, batch, config)
        return loss, jnp.stack([loss, metrics["loss/policy"].value(), metrics["repair/loss"].value()])

    (_, scalars), gradient = jax.value_and_grad(scalar, has_aux=True)(logp)
    weights = gate_weights(batch.old_logp - batch.sampler_logp, batch.advantages, batch.mask, config)
    return scalars, gradient, weights


jitted = jax.jit(evaluate, static_argnums=2)


def check(case, name, dtype, rtol, function):
    scalars, gradient, weights = function(*batch_of(name, dtype), config_of(case))
    assert scalars.dtype == gradient.dtype == weights.dtype == dtype
    expected = GOLDEN[f"{name}/{case}/grad"]
    np.testing.assert_allclose(gradient, expected, rtol=rtol, atol=rtol * np.abs(expected).max())
    np.testing.assert_allclose(scalars, GOLDEN[f"{name}/{case}/scalars"], rtol=rtol)
    hundredths = np.rint(100 * np.asarray(weights)) * GOLDEN[f"{name}/mask"]
    np.testing.assert_array_equal(hundredths, np.rint(100 * GOLDEN[f"{name}/{case}/weights"]))


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("case", CASES)
def test_float32(case, name):
    check(case, name, jnp.float32, 1e-5, jitted)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("case", CASES)
def test_float64(case, name):
    with jax.enable_x64(True):
        check(case, name, jnp.float64, 1e-12, jitted)


@pytest.mark.parametrize("case", CASES)
def test_eager(case):
    check(case, BATCHES[0], jnp.float32, 1e-5, evaluate)


@pytest.mark.parametrize("name", BATCHES)
def test_repair_loss_alone(name):
    alone = jax.jit(repair_loss, static_argnums=2)
    for case in ("response/q3/adv_positive", "response/q3/q2", "response/whole/whole"):
        value = alone(*batch_of(name, jnp.float32), config_of(case))
        np.testing.assert_allclose(value, GOLDEN[f"{name}/{case}/scalars"][2], rtol=1e-5)


@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, 1e-5), (jnp.float64, 1e-12)])
def test_rho_asym(dtype, rtol):
    statistics = jax.jit(mismatch_metrics)
    for name in BATCHES:
        with jax.enable_x64(dtype == jnp.float64):
            values = finalize(statistics(batch_of(name, dtype)[1]))
        for key, expected in zip(
            ("raw", "length_normalised", "effective"), GOLDEN[f"{name}/rho"], strict=True
        ):
            np.testing.assert_allclose(values[f"rho_asym/{key}"], expected, rtol=rtol)
