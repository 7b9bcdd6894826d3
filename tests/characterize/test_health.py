"""The early warning: healthy rows, each thing that can be wrong, peers' names."""

import json

import pytest

from triage_jax.characterize import DumpError
from triage_jax.characterize.health import LIMITS, HealthWatch, assess, check
from triage_jax.characterize.names import FRAMEWORKS, NAMES, our_names
from triage_jax.characterize.watch import metrics_file, read_rows
from triage_jax.objective import TokenBatch, finalize, mismatch_metrics

HEALTHY = {
    "gap/abs_mean/token": 0.01,
    "gap/prob_difference/token": 0.003,
    "gap/mult_prob_error/token": 1.01,
    "gap/k3_sampler_learner/token": 0.001,
    "gap/js/token": 0.0003,
    "gap/k1/token": 0.001,
    "tis/ratio/token": 1.0,
    "tis/ess/token": 0.99,
    "gap/within_0.05/token": 0.95,
    "rho_asym/raw": 1.1,
    "reward/mean/response": 0.5,
    "optimizer/applied": True,
    "optimizer/grad_norm": 1.0,
    "loss": 0.1,
}


def rows(count=45, **changes):
    return [{"step": s} | HEALTHY | changes for s in range(1, count + 1)]


def names(found):
    return [finding.name for finding in found]


def test_a_healthy_run_has_no_warnings_and_every_verdict():
    assert check(rows()) == []
    assert len(assess(rows())) == len(LIMITS) + 5
    assert check([]) == check([{"step": 0, "eval/reward/response": 0.1}]) == []


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("gap/prob_difference/token", 0.011, "gap/prob_difference/token (verl)"),
        ("gap/mult_prob_error/token", 1.06, "gap/mult_prob_error/token (NeMo-RL)"),
        ("gap/k3_sampler_learner/token", 0.016, "gap/k3_sampler_learner/token (prime-rl)"),
        ("gap/js/token", 0.008, "gap/js/token (NeMo-RL)"),
        ("gap/k1/token", -0.2, "gap/k1/token (verl)"),
        ("tis/ratio/token", 0.4, "tis/ratio/token (verl)"),
        ("tis/ess/token", 0.2, "tis/ess/token (verl)"),
        ("gap/within_0.05/token", 0.7, "gap/within_0.05/token (triage_jax)"),
        ("rho_asym/raw", 1.6, "rho_asym"),
        ("optimizer/applied", False, "finite"),
        ("loss", None, "finite"),
    ],
)
def test_each_limit(key, value, name):
    found = check(rows(**{key: value}))
    assert names(found) == [name]
    assert found[0].step == 45
    assert found[0].text


def test_rho_asym_adds_masses_before_it_divides():
    window = rows(40, **{"quadrant/q3/mass": 10.0, "quadrant/q1/mass": 10.0})
    window[-1] |= {"quadrant/q3/mass": 500.0, "quadrant/q1/mass": 1.0, "rho_asym/raw": 500.0}
    (finding,) = [f for f in assess(window) if f.name == "rho_asym"]
    assert finding.value == pytest.approx((190 + 500) / 191)
    assert not finding.healthy


def test_a_jump_and_slow_growth():
    sudden = rows()
    sudden[-1] |= {"gap/abs_mean/token": 0.06}
    assert names(check(sudden)) == ["gap jump"]
    slow = [row | {"gap/abs_mean/token": 0.004 * 1.03**i} for i, row in enumerate(rows(60))]
    assert names(check(slow)) == ["gap growth"]


