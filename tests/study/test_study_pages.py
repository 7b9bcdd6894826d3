"""The tables of README and docs/study.md against the records that they are rendered from."""

from pathlib import Path

import pytest

from scripts.study.arms import ARMS, REGIMES, config_of, regime_path
from scripts.study.records import RESULTS, Records, read_records
from scripts.study.table import BLOCKS, SIGNS, finished, render, replaced
from scripts.study.trial import CURVES, Record

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("page", ["README.md", "docs/study.md"])
def test_pages_say_what_the_records_say(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    records = read_records()
    for block in (*BLOCKS, SIGNS):
        assert text == replaced(text, block, render(block, records)), "run: python -m scripts.study.report"


def test_the_study_has_all_its_tables():
    text = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    for block in (*BLOCKS, SIGNS):
        assert block.begin in text
        assert block.end in text


def test_records_are_whole():
    trials = read_records().trials
    assert trials, f"{RESULTS} holds no record"
    for trial in trials:
        where = f"{trial['arm']}-{trial['seed']}"
        curves = trial["curves"]
        assert curves.keys() == CURVES.keys() | {"passed"}, where
        length = len(curves["reward"])
        assert {len(values) for values in curves.values()} == {length}, where
        assert length == trial["steps"] or trial["not_finite"], where


def _trial(arm: str, seed: int, reward: float, collapse: int | None) -> Record:
    flat = {"reward": [reward] * 40, "gap": [0.05] * 40, "rho_asym": [1.5] * 39 + [None]}
    return {
        "regime": "falling",
        "arm": arm,
        "seed": seed,
        "curves": flat,
        "collapse_step": collapse,
        "heldout": {"before": 0.5, "after": reward},
    }


def test_table_of_two_seeds_by_hand():
    records = Records(
        arms=(ARMS["naive"], ARMS["tis"]),
        trials=(_trial("naive", 1, 0.2, 31), _trial("naive", 0, 0.4, None)),
    )
    lines = render(BLOCKS[0], records).splitlines()
    # Standard deviation 0.1 sqrt(2), over sqrt(2), by 12.706.
    reward = "0.300 ± 1.271"
    assert lines[2] == (
        f"| NVFP4 (`naive`) | 2 | {reward} → {reward} | 0.050 ± 0.000 | 1.500 ± 0.000 | none, 31 | {reward} |"
    )
    assert lines[3].startswith("| NVFP4 + TIS (`tis`) | 0 | not run yet |")
    assert "`tis`" not in finished(records)
    assert "learning" not in finished(records)
    assert render(BLOCKS[1], records).splitlines()[2].startswith("| NVFP4 (`naive`) | 0 | not run yet |")


def test_replacing_keeps_the_rest_of_a_page():
    block = BLOCKS[0]
    page = f"above\n{block.begin}\nold\n{block.end}\nbelow\n"
    assert replaced(page, block, "new") == f"above\n{block.begin}\nnew\n{block.end}\nbelow\n"
    assert replaced("no markers", block, "new") == "no markers"
    with pytest.raises(ValueError, match="has no <!-- study:end -->"):
        replaced(block.begin, block, "new")


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", ARMS)
def test_every_arm_is_a_configuration(name, regime):
    config = config_of(ARMS[name], regime_path(regime), seed=3, out=Path("somewhere"))
    assert (config.seed, config.out) == (3, "somewhere")


@pytest.mark.parametrize("regime", REGIMES)
def test_arms_differ_from_one_another(regime):
    every = [str(config_of(arm, regime_path(regime), seed=0, out=Path())) for arm in ARMS.values()]
    same = {arm for arm, text in zip(ARMS, every, strict=True) if every.count(text) > 1}
    assert not same
