"""Objectives by name, a user's own among them; what goes wrong, and with which words."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from jax.sharding import AxisType, PartitionSpec

from tests.objective.inputs import random_batch
from triage_jax.objective import (
    OBJECTIVES,
    GateConfig,
    Objective,
    RivalConfig,
    TokenBatch,
    TokenLosses,
    TriageConfig,
    Variant,
    objective_by_name,
    registry,
    triage_loss,
    update_inputs,
    update_totals,
)
from triage_jax.objective.rival_config import (
    BapoConfig,
    CispoConfig,
    DppoConfig,
    DrGrpoConfig,
    GeoRejectionConfig,
    GspoConfig,
    IcepopConfig,
    K3RejectionConfig,
    OpsmConfig,
    TisSequenceConfig,
)
from triage_jax.objective.signed_mass import SignedMass, bound_grids, chosen_bounds

NOT_A_FUNCTION = 3


def twice(logp, batch, config, totals=None, *, weights=None, step=None):
    """A user's own objective."""
    loss, metrics = triage_loss(logp, batch, config, totals, weights=weights, step=step)
    return 2 * loss, metrics


def squared_gap(logp, response, config):
    """A user's own token losses."""
    return TokenLosses((logp - response.sampler_logp) ** 2, jnp.zeros_like(response.mask))


OWN_VARIANT = Variant(name="squared_gap", token_loss=squared_gap, reduction="token")


def test_a_users_own_token_losses():
    live, batch = random_batch(0, tokens=20)
    config = TriageConfig(name=f"{__name__}:OWN_VARIANT")
    weights, totals = update_inputs(batch, config)
    np.testing.assert_array_equal(weights, 1)
    objective = objective_by_name(config.name)
    loss = jax.jit(lambda x: objective(x, batch, config, totals, weights=weights)[0])(live)
    squares = np.square(np.asarray(live - batch.sampler_logp, float))[np.asarray(batch.mask)]
    np.testing.assert_allclose(loss, squares.mean(), rtol=1e-5)


def test_documented_names():
    for name in OBJECTIVES:
        assert f"`{name}`" in registry.__doc__
        assert objective_by_name(name) is OBJECTIVES[name]
        assert isinstance(OBJECTIVES[name], Objective)
        assert OBJECTIVES[name].token_loss.__doc__


def test_a_users_own():
    name = f"{__name__}:twice"
    assert objective_by_name(name) is twice
    live, batch = random_batch(0, tokens=70)

    @partial(jax.jit, static_argnums=(0, 1))
    def loss(config, objective):
        weights, totals = update_inputs(batch, config)
        return weights, objective(live, batch, config, totals, weights=weights)[0]

    for gate in (GateConfig(), GateConfig(enabled=False)):
        config = TriageConfig(name=name, gate=gate)
        weights, doubled = loss(config, twice)
        assert bool((weights < 1).any()) == gate.enabled
        np.testing.assert_allclose(doubled, 2 * loss(config, triage_loss)[1], rtol=1e-6)


@pytest.mark.parametrize(("name", "words"), [
    ("gpso", r"objective 'gpso' is not known; accepted: grpo, .*, or package\.module:function"),
    ("no_such_module:loss", r"module 'no_such_module' cannot be imported"),
    (f"{__name__}:thrice", r"has no 'thrice'"),
    (f"{__name__}:NOT_A_FUNCTION", r"is int; accepted: a function"),
    (":loss", r"objective ':loss' is not known"),
    ("math:", r"objective 'math:' is not known"),
])  # fmt: skip
def test_refused_names(name, words):
    with pytest.raises(ValueError, match=words):
        objective_by_name(name)
    with pytest.raises(ValueError, match=words):
        update_inputs(random_batch(0, tokens=4)[1], TriageConfig(name=name))