def test_collapse_of_the_reward():
    fallen = rows()
    for row in fallen[-3:]:
        row["reward/mean/response"] = 0.05
    assert names(check(fallen)) == ["reward"]
    fallen[-2]["reward/mean/response"] = 0.3
    assert check(fallen) == []
    assert check(rows(**{"reward/mean/response": 0.02})) == []  # low from the start: hard, not collapsed


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("training/rollout_probs_diff_mean", "gap/prob_difference/token"),
        ("train_rollout_logprob_abs_diff", "gap/abs_mean/token"),
        ("sampling/sampling_logp_difference/mean", "gap/abs_mean/token"),
        ("token_mult_prob_error", "gap/mult_prob_error/token"),
        ("rollout_corr/rollout_is_eff_sample_size", "tis/ess/token"),
    ],
)
def test_peers_names(name, key):
    assert our_names({name: 0.5, "step": 3}) == {key: 0.5, "step": 3}
    assert our_names({"step": 3, "data": {name: 0.5}})[key] == 0.5


def test_residual_gaps_stand_for_gaps():
    assert our_names({"residual_gap/js/token": 0.5})["gap/js/token"] == 0.5
    assert our_names({"residual_gap/js/token": 0.5, "gap/js/token": 0.1})["gap/js/token"] == 0.1


def test_a_name_means_one_of_our_keys_and_those_exist():
    import jax.numpy as jnp

    given = {(name, key) for key, by in NAMES.items() for group in by.values() for name in group}
    assert len(given) == len({name for name, _ in given})
    assert {framework for by in NAMES.values() for framework in by} == set(FRAMEWORKS)
    ones = jnp.ones((1, 4))
    ours = finalize(mismatch_metrics(TokenBatch(-ones, -ones, jnp.ones(1), ones > 0))).keys()
    elsewhere = {"gap/prob_difference/token", "ppo/clip_fraction/token", "ppo/approx_kl/token"}
    elsewhere |= {"entropy/token", "optimizer/grad_norm", "reward/mean/response"}
    assert NAMES.keys() - elsewhere <= ours


def test_metrics_files(tmp_path):
    with pytest.raises(DumpError, match=r"neither metrics.jsonl nor trainer_state.json"):
        metrics_file(tmp_path)
    with pytest.raises(FileNotFoundError):
        metrics_file(tmp_path / "absent")
    state = tmp_path / "trainer_state.json"
    state.write_text(
        json.dumps({"log_history": [{"step": 1, "sampling/sampling_logp_difference/mean": 0.4}]})
    )
    assert names(check(read_rows(metrics_file(tmp_path)))) == ["gap/abs_mean/token (miles)"]
    state.write_text("{}")
    with pytest.raises(DumpError, match="no list `log_history`"):
        read_rows(state)
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert len(read_rows(metrics_file(tmp_path))) == 2
    for bad, message in (
        ('{"step": 1}\nx\n', "metrics.jsonl:2: not JSON"),
        ("[]\n", "metrics.jsonl:1: not an object"),
    ):
        log.write_text(bad)
        with pytest.raises(DumpError, match=message):
            read_rows(log)


def test_a_watch_tells_each_finding_once_until_it_has_healed():
    def row(step: int, gap: float) -> dict[str, float]:
        return {"step": step, "loss": 0.0, "gap/abs_mean/token": gap}

    watch = HealthWatch([row(step, 0.01) for step in range(1, 11)])
    assert [text for step in range(11, 31) for text in watch.see(row(step, 0.01))] == []
    told = [text for step in range(31, 71) for text in watch.see(row(step, 0.3))]
    assert sum("mean |gap|" in text and "miles" in text for text in told) == 1
    assert [text for step in range(71, 111) for text in watch.see(row(step, 0.01)) if "miles" in text] == []
    again = [text for step in range(111, 151) for text in watch.see(row(step, 0.3))]
    assert sum("mean |gap|" in text and "miles" in text for text in again) == 1


def test_a_watch_is_silent_before_it_can_average():
    watch = HealthWatch()
    assert [watch.see({"step": step, "loss": 0.0, "gap/abs_mean/token": 3.0}) for step in range(1, 20)] == [
        []
    ] * 19
    assert watch.see({"step": 20, "loss": 0.0, "gap/abs_mean/token": 3.0})
