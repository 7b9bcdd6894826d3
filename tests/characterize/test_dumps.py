"""Dumps are written whole, read checked, never unpickled."""

import io
import json

import numpy as np
import pytest

from tests.characterize.inputs import random_dump
from triage_jax.characterize import DumpError, dump_path, read_dump, write_dump
from triage_jax.characterize.dumps import step_of


def write(path, dump, **changes):
    arrays = {
        "step": dump.step,
        "learner_logp": dump.learner_logp,
        "sampler_logp": dump.sampler_logp,
        "mask": dump.mask,
        "advantages": dump.advantages,
    }
    write_dump(path, **(arrays | changes))


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("compress", [False, True])
def test_round_trip(tmp_path, per_token, compress):
    dump = random_dump(1, step=7, per_token=per_token, dtype=np.float32)
    path = dump_path(tmp_path, 7)
    write(path, dump, rewards=np.arange(12.0), learner_logp_after=dump.learner_logp, compress=compress)
    assert [file.name for file in path.parent.iterdir()] == ["step_000007.npz"]
    back = read_dump(path)
    width = back.mask.shape[1]
    assert back.mask[:, -1].any()
    assert not dump.mask[:, width:].any()
    assert back.step == 7
    np.testing.assert_array_equal(back.rewards, np.arange(12.0))
    for name in ("learner_logp", "sampler_logp"):
        kept = getattr(dump, name)[:, :width]
        np.testing.assert_array_equal(getattr(back, name)[back.mask], kept[back.mask])
    np.testing.assert_array_equal(back.learner_logp_after[back.mask], back.learner_logp[back.mask])
    expected = dump.advantages[:, :width] if per_token else dump.advantages
    np.testing.assert_array_equal(back.advantages, expected)


def test_an_update_without_a_valid_token(tmp_path):
    write_dump(
        tmp_path / "a.npz",
        step=1,
        learner_logp=np.zeros((2, 3)),
        sampler_logp=np.zeros((2, 3)),
        mask=np.zeros((2, 3)),
        advantages=np.zeros(2),
    )
    assert read_dump(tmp_path / "a.npz").mask.shape == (2, 1)


def spoil(dump, name, place, value):
    array = np.array(getattr(dump, name))
    array[place] = value
    return {name: array}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("learner_logp", np.nan, r"`learner_logp` is nan at response 0, token 0 \(1 such\).*finite"),
        ("sampler_logp", -np.inf, "`sampler_logp` is -inf at response 0, token 0"),
        ("sampler_logp", 0.2, "`sampler_logp` is 0.2 at response 0, token 0.*at most 0"),
        ("advantages", np.nan, "`advantages` is nan at response 0"),
    ],
)
def test_values_that_are_refused(tmp_path, name, value, message):
    dump = random_dump(2)
    dump.mask[0, 0] = True
    dump.learner_logp[0, 0] = dump.sampler_logp[0, 0] = -1.0
    place = 0 if name == "advantages" else (0, 0)
    with pytest.raises(DumpError, match=message):
        write(tmp_path / "a.npz", dump, **spoil(dump, name, place, value))
    assert list(tmp_path.iterdir()) == []


def test_shapes_that_are_refused(tmp_path):
    dump = random_dump(2)
    for changes, message in (
        ({"advantages": np.zeros(5)}, r"`advantages` has shape \(5,\); accepted: \(12, 300\) or \(12,\)"),
        ({"learner_logp": np.zeros((12, 299))}, "`learner_logp` has shape"),
        ({"mask": np.ones(12)}, r"accepted: \[B, T\]"),
        ({"rewards": np.zeros((12, 2))}, "`rewards` has shape"),
    ):
        with pytest.raises(DumpError, match=message):
            write(tmp_path / "a.npz", dump, **changes)


def test_damaged_and_foreign_files(tmp_path):
    good = tmp_path / "good.npz"
    write(good, random_dump(3))
    cut = tmp_path / "cut.npz"
    cut.write_bytes(good.read_bytes()[:-100])
    text = tmp_path / "text.npz"
    text.write_text("hello")
    other = tmp_path / "other.npz"
    np.savez(other, a=np.zeros(2))
    single = tmp_path / "single.npz"
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    single.write_bytes(buffer.getvalue())
    for path, message in (
        (cut, "not a readable npz"),
        (text, "not a readable npz"),
        (other, "format is 'no `format`'"),
        (single, "one array"),
    ):
        with pytest.raises(DumpError, match=message):
            read_dump(path)
    with pytest.raises(FileNotFoundError):
        read_dump(tmp_path / "absent.npz")


def test_pickle_is_refused(tmp_path):
    path = tmp_path / "objects.npz"
    np.savez(path, learner_logp=np.array([{"a": 1}], object))
    with pytest.raises(DumpError, match="pickle"):
        read_dump(path)


def test_mask_beyond_lengths(tmp_path):
    path = tmp_path / "a.npz"
    write(path, random_dump(4))
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays["lengths"] = arrays["lengths"] - 1
    np.savez(path, **arrays)
    with pytest.raises(DumpError, match="beyond `lengths`"):
        read_dump(path)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step_000123.npz", 123),
        ("7.jsonl", 7),
        ("train_data_step12.jsonl", 12),
        ("rollout_3_1.pt", 3),
        ("x.npz", None),
    ],
)
def test_steps_in_names(tmp_path, name, step):
    assert step_of(tmp_path / name) == step


def test_format_is_written_as_documented(tmp_path):
    write(tmp_path / "a.npz", random_dump(5), rewards=np.zeros(12))
    with np.load(tmp_path / "a.npz", allow_pickle=False) as archive:
        kinds = {name: archive[name].dtype.name for name in archive.files}
    expected = {
        "learner_logp": "float32",
        "sampler_logp": "float32",
        "advantages": "float32",
        "rewards": "float32",
        "mask": "bool",
        "lengths": "int32",
        "step": "int64",
    }
    assert json.dumps({k: v for k, v in sorted(kinds.items()) if k != "format"}) == json.dumps(
        dict(sorted(expected.items()))
    )
