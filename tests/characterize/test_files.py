"""Rows of other frameworks: what is read, what is skipped and counted, what is refused, with file, line and field."""

import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from triage_jax.characterize import DumpError, write_dump
from triage_jax.characterize.files import open_source
from triage_jax.characterize.rows import columns_of, parse_map


def lines(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def verl_row(step=1, learner=(-1.0, -2.0), sampler=(-1.5, -2.0), **more):
    return {
        "input": "1+1=",
        "output": "2",
        "score": 1.0,
        "step": step,
        "old_log_probs": list(learner),
        "rollout_log_probs": list(sampler),
        "advantages": 0.5,
    } | more


def read(*paths, columns=None, strict=False):
    source = open_source(list(paths), columns=columns, strict=strict)
    return source, list(source.dumps())


def test_verl_rows(tmp_path):
    rows = [verl_row(), verl_row(learner=[-1.0], sampler=[-1.0], advantages=-0.5, score=0.0)]
    _, (dump,) = read(lines(tmp_path / "12.jsonl", rows))
    assert dump.step == 1  # the row's, not the file's
    np.testing.assert_array_equal(dump.mask, [[1, 1], [1, 0]])
    np.testing.assert_array_equal(dump.learner_logp, [[-1, -2], [-1, 0]])
    np.testing.assert_array_equal(dump.sampler_logp, [[-1.5, -2], [-1, 0]])
    np.testing.assert_array_equal(dump.advantages, [0.5, -0.5])
    np.testing.assert_array_equal(dump.rewards, [1, 0])


def nemo_row(index, **more):
    """As nemo_rl/algorithms/grpo.py logs it: every field a slice of the batch, a list of one."""
    row = {
        "content": "...",
        "rewards": 1.0,
        "input_lengths": 5,
        "token_ids": [5, 6, 7, 8, 9],
        "token_loss_mask": [0, 0, 1, 0, 1],
        "sample_loss_mask": 1.0,
        "advantages": [7, 7, -1, 7, -1],
        "generation_logprobs": [0, 0, -2, 0, -3],
        "prev_logprobs": [0, 0, -1, 9, -3],
    }
    return {name: [value] for name, value in (row | more).items()} | {"idx": index}


def test_nemo_rows_lose_the_prompt_and_keep_holes(tmp_path):
    rows = [nemo_row(0), nemo_row(1, filtered_rewards=0.25, advantages=[0.5])]
    source, (dump,) = read(lines(tmp_path / "train_data_step7.jsonl", rows))
    assert source.steps() == [7]
    np.testing.assert_array_equal(dump.mask, [[1, 0, 1]] * 2)
    np.testing.assert_array_equal(dump.sampler_logp, [[-2, 0, -3]] * 2)
    np.testing.assert_array_equal(dump.advantages, [-1, 0.5])  # constant on the valid tokens
    np.testing.assert_array_equal(dump.rewards, [1, 0.25])


def test_nemo_rows_outside_the_loss_and_without_a_learner(tmp_path):
    rows = [nemo_row(0), nemo_row(1, sample_loss_mask=0.0), nemo_row(2, prev_logprobs=[0] * 5)]
    source, (dump,) = read(lines(tmp_path / "train_data_step7.jsonl", rows))
    assert (len(dump.mask), source.skipped.rows) == (1, 2)
    assert ":2: `sample_loss_mask` is 0: the response is not in the loss" in source.skipped.reasons[0]
    assert ":3: `prev_logprobs` is 0 on every valid token" in source.skipped.reasons[1]


def test_one_token_is_no_list_of_one_list(tmp_path):
    _, (dump,) = read(
        lines(tmp_path / "1.jsonl", [verl_row(learner=[-1.0], sampler=[-2.0], advantages=[0.5])])
    )
    assert (dump.learner_logp.tolist(), dump.advantages.tolist()) == ([[-1]], [0.5])


def test_verls_own_uid_is_no_group(tmp_path):
    """verl/trainer/ppo/v1/trainer_base.py logs the key of the response, sample_rollout_output, as `uid`."""
    rows = [verl_row(uid=f"a_{i}_0", score=float(i)) for i in range(2)]
    for row in rows:
        del row["advantages"]
    path = lines(tmp_path / "1.jsonl", rows)
    with pytest.raises(
        DumpError, match=r"2 responses is a group by itself \(the first: 'a_0_0'\).*--map group=NAME"
    ):
        read(path)
    _, (dump,) = read(path, columns=parse_map(("group=input",)))
    np.testing.assert_allclose(dump.advantages, [-1, 1], rtol=1e-5)


def test_advantages_from_groups_of_rewards(tmp_path):
    rows = [
        {"learner_logp": [-1.0], "sampler_logp": [-1.0], "reward": reward, "prompt": prompt}
        for prompt, reward in (("a", 1.0), ("a", 0.0), ("b", 0.3), ("b", 0.3), ("a", 0.5))
    ]
    _, (dump,) = read(lines(tmp_path / "0.jsonl", rows))
    spread = 0.5 / (np.std([1, 0, 0.5]) + 1e-6)
    np.testing.assert_allclose(dump.advantages, [spread, -spread, 0, 0, 0], rtol=1e-6, atol=1e-7)


def test_per_token_advantages_stay(tmp_path):
    _, (dump,) = read(lines(tmp_path / "0.jsonl", [verl_row(advantages=[0.5, -0.5]), verl_row(advantages=1)]))
    np.testing.assert_array_equal(dump.advantages, [[0.5, -0.5], [1, 1]])


def test_many_steps_in_one_file_and_ranks_in_several(tmp_path):
    lines(tmp_path / "a_0.jsonl", [verl_row(1), verl_row(1), verl_row(2)])
    lines(tmp_path / "a_1.jsonl", [verl_row(2, learner=[-1.0], sampler=[-2.0]), verl_row(3)])
    source, dumps = read(tmp_path)
    assert source.steps() == [dump.step for dump in dumps] == [1, 2, 3]
    assert [len(dump.mask) for dump in dumps] == [2, 2, 1]
    for wanted in ({1}, {2}, {3}, {1, 3}, set()):
        assert {dump.step for dump in source.dumps(frozenset(wanted))} == wanted


def test_steps_that_go_back(tmp_path):
    source, _ = read(lines(tmp_path / "a.jsonl", [verl_row(2), verl_row(1)]))
    with pytest.raises(DumpError, match=r"a.jsonl: step 1 after step 2"):
        source.steps()


BAD = [
    ("{", r":2: not JSON \(.*column 1\)"),
    ("[1]", ":2: not a JSON object"),
    (verl_row(learner=[-1.0]), ":2: `old_log_probs` has 1 values, `rollout_log_probs` 2"),
    (verl_row(learner=[-1.0, None]), ":2: `old_log_probs` is null or not finite at position 1"),
    (verl_row(sampler=[float("nan"), -1.0]), ":2: `rollout_log_probs` is null or not finite at position 0"),
    (verl_row(rollout_log_probs="x"), ":2: `rollout_log_probs` is 'x'; accepted: a list of numbers"),
    (
        verl_row(rollout_log_probs=[[-1.0], [-2.0]]),
        ":2: `rollout_log_probs` is .* accepted: a list of numbers",
    ),
    (verl_row(learner=[0.0, 0.0]), ":2: `old_log_probs` is 0 on every valid token: it was not computed"),
    (verl_row(sampler=[0.0, 0.0]), ":2: `rollout_log_probs` is 0 on every valid token: it was not computed"),
    (verl_row(rollout_log_probs=None), ":2: `rollout_log_probs` is missing"),
    (verl_row(learner=[], sampler=[]), ":2: no valid token"),
    (verl_row(advantages=None), ":2: `advantages` is missing"),
    (verl_row(advantages=[1.0, 2.0, 3.0]), ":2: `advantages` has 3 values"),
    (verl_row(advantages=float("inf")), ":2: `advantages` is null or not finite"),
    (verl_row(response_mask=[1]), ":2: `response_mask` has 1 values"),
    (verl_row(learner=[-1.0, 0.2]), ":2: `old_log_probs` is 0.2 at position 1; accepted: at most 0"),
    (verl_row(learner=[-1e300, -1.0]), ":2: `old_log_probs` is null or not finite at position 0"),
    (verl_row(learner=[-(10**400), -1.0]), ":2: `old_log_probs` is .* accepted: a list of numbers"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_bad_rows_are_counted_or_refused(tmp_path, row, message):
    path = lines(tmp_path / "3.jsonl", [verl_row(), row, "", verl_row()])
    source, (dump,) = read(path)
    assert len(dump.mask) == 2
    assert source.skipped.rows == 1
    assert re.search(message, source.skipped.reasons[0])
    with pytest.raises(DumpError, match=message):
        read(path, strict=True)


def test_files_of_bad_rows_only(tmp_path):
    with pytest.raises(DumpError, match=r"no usable row; .*3.jsonl:1: `old_log_probs` has 1 values"):
        read(lines(tmp_path / "3.jsonl", [verl_row(learner=[-1.0])]))
    empty = lines(tmp_path / "4.jsonl", [])
    with pytest.raises(DumpError, match=r"no usable row; the files are empty"):
        read(empty)
    with pytest.raises(DumpError, match=r"no usable row; the files are empty"):
        open_source([empty]).steps()
    with pytest.raises(DumpError, match=r"no usable row; .*5.jsonl:1: no field for learner_logp"):
        open_source([lines(tmp_path / "5.jsonl", [{"x": 1}, {"y": 1}])]).steps()
    source, dumps = read(tmp_path, lines(tmp_path / "6.jsonl", [verl_row(6)]))
    assert (source.steps(), len(dumps), source.skipped.rows) == ([1, 6], 1, 3)


def test_every_row_has_its_own_fields(tmp_path):
    header = {"run": "a"}
    masked = verl_row(response_mask=[0, 1])
    source, (dump,) = read(lines(tmp_path / "1.jsonl", [header, verl_row(), masked, header]))
    assert source.skipped.rows == 2
    assert "1.jsonl:1: no field for learner_logp and sampler_logp" in source.skipped.reasons[0]
    assert dump.mask.sum(axis=1).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"input": "a", "output": "b", "gts": "c", "score": 1, "step": 1},
            "verl's rollout_data_dir holds text",
        ),
        ({"prompt": "a", "completion": "b", "advantage": 1}, "TRL's completions hold text only"),
        ({"tokens": [1], "rollout_log_probs": [-1.0], "reward": 1}, "--save-debug-train-data"),
        (
            {"lp": [-1.0], "advantages": 1},
            "no field for learner_logp and sampler_logp.*--map learner_logp=NAME",
        ),
        ({"old_log_probs": [-1.0], "rollout_log_probs": [-1.0]}, "no field for advantages"),
    ],
)
def test_rows_without_what_is_needed(tmp_path, row, message):
    with pytest.raises(DumpError, match=message):
        read(lines(tmp_path / "1.jsonl", [row]))


