"""The queue and one very small trial through the real trainer."""

import json
import os
from pathlib import Path

import pytest
import yaml

from scripts.study.arms import ARMS, fingerprint, regime_path
from scripts.study.run import Queue, Trial, missing_trials, stay_on, taken
from scripts.study.trial import FORMAT, WINDOW, run_trial
from triage_jax.config import ConfigError, laid_over, load_yaml

BASE = regime_path("falling")
ROOT = Path(__file__).parent.parent.parent
SMALL = {
    "steps": 2,
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 4, "local": {"batch_size": 8}},
    "learner": {"micro_batch": 8},
    "eval": {"problems": 4, "samples": 2},
    "optimizer": {"warmup_steps": 0},
}


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def _record(folder: Path, arm: str, seed: int, mark: str) -> None:
    text = json.dumps({"format": FORMAT, "arm": arm, "seed": seed, "fingerprint": mark})
    folder.mkdir()
    (folder / f"{arm}-{seed}.json").write_text(text)


def test_queue_takes_a_seed_of_every_arm_first_and_skips_what_is_finished(tmp_path):
    _record(tmp_path / "learning", "naive", 0, fingerprint(ARMS["naive"], regime_path("learning")))
    queue = Queue(arms=("bf16", "naive", "parity"), regimes=("learning",), seeds=(0, 1), results=tmp_path)
    assert missing_trials(queue) == [
        ("learning", "bf16", 0),
        ("learning", "bf16", 1),
        ("learning", "naive", 1),
    ]


def test_sources_are_switched_off_where_nvfp4_falls():
    queue = Queue(arms=("naive", "parity"), seeds=(0,), results=Path("nowhere"))
    assert missing_trials(queue) == [
        ("falling", "naive", 0),
        ("falling", "parity", 0),
        ("learning", "naive", 0),
    ]


def test_queue_refuses_a_record_of_another_configuration(tmp_path):
    _record(tmp_path / "learning", "naive", 0, fingerprint(ARMS["naive"], regime_path("falling")))
    with pytest.raises(ConfigError, match=r"naive-0\.json: made with another configuration"):
        missing_trials(Queue(arms=("naive",), seeds=(0,), results=tmp_path))


@pytest.mark.parametrize("field", ["arms", "regimes"])
def test_queue_refuses_an_unknown_name(tmp_path, field):
    with pytest.raises(ConfigError, match=f"--{field} nvfp5: not known; accepted: "):
        missing_trials(Queue(results=tmp_path, **{field: ("nvfp5",)}))


def test_two_queues_do_not_take_the_same_trial(tmp_path):
    one, other = Trial("falling", "naive", 0), Trial("falling", "naive", 1)
    pid = tmp_path / "falling" / "naive-0.pid"
    with taken(tmp_path, one) as first:
        assert pid.read_text() == f"{os.getpid()}\n"
        with taken(tmp_path, one) as second, taken(tmp_path, other) as third:
            assert (first, second, third) == (True, False, True)
        assert pid.read_text() == f"{os.getpid()}\n"
    assert pid.read_text() == ""
    with taken(tmp_path, one) as again:
        assert again


def test_a_core_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="--core 4096: not one of this machine's; accepted: "):
        stay_on(4096)


def test_fingerprint_is_of_arm_and_base(tmp_path):
    other = tmp_path / "base.yaml"
    other.write_text(yaml.safe_dump(laid_over(load_yaml(BASE), {"steps": 7})))
    marks = {
        fingerprint(ARMS["naive"], BASE),
        fingerprint(ARMS["tis"], BASE),
        fingerprint(ARMS["naive"], other),
    }
    assert len(marks) == 3


def test_a_trial_leaves_its_record(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump(laid_over(load_yaml(BASE), SMALL)))
    record = run_trial(ARMS["triage"], 5, base=base, runs=tmp_path / "runs", results=tmp_path)
    assert json.loads((tmp_path / "triage-5.json").read_text()) == record
    assert record["fingerprint"] == fingerprint(ARMS["triage"], base)
    assert [len(values) for values in record["curves"].values()] == [2] * len(record["curves"])
    rewards, passed = record["curves"]["reward"], record["curves"]["passed"]
    for reward, share in zip(rewards, passed, strict=True):
        # Eight responses to two prompts.
        assert reward * 8 == round(reward * 8)
        assert share in (0.0, 0.5, 1.0)
        assert (share == 0) == (reward == 0)
    assert set(WINDOW) <= record["windows"].keys()
    assert record["windows"]["width"] * len(record["windows"]["q05"]) >= 2
    assert record["heldout"]["after"] * 8 == round(record["heldout"]["after"] * 8)
    assert not (tmp_path / "runs" / "triage-5" / "dumps").exists()
    assert (tmp_path / "runs" / "triage-5" / "metrics.jsonl").exists()
