from hypothesis import given
from hypothesis import strategies as st

from triage_jax.tasks.protocol import STATUSES, Verdict, count_statuses, cut_at_eos, is_heldout, stable_hash


def test_stable_hash_is_pinned():
    # A changed value would move problems between training and held-out sets of earlier runs.
    assert stable_hash("heldout", 0, "1+1=") == 12922583703841910733
    assert stable_hash("a", "b") != stable_hash("ab")


@given(st.text(), st.integers(0, 5))
def test_split_is_monotone_in_the_fraction(prompt, seed):
    sides = [is_heldout(prompt, fraction, seed) for fraction in (0.0, 0.2, 0.5, 1.0)]
    assert sides == sorted(sides)
    assert not sides[0]
    assert sides[-1]


def test_cut_at_eos_takes_the_first():
    assert cut_at_eos("a</s>b<eos>c", ("<eos>", "</s>")) == "a"
    assert cut_at_eos("abc", ("<eos>",)) == "abc"


def test_count_statuses_names_every_status():
    counts = count_statuses(
        [Verdict(1.0, "2", "right"), Verdict(0.0, None, "no_answer"), Verdict(1.0, "3", "right")]
    )
    assert counts == {"right": 2, "wrong": 0, "no_answer": 1, "guarded": 0, "timeout": 0, "error": 0}
    assert tuple(counts) == STATUSES
