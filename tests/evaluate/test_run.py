"""Whole evaluations of the quickstart model through the local engine: results, refusals, what is read again."""

import fcntl
import json
import shutil
import subprocess
from collections import Counter

import numpy as np
import pytest
import yaml

from tests.evaluate.inputs import PROBLEMS, SAMPLES, arguments, records
from triage_jax.evaluate.__main__ import main
from triage_jax.rollout import LocalEngine
from triage_jax.run import resolve_model

TOTAL = PROBLEMS * SAMPLES


def test_what_it_leaves_behind(finished, file):
    found = records(finished)
    assert found.keys() == {(f"sums:{n}", s) for n in range(1, PROBLEMS + 1) for s in range(SAMPLES)}
    assert len({record.seed for record in found.values()}) == TOTAL
    gold = [json.loads(line)["answer"] for line in file.read_text().splitlines()]
    for (uid, _), record in found.items():
        right = record.response == gold[int(uid.removeprefix("sums:")) - 1]
        assert record.status == ("right" if right else "wrong")
        assert record.tokens == len(record.response) + (record.finish == "stop")
    assert {record.status for record in found.values()} == {"right", "wrong"}, "else nothing is tested"

    rows = [json.loads(line) for line in (finished / "problems.jsonl").read_text().splitlines()]
    assert [row["problem"] for row in rows] == [f"sums:{n}" for n in range(1, PROBLEMS + 1)]
    for row in rows:
        mine = [record for (uid, _), record in found.items() if uid == row["problem"]]
        assert row["right"] == sum(record.right for record in mine)
        assert row["gold"] == gold[rows.index(row)]
    (score,) = json.loads((finished / "result.json").read_text())["scores"]
    accuracy = np.mean([row["right"] / SAMPLES for row in rows])
    assert score["accuracy"]["value"] == pytest.approx(accuracy) == score["pass_at"]["1"]["value"]
    assert score["pass_at"][str(SAMPLES)]["value"] == pytest.approx(
        np.mean([row["right"] > 0 for row in rows])
    )
    assert score["statuses"] == dict.fromkeys(score["statuses"], 0) | Counter(
        record.status for record in found.values()
    )
    table = (finished / "table.md").read_text()
    assert f"| sums | {PROBLEMS} | {TOTAL} | {100 * accuracy:.2f} (" in table
    assert {line.count("|") for line in table.strip().splitlines()} == {12}


def test_the_configuration_says_what_was_evaluated(finished, file):
    saved = yaml.safe_load((finished / "config.yaml").read_text())
    assert saved["config"]["temperature"] == 0.7
    digest = subprocess.run(["sha256sum", file], capture_output=True, text=True, check=True).stdout[:64]
    assert saved["identity"]["data"] == {"sums": digest}
    assert len(saved["identity"]["model"]["weights"]) == 64


def test_the_same_command_again_draws_nothing(finished, file, capsys, monkeypatch):
    before = {path.name: path.read_bytes() for path in finished.iterdir()}
    monkeypatch.setattr(LocalEngine, "generate", None)
    assert main(arguments(finished, file)) == 0
    assert f"{TOTAL} of {TOTAL} samples are there already" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in finished.iterdir()} == before


def test_another_process_draws_the_same(finished, file, tmp_path):
    """And seeds belong to samples, not to places in a batch: other batches, one sample more."""
    out = tmp_path / "again"
    assert main(arguments(out, file, "--samples", str(SAMPLES + 1), "--numerics.execution", "float32")) == 0
    assert main(arguments(tmp_path / "less", file, "--numerics.execution", "float32")) == 0
    more, less = records(out), records(tmp_path / "less")
    same = [more[key].response == record.response for key, record in less.items()]
    assert all(more[key].seed == record.seed for key, record in less.items())
    assert np.mean(same) > 0.9, "float32 in batches of another make-up: the last bit may differ, no more"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("--temperature", "1.0"), "temperature: 0.7 -> 1.0"),
        (("--seed", "3"), "seed: 0 -> 3"),
        (("--numerics.execution", "float32"), "numerics.execution: 'bf16' -> 'float32'"),
        (("--samples", "5"), "samples: 3 -> 5"),
        (("--limit", "2"), "limit: None -> 2"),
        (("--own.match", "last_number"), "own.match: 'exact' -> 'last_number'"),
        (("--model.no-chat-template",), "model.chat_template: True -> False"),
    ],
)
def test_other_settings_are_refused_by_name(finished, file, capsys, change, named):
    before = (finished / "config.yaml").read_bytes()
    assert main(arguments(finished, file, *change)) == 2
    error = capsys.readouterr().err
    assert named in error
    assert "--overwrite" in error
    assert (finished / "config.yaml").read_bytes() == before


