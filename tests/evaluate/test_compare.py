"""The paired test against brute force, and two runs on disk."""

import json
import re
from itertools import product

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from triage_jax.config import ConfigError, to_dict
from triage_jax.evaluate.__main__ import main
from triage_jax.evaluate.compare import MEAN, compare_runs, sign_flip_p_value
from triage_jax.evaluate.config import EvaluateConfig


def brute_force(differences):
    sums = [sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in
            product((-1, 1), repeat=len(differences))]  # fmt: skip
    return np.mean([abs(value) >= abs(sum(differences)) for value in sums])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-6, 6), min_size=1, max_size=9))
def test_sign_flips_are_counted_exactly(differences):
    assert sign_flip_p_value(np.array(differences)) == pytest.approx(brute_force(differences), abs=1e-12)


def test_sign_flips_by_hand():
    assert sign_flip_p_value(np.zeros(5, np.int64)) == 1.0
    assert sign_flip_p_value(np.array([1, 1, 1, 1, 1])) == pytest.approx(2 / 32)
    # Differences of one size: McNemar's exact test, 9 better and 1 worse: 2 (1 + 10) / 1024.
    assert sign_flip_p_value(np.array([1] * 9 + [-1] + [0] * 50)) == pytest.approx(22 / 1024)


def test_sign_flips_hold_their_level_at_a_thousand_problems():
    rng = np.random.default_rng(1)
    ps = [sign_flip_p_value(rng.integers(-6, 7, 1000)) for _ in range(60)]
    assert 0.2 < np.mean(ps) < 0.8
    assert min(ps) > 1e-5
    assert sign_flip_p_value(rng.integers(-5, 7, 1000)) < 1e-2


def write_run(root, right, *, samples=6, data="aa"):
    """A run in which problem n of a benchmark has so many right samples; None: one sample is missing."""
    root.mkdir()
    config = EvaluateConfig(samples=samples)
    identity = {"data": dict.fromkeys(right, data)}
    (root / "config.yaml").write_text(yaml.safe_dump({"config": to_dict(config), "identity": identity}))
    with (root / "samples.jsonl").open("w") as file:
        for name, counts in right.items():
            for line, count in enumerate(counts, 1):
                for sample in range(samples - (count is None)):
                    status = "right" if sample < (count or 0) else "wrong"
                    row = {"problem": f"{name}:{line}", "sample": sample, "seed": 0, "finish": "stop",
                           "tokens": 1, "status": status, "answer": None, "response": None}  # fmt: skip
                    file.write(json.dumps(row) + "\n")
    return root


def test_two_runs(tmp_path):
    a = write_run(tmp_path / "a", {"aime24": [0, 3, 6, None], "gsm8k": [2, 2]})
    b = write_run(tmp_path / "b", {"aime24": [2, 3, 6, 1], "gsm8k": [6, 0], "svamp": [1]})
    aime, gsm, mean = compare_runs(a, b)
    assert (aime.problems, aime.left_out, aime.better, aime.worse) == (3, 1, 1, 0)
    assert (aime.first, aime.second) == (pytest.approx(0.5), pytest.approx(11 / 18))
    assert aime.p_value == 1.0
    assert aime.low == 0.0
    assert aime.high == pytest.approx(2 / 6)
    # 4 and -2 of 6: sums 2, 6, -6, -2, all at least 2 in size.
    assert (gsm.problems, gsm.p_value) == (2, 1.0)
    assert mean.name == MEAN
    assert mean.value == pytest.approx((aime.value + gsm.value) / 2)
    assert mean.low <= mean.value <= mean.high
    assert 0.5 < mean.p_value <= 1.0


def test_other_numbers_of_samples(tmp_path):
    a = write_run(tmp_path / "a", {"gsm8k": [2, 4, 0]}, samples=4)
    b = write_run(tmp_path / "b", {"gsm8k": [3, 6, 3]}, samples=6)
    (found,) = compare_runs(a, b)
    # Shares 1/2, 1, 0 against 1/2, 1, 1/2: one problem differs.
    assert (found.better, found.worse) == (1, 0)
    assert found.value == pytest.approx(1 / 6)


def test_a_clear_difference(tmp_path, capsys):
    rng = np.random.default_rng(0)
    first = rng.integers(0, 4, 60)
    a = write_run(tmp_path / "a", {"gsm8k": first.tolist(), "svamp": first.tolist()})
    b = write_run(tmp_path / "b", {"gsm8k": (first + 2).tolist(), "svamp": (first + 2).tolist()})
    differences = compare_runs(a, b)
    for d in differences:
        assert d.p_value < 1e-3
        assert (d.low, d.high) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert all(d.p_value < 1e-10 for d in differences[:2])
    assert main(["compare", str(a), str(b), "--out", str(tmp_path / "table.md")]) == 0
    table = (tmp_path / "table.md").read_text()
    assert "| gsm8k | 60 |" in table
    assert "| +33.33 (+33.3 to +33.3) | 60 / 0 | < 0.0001 |" in table
    assert table.strip() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("right", "data", "message"),
    [
        ({"aime24": [1]}, "aa", "share no benchmark"),
        ({"gsm8k": [1]}, "bb", r"gsm8k: .* different files \(SHA-256 aa and bb\)"),
        ({"gsm8k": [None]}, "aa", "gsm8k: no problem is finished in both"),
    ],
)
def test_what_cannot_be_compared(tmp_path, right, data, message, capsys):
    a = write_run(tmp_path / "a", {"gsm8k": [1]})
    b = write_run(tmp_path / "b", right, data=data)
    with pytest.raises(ConfigError, match=message):
        compare_runs(a, b)
    assert main(["compare", str(a), str(tmp_path / "nothing")]) == 2
    assert re.search("no evaluation lies here", capsys.readouterr().err)