@pytest.mark.parametrize(("build", "words"), [
    (lambda: TriageConfig(name=""), r"name is ''"),
    (lambda: DrGrpoConfig(max_tokens=-1), r"rivals\.dr_grpo\.max_tokens is -1"),
    (lambda: GspoConfig(low=1.5), r"rivals\.gspo\.low is 1\.5; accepted: a value in \[0, 1\]"),
    (lambda: GspoConfig(high=-0.1), r"rivals\.gspo\.high is -0\.1"),
    (lambda: CispoConfig(low=5.0), r"rivals\.cispo\.low.* is \(5\.0, 5\.0\); accepted: finite, 0 <= low < high"),
    (lambda: TisSequenceConfig(high=0.0), r"rivals\.tis_sequence\.high is 0\.0"),
    (lambda: IcepopConfig(high=float("inf")), r"rivals\.icepop"),
    (lambda: GeoRejectionConfig(low=2.0), r"rivals\.geo_rejection"),
    (lambda: K3RejectionConfig(threshold=-1.0), r"rivals\.k3_rejection\.threshold"),
    (lambda: DppoConfig(kl_high=float("nan")), r"rivals\.dppo\.kl_high is nan"),
    (lambda: DppoConfig(ratio_max=0.0), r"rivals\.dppo\.ratio_max"),
    (lambda: OpsmConfig(threshold=-0.1), r"rivals\.opsm\.threshold"),
    (lambda: BapoConfig(low_max=1.5), r"0 <= low <= low_max <= high <= high_max"),
    (lambda: BapoConfig(step=0.0), r"rivals\.bapo\.step"),
])  # fmt: skip
def test_refused_settings(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_command_line():
    arguments = [
        "--name",
        "gspo",
        "--rivals.gspo.low",
        "0.1",
        "--calibration.thresholds",
        "6",
        "1",
        "2",
        "0.1",
        "0.2",
    ]
    config = tyro.cli(TriageConfig, args=arguments)
    assert config.name == "gspo"
    assert config.rivals == RivalConfig(gspo=GspoConfig(low=0.1))
    assert config.calibration.thresholds == (6, 1, 2, 0.1, 0.2)


def test_the_objective_and_not_the_configuration_says_which_parts_count():
    """A rival called with the default configuration, whose name is triage, is the rival all the same."""
    live, batch = random_batch(3, tokens=70)
    plain = jax.jit(lambda *a: OBJECTIVES["dapo"](*a, TriageConfig())[0])(live, batch)
    named = jax.jit(lambda *a: OBJECTIVES["dapo"](*a, TriageConfig(name="dapo", reduction="fixed"))[0])(
        live, batch
    )
    assert plain == named


@pytest.mark.parametrize(("target", "negative", "bounds"), [
    (0.2, [5.0, 5.1], (0.6, 1.2)),  # 1.0 >= 0.2 * 5.0: nothing moves
    (0.22, [5.0, 4.0], (0.8, 1.2)),  # 1.0 < 1.1, then 1.0 >= 0.88
    (0.22, [5.0, 5.1], (0.8, 1.6)),  # 1.0 < 1.122, then 1.25
    (0.26, [5.0, 5.1], (0.8, 2.0)),  # 1.25 < 1.326, then 1.4
    (0.3, [5.0, 5.1], (0.8, 2.0)),  # out of reach
])  # fmt: skip
def test_bounds_move_until_the_target_is_met(target, negative, bounds):
    config = BapoConfig(target=target, step=0.4)
    assert bound_grids(config) == ([0.6, 0.8], [1.2, pytest.approx(1.6), 2.0])
    mass = SignedMass(positive=jnp.asarray([1.0, 1.25, 1.4]), negative=jnp.asarray(negative))
    np.testing.assert_allclose(chosen_bounds(mass, config), bounds, rtol=1e-6)


def test_signed_mass_of_an_update():
    """Ratios .5, 2, 1 with A = 1, and .5, 3 with A = -2; a masked token counts for nothing."""
    gap = jnp.log(jnp.asarray([[0.5, 2.0, 1.0], [0.5, 3.0, 9.0]]))
    batch = TokenBatch(
        gap, jnp.zeros_like(gap), jnp.asarray([1.0, -2.0]), jnp.asarray([[1, 1, 1], [1, 1, 0]])
    )
    config = TriageConfig(name="bapo", rivals=RivalConfig(bapo=BapoConfig(step=0.8)))
    mass = update_totals(batch, jnp.ones_like(gap), config).signed_mass
    np.testing.assert_allclose(mass.positive, [0.5 + 1.2 + 1, 0.5 + 2 + 1], rtol=1e-6)
    np.testing.assert_allclose(mass.negative, [2 * (0.6 + 3), 2 * (0.8 + 3)], rtol=1e-6)


def test_default_grids():
    lows, highs = bound_grids(BapoConfig())
    np.testing.assert_allclose(lows, np.linspace(0.6, 0.8, 5))
    np.testing.assert_allclose(highs, np.linspace(1.2, 2.0, 17))


def test_bapo_needs_its_own_totals():
    live, batch = random_batch(0, tokens=8)
    totals = update_totals(batch, jnp.ones_like(live), TriageConfig())
    with pytest.raises(ValueError, match=r"totals\.signed_mass is None"):
        OBJECTIVES["bapo"](live, batch, TriageConfig(name="bapo"), totals)


@pytest.mark.parametrize("name", ["bapo", "gspo"])
def test_shard_map_over_eight_devices(name):
    """Totals summed over devices give every device the loss of the whole."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = PartitionSpec("data"), PartitionSpec()
    config = TriageConfig(name=name, rivals=RivalConfig(bapo=BapoConfig(target=0.9)))
    objective = OBJECTIVES[name]

    def on_device(live, batch):
        weights, totals = update_inputs(batch, config)
        totals = jax.tree.map(lambda x: jax.lax.psum(x, "data"), totals)
        loss, gradient = jax.value_and_grad(
            lambda x: objective(x, batch, config, totals, weights=weights)[0]
        )(live)
        return jax.lax.psum(loss, "data"), gradient

    with jax.enable_x64(True):
        live, batch = random_batch(5, tokens=40, dtype=np.float64)
        specs = (split, TokenBatch(split, split, split, split))
        sharded = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=(whole, split)))
        loss, gradient = sharded(live, batch)
        expected, expected_gradient = jax.jit(jax.value_and_grad(lambda x: objective(x, batch, config)[0]))(
            live
        )
        np.testing.assert_allclose(loss, expected, rtol=1e-12)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-12, atol=1e-17)


def test_vmap_over_candidates():
    live, batch = random_batch(6, tokens=20)
    objective, config = OBJECTIVES["opsm"], TriageConfig()
    candidates = jnp.stack([live, live - 0.1, live + 0.1])
    one = jax.jit(lambda x: objective(x, batch, config)[0])
    np.testing.assert_allclose(jax.jit(jax.vmap(one))(candidates), [one(x) for x in candidates], rtol=1e-5)