def test_map_names_the_fields(tmp_path):
    row = {"lp": [-1.0], "sp": [-2.0], "a": 1.0, "old_log_probs": [9.0]}
    columns = parse_map(("learner_logp=lp", "sampler_logp=sp", "advantages=a"))
    _, (dump,) = read(lines(tmp_path / "1.jsonl", [row]), columns=columns)
    assert dump.learner_logp.tolist() == [[-1]]
    with pytest.raises(DumpError, match=r"--map mask=m: no such field; found: a, lp, old_log_probs, sp"):
        read(tmp_path / "1.jsonl", columns=columns | {"mask": "m"})
    for pair in ("learner_logp", "learner_logp=", "logp=x"):
        with pytest.raises(ValueError, match="accepted: COLUMN=NAME"):
            parse_map((pair,))


def test_columns_of_our_own_names():
    found = columns_of(frozenset({"learner_logp", "sampler_logp", "advantages", "mask"}), {})
    assert found == {name: name for name in found}


def test_mapped_npz(tmp_path):
    path = tmp_path / "5.npz"
    np.savez(path, lp=-np.ones((2, 3)), sp=-np.ones((2, 3)), a=np.array([1.0, -1.0]))
    columns = parse_map(("learner_logp=lp", "sampler_logp=sp", "advantages=a"))
    source, (dump,) = read(path, columns=columns)
    assert source.steps() == [dump.step] == [5]
    assert dump.mask.all()
    with pytest.raises(DumpError, match="no field for learner_logp"):
        read(path)


