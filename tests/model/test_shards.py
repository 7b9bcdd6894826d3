"""Planned safetensors files: what another reader finds in them."""

import json

import numpy as np
import pytest
from safetensors import safe_open

from triage_jax.model.shards import ShardWriter, split
from triage_jax.model.tensors import MappedFile, Stored

PLAN = {
    "bytes": Stored("U8", (3, 5)),
    "wide": Stored("F64", (2,)),
    "half": Stored("BF16", (2, 3)),
    "scale": Stored("F32", ()),
    "eight": Stored("F8_E4M3", (7,)),
}


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: np.asarray(rng.normal(size=stored.shape) * 9).astype(stored.numpy)
        for name, stored in PLAN.items()
    }


def test_one_file_in_any_order(tmp_path):
    tensors = values()
    with ShardWriter(tmp_path, PLAN, 10_000) as writer:
        for name in reversed(PLAN):
            writer.write(name, tensors[name])
    file = tmp_path / "model.safetensors"
    with safe_open(file, "numpy") as handle:  # checks the header and that the bytes are covered without a gap
        assert set(handle.keys()) == set(PLAN)
        assert handle.metadata() == {"format": "pt"}
        for name in ("bytes", "wide", "half", "scale"):
            np.testing.assert_array_equal(handle.get_tensor(name), tensors[name])
    mapped = MappedFile(file)
    for name, stored in PLAN.items():
        assert mapped.stored(name) == stored
        assert mapped[name].dtype == stored.numpy
        assert mapped[name].tobytes() == tensors[name].tobytes()
        assert mapped[name].flags.aligned
        assert not mapped[name].flags.writeable


def test_shards_and_their_index(tmp_path):
    tensors = values()
    with ShardWriter(tmp_path, PLAN, 30) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 15 + 16 + 12 + 4 + 7
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "numpy") as handle:
            assert name in set(handle.keys())
    assert len(set(index["weight_map"].values())) == 3
    assert not (tmp_path / "model.safetensors").exists()


def test_a_shard_is_never_larger_unless_one_tensor_is():
    assert split(PLAN, 31) == [["bytes", "wide"], ["half", "scale", "eight"]]
    assert split(PLAN, 1) == [[name] for name in PLAN]


def test_mistakes_are_refused(tmp_path):
    tensors = values()
    with ShardWriter(tmp_path, PLAN, 99) as writer:
        writer.write("wide", tensors["wide"])
        with pytest.raises(ValueError, match="wide: written twice"):
            writer.write("wide", tensors["wide"])
        with pytest.raises(ValueError, match="other: not planned"):
            writer.write("other", tensors["wide"])
        with pytest.raises(ValueError, match=r"half: float32 \[2, 3\], planned was BF16 \[2, 3\]"):
            writer.write("half", tensors["half"].astype(np.float32))
        with pytest.raises(ValueError, match=r"bytes: uint8 \[5, 3\]"):
            writer.write("bytes", tensors["bytes"].T)
        for name in ("bytes", "half", "scale", "eight"):
            writer.write(name, tensors[name])
    with pytest.raises(ValueError, match="dtype F4: accepted are F64"):
        Stored("F4", (2,))


def test_a_tensor_that_was_never_written_is_an_error(tmp_path):
    def leave_early() -> None:
        with ShardWriter(tmp_path, PLAN, 99) as writer:
            writer.write("wide", values()["wide"])

    with pytest.raises(ValueError, match=r"never written: \['bytes', 'eight', 'half'\]"):
        leave_early()


def test_an_error_inside_is_not_hidden_by_what_is_missing(tmp_path):
    with pytest.raises(RuntimeError, match="inside"), ShardWriter(tmp_path, PLAN, 99):
        raise RuntimeError("inside")