def test_other_data_and_other_weights_are_refused(finished, file, tmp_path, capsys):
    changed = tmp_path / "sums.jsonl"
    changed.write_text(file.read_text().replace("9", "8", 1))
    assert main(arguments(finished, changed)) == 2
    assert "identity.data.sums: " in capsys.readouterr().err

    model = tmp_path / "model"
    model.mkdir()
    for source in resolve_model("quickstart").iterdir():
        content = source.read_bytes()
        if source.suffix == ".safetensors":
            content = content[:-1] + bytes([content[-1] ^ 1])
        (model / source.name).write_bytes(content)
    assert main(arguments(finished, file, "--model.path", str(model))) == 2
    error = capsys.readouterr().err
    assert "identity.model.weights: " in error
    assert "model.path" not in error, "where the model lies may change"


def test_where_things_lie_and_how_fast_may_change(finished, file, tmp_path):
    moved, out = tmp_path / "sums.jsonl", tmp_path / "copy"
    moved.write_bytes(file.read_bytes())
    shutil.copytree(finished, out)
    assert main(arguments(out, moved, "--local.batch-size", "2")) == 0
    assert str(moved) in (out / "config.yaml").read_text()


def test_overwrite_deletes_only_its_own_files(finished, file, tmp_path):
    out = tmp_path / "anew"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert main(arguments(out, file, "--limit", "1")) == 0
    assert main(arguments(out, file, "--limit", "2", "--overwrite")) == 0
    assert len(records(out)) == 2 * SAMPLES
    assert (out / "notes.txt").read_text() == "mine"
    assert f"| sums | 2 of {PROBLEMS} |" in (out / "table.md").read_text()


def test_two_processes_on_one_directory(finished, file, capsys):
    with (finished / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(arguments(finished, file)) == 2
    assert "another process is at work here" in capsys.readouterr().err


def test_dry_run_writes_nothing_and_its_yaml_is_a_configuration(file, tmp_path, capsys):
    out = tmp_path / "dry"
    assert main(arguments(out, file, "--dry-run")) == 0
    printed = capsys.readouterr().out
    assert not out.exists()
    settings, _, plan = printed.partition("\nplan")
    assert f"{TOTAL}, at most {TOTAL * 28} tokens" in plan
    (tmp_path / "settings.yaml").write_text(settings)
    assert main(["--config", str(tmp_path / "settings.yaml"), "--dry-run"]) == 0
    assert capsys.readouterr().out == printed


def test_rescore_repeats_the_verdicts(finished, file, tmp_path, capsys):
    out = tmp_path / "scored"
    shutil.copytree(finished, out)
    before = (out / "samples.jsonl").read_text()
    (out / "samples.jsonl").write_text(before.replace('"right"', '"wrong"', 2))
    assert main(["rescore", str(out)]) == 0
    assert "2 verdicts changed" in capsys.readouterr().out
    assert (out / "samples.jsonl").read_text() == before
    assert (out / "result.json").read_bytes() == (finished / "result.json").read_bytes()
    file_of_others = tmp_path / "sums.jsonl"
    file_of_others.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    saved = (out / "config.yaml").read_text().replace(str(file), str(file_of_others))
    (out / "config.yaml").write_text(saved)
    assert main(["rescore", str(out)]) == 2
    assert "other bytes" in capsys.readouterr().err


def test_without_kept_responses(file, tmp_path, capsys):
    out = tmp_path / "bare"
    assert main(arguments(out, file, "--limit", "1", "--no-keep-responses")) == 0
    assert all(record.response is None for record in records(out).values())
    assert main(["rescore", str(out)]) == 2
    assert "responses were not kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--max-new-tokens", "600"), "max_new_tokens = 600: with the 10 tokens of sums:1 that is 610"),
        (("--top-p", "0.9"), "top_p = 0.9; the local engine accepts 1"),
        (("--top-p", "0"), "top_p is 0.0; accepted"),
        (("--samples", "0"), "samples is 0; accepted"),
        (("--numerics.execution", "te"), "numerics.execution = te; the local engine accepts"),
        (("--own.answer-field", "gold"), "no field 'gold'"),
        (("--own.prompt", "Solve: {prompt}"), "cannot write the prompt"),
        (("--model.path", "nowhere"), "model.path: nowhere holds no config.json"),
    ],
)
def test_errors_before_anything_is_drawn(file, tmp_path, capsys, more, message):
    assert main(arguments(tmp_path / "none", file, *more)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_nothing_to_evaluate_on(capsys):
    assert main([]) == 2
    assert "--data DIR" in capsys.readouterr().err