def test_npz_of_two_ranks_are_one_update(tmp_path):
    for rank, width in enumerate((3, 5)):
        shape = (2, width)
        advantages = np.ones(2) if rank == 0 else np.ones(shape)
        write_dump(
            tmp_path / f"step_000004_rank{rank}.npz",
            step=4,
            learner_logp=np.full(shape, -1.0),
            sampler_logp=np.full(shape, -1.0),
            mask=np.ones(shape),
            advantages=advantages,
        )
    _, (dump,) = read(tmp_path)
    assert dump.mask.sum(axis=1).tolist() == [3, 3, 5, 5]
    assert dump.advantages.shape == (4, 5)


def test_paths_that_hold_nothing(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        open_source([tmp_path / "absent"])
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(DumpError, match=r"no dump found \(a run writes them with track.dumps set\)"):
        open_source([tmp_path])
    (tmp_path / "a.csv").write_text("")
    with pytest.raises(
        DumpError, match=r"a.csv: unknown kind of file; accepted: .npz, .jsonl, .pt, .parquet"
    ):
        open_source([tmp_path / "a.csv"])


@pytest.mark.parametrize(("suffix", "package"), [(".pt", "torch"), (".parquet", "pyarrow")])
def test_packages_that_are_not_there(tmp_path, monkeypatch, suffix, package):
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails, installed or not
    path = tmp_path / f"1{suffix}"
    path.write_bytes(b"x")
    with pytest.raises(DumpError, match=f"{package} is not installed"):
        read(path)


COLUMNS = {
    "tokens": ([8, 1, 2], [8, 3]),
    "log_probs": ([-1.0, -2.0], [-3.0]),
    "rollout_log_probs": ([-1.5, -2.0], [-3.0]),
    "advantages": ([0.5, 0.5], [-0.5]),
    "loss_masks": ([1, 1], [1]),
}


def train_data(tensor):
    """Columns of one rank, as miles saves them."""
    columns = {name: [tensor(np.array(value)) for value in values] for name, values in COLUMNS.items()}
    return columns | {
        "response_lengths": np.array([2, 1]),
        "sample_indices": [np.int64(4), np.int64(9)],
        "rewards": np.array([1.0, 0.0], np.float32),
        "raw_reward": [0.0, 0.0, 1.0],  # of the whole batch, in another order
        "max_seq_lens": 7,
    }


def slime_samples(tensor):
    """One dict per response, as slime's format_version 2 has them."""
    data = train_data(tensor)
    names = (*COLUMNS, "response_lengths", "rewards")
    return [
        {name: data[name][i] for name in names} | {"rollout_position": i, "data_parallel_rank": 0}
        for i in range(2)
    ]


def contents(tensor):
    rank = {"rollout_id": 6, "cp_rank": 0, "cp_size": 1, "qkv_format": "thd"}
    whole = {"format_version": 2, "rollout_id": 6, "rank": 0, "dp_shards": [], "raw_reward": [1.0, 0.0]}
    return {
        "train_6_0.pt": rank | {"rank": 0, "rollout_data": train_data(tensor)},
        "train_6_1.pt": rank | {"rank": 1, "rollout_data": train_data(tensor)},
        "slime_6.pt": whole | {"samples": slime_samples(tensor)},
        "pieces_6.pt": rank | {"rank": 0, "rollout_data": train_data(tensor), "cp_size": 2},
        "rollout_6.pt": {"rollout_id": 6, "samples": [{"tokens": [1], "rollout_log_probs": [-1.0]}]},
        "other_6.pt": {"weights": 1},
        "empty_6.pt": {"rollout_data": {"tokens": []}},
    }


def check_torch_files(folder):
    """Train data are read; replicas, pieces and what lacks the learner are named."""
    for name in ("train_6_0.pt", "slime_6.pt"):
        source, (dump,) = read(folder / name)
        assert source.steps() == [dump.step] == [6]
        np.testing.assert_array_equal(dump.learner_logp, [[-1, -2], [-3, 0]])
        np.testing.assert_array_equal(dump.advantages, [0.5, -0.5])
        np.testing.assert_array_equal(dump.rewards, [1, 0])
    source, (dump,) = read(folder / "train_6_0.pt", folder / "train_6_1.pt")
    assert (len(dump.mask), source.skipped.rows) == (2, 2)
    assert re.search(r"train_6_1.pt: the same responses as .*train_6_0.pt", source.skipped.reasons[0])
    for name, message in (
        ("pieces_6.pt", "sample 0: one of 2 pieces of context parallelism"),
        ("rollout_6.pt", "--save-debug-train-data"),
        ("other_6.pt", "accepted: slime's or miles' debug files"),
        ("empty_6.pt", "`rollout_data` has no samples; found: tokens"),
        ("evil_6.pt", r"\(\w+Error\); other objects are not unpickled"),
    ):
        with pytest.raises(DumpError, match=message):
            read(folder / name)


def test_slimes_and_miles_files_as_torch_loads_them(tmp_path, monkeypatch):
    """A stand-in for torch, which the test environment lacks, that insists on loading weights only."""
    files = contents(np.asarray)

    def load(path, *, map_location, weights_only):
        assert (map_location, weights_only) == ("cpu", True)
        if path.name not in files:
            raise RuntimeError("Weights only load failed: GLOBAL x\nmore")
        return files[path.name]

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(load=load, serialization=SimpleNamespace()))
    for name in (*files, "evil_6.pt"):
        (tmp_path / name).touch()
    check_torch_files(tmp_path)


class Evil:
    def __reduce__(self):
        return print, ("unpickled",)


def test_slimes_and_miles_files_with_torch(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    for name, content in contents(torch.tensor).items():
        torch.save(content, tmp_path / name)
    # Neither directly, nor inside an array of objects.
    for content in (Evil(), np.array([Evil()], object)):
        torch.save({"rollout_data": content}, tmp_path / "evil_6.pt")
        check_torch_files(tmp_path)
    assert "unpickled" not in capsys.readouterr().out


def test_parquet_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"step": 3, "old_per_token_logps": [-1.0], "sampling_per_token_logps": [-1.5], "advantage": 0.5},
        {
            "step": 3,
            "old_per_token_logps": [-1.0, None],
            "sampling_per_token_logps": [-1.5, -1],
            "advantage": 0.5,
        },
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "completions_00003.parquet")
    source, (dump,) = read(tmp_path)
    assert (dump.step, len(dump.mask), source.skipped.rows) == (3, 1, 1)
    assert "row 1: `old_per_token_logps`" in source.skipped.reasons[0]
