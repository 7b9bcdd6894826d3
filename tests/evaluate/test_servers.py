"""Evaluations whose samples come over HTTP, from the tests' small server: identity, death, resumption, refusals."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from tests.golden import ROOT
from tests.rollout.sglang.fake_server import FakeServer, expected, fake_servers
from tests.tiny import tiny_model
from triage_jax.evaluate.__main__ import main
from triage_jax.evaluate.records import read_records
from triage_jax.tasks.tokenizer import load_tokenizer

PROBLEMS, SAMPLES, LIMIT = 12, 4, 20
TOTAL = PROBLEMS * SAMPLES


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "own.jsonl"
    rows = ({"prompt": f"{n}+{n + 1}=", "answer": str(2 * n + 1)} for n in range(PROBLEMS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def command(model, file):
    """The command line for an output directory and servers."""

    def make(out: Path, servers: list[FakeServer], *more: str) -> list[str]:
        return [
            *("--out", str(out), "--model.path", str(model), "--own.files", str(file)),
            *("--own.prompt", "{prompt}", "--own.match", "last_number"),
            *("--samples", str(SAMPLES), "--max-new-tokens", str(LIMIT), "--engine", "sglang"),
            *("--sglang.urls", *(server.url for server in servers), "--sglang.concurrency", "4"),
            *("--sglang.request-timeout", "20", "--sglang.startup-timeout", "2"),
            *("--sglang.retries", "3", "--sglang.backoff", "0.01"),
            *more,
        ]

    return make


def check(out: Path, model: Path, weights: str = "startup") -> None:
    """Every sample once, each the server's answer to its own seed and prompt."""
    codec = load_tokenizer(model)
    found = list(read_records(out / "samples.jsonl"))
    assert len({(record.problem, record.sample) for record in found}) == len(found) == TOTAL
    for record in found:
        n = int(record.problem.removeprefix("own:")) - 1
        prompt = tuple(codec.encode(f"{n}+{n + 1}="))
        tokens, _ = expected(weights, record.seed, prompt, LIMIT)
        assert record.tokens == len(tokens)
        assert record.response == codec.response_text(tokens)
        assert record.finish == ("stop" if tokens[-1] == 1 else "length")


def drawn(*servers: FakeServer) -> list[tuple]:
    """Seed and prompt of every request that was sent."""
    bodies = [body for server in servers for route, body in server.calls if route == "/generate"]
    return [(body["sampling_params"]["sampling_seed"], tuple(body["input_ids"])) for body in bodies]


def test_the_weights_that_are_served(tmp_path, model, command, capsys):
    out = tmp_path / "run"
    with fake_servers(2, token_seconds=0.002) as servers:
        assert main(command(out, servers)) == 0
        check(out, model)
        assert len(set(drawn(*servers))) == len(drawn(*servers)) == TOTAL
        assert all(drawn(server) for server in servers)
        assert not servers[0].history, "nothing was loaded into a server"
        assert max(server.most_running for server in servers) == 4
        for server in servers:
            server.calls.clear()
        assert main(command(out, servers)) == 0
        assert not drawn(*servers)
    served = yaml.safe_load((out / "config.yaml").read_text())["identity"]["model"]["served"]
    assert served["weight_version"] == "default"
    assert served["checksum"] == "startup"
    assert served["description"] == "SGLang 0.5.23"
    printed = capsys.readouterr().out
    assert "2 server(s): SGLang 0.5.23" in printed
    assert f"| own | {PROBLEMS} | {TOTAL} |" in printed


def test_weights_of_the_path_are_pushed_on_request(tmp_path, model, command):
    out = tmp_path / "run"
    with fake_servers() as servers:
        assert main(command(out, servers, "--weights", "push", "--sglang.probe-tokens", "8")) == 0
        assert list(servers[0].history) == ["step-0"]
        check(out, model, servers[0].weights)
    assert len(yaml.safe_load((out / "config.yaml").read_text())["identity"]["model"]["weights"]) == 64


def test_one_of_two_servers_dies(tmp_path, model, command):
    out = tmp_path / "run"
    with fake_servers(2, token_seconds=0.005) as servers:
        thread = threading.Timer(0.6, servers[0].kill)
        thread.start()
        assert main(command(out, servers)) == 0
        thread.join(10)
        check(out, model)
        servers[0].restart()


def test_the_only_server_dies_and_the_same_command_goes_on(tmp_path, model, command, capsys):
    out = tmp_path / "run"
    with fake_servers(token_seconds=0.005) as servers:

        def kill_midway():
            while len(drawn(servers[0])) < TOTAL // 2:
                time.sleep(0.005)
            servers[0].kill()

        thread = threading.Thread(target=kill_midway, daemon=True)
        thread.start()
        assert main(command(out, servers)) == 1
        thread.join(10)
        error = capsys.readouterr().err
        assert "no server is left to sample from" in error
        assert "the same command continues" in error
        kept = list(read_records(out / "samples.jsonl"))
        assert 0 < len(kept) < TOTAL
        servers[0].restart()
        servers[0].calls.clear()
        assert main(command(out, servers)) == 0
        assert len(drawn(servers[0])) == TOTAL - len(kept), "what was finished is not drawn again"
        check(out, model)
        assert list(read_records(out / "samples.jsonl"))[: len(kept)] == kept


def test_a_killed_evaluation_asks_only_for_what_is_missing(tmp_path, model, command):
    out = tmp_path / "run"
    path = out / "samples.jsonl"
    with fake_servers(token_seconds=0.02) as servers:
        process = subprocess.Popen(
            [sys.executable, "-m", "triage_jax.evaluate", *command(out, servers)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 120
        while not path.exists() or path.read_bytes().count(b"\n") < TOTAL // 3:
            assert process.poll() is None, process.communicate()[0].decode()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.kill()
        process.communicate()
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        while servers[0].running:  # what was in flight has nobody to go to
            time.sleep(0.01)
        servers[0].calls.clear()
        assert main(command(out, servers)) == 0
        assert len(drawn(servers[0])) == TOTAL - whole.count(b"\n")
        assert path.read_bytes().startswith(whole)
        check(out, model)


def test_a_server_that_comes_back_is_believed_once_it_says_the_same(tmp_path, model, command):
    out = tmp_path / "run"
    with fake_servers(token_seconds=0.005) as servers:

        def bounce():
            while len(drawn(servers[0])) < TOTAL // 3:
                time.sleep(0.005)
            servers[0].kill()
            servers[0].restart()

        thread = threading.Thread(target=bounce, daemon=True)
        thread.start()
        assert main(command(out, servers)) == 0
        thread.join(10)
        check(out, model)


def test_a_server_that_comes_back_with_other_weights_ends_it(tmp_path, command, capsys):
    out = tmp_path / "run"
    with fake_servers(token_seconds=0.005) as servers:

        def bounce():
            while len(drawn(servers[0])) < TOTAL // 3:
                time.sleep(0.005)
            servers[0].kill()
            servers[0].startup_label = "other"
            servers[0].restart()

        thread = threading.Thread(target=bounce, daemon=True)
        thread.start()
        assert main(command(out, servers)) == 1
        thread.join(10)
        error = capsys.readouterr().err
        assert "weight_version='other'" in error
        servers[0].calls.clear()
        assert main(command(out, servers)) == 2
        assert "identity.model.served.weight_version: 'default' -> 'other'" in capsys.readouterr().err
        assert not drawn(servers[0])


def test_faults_are_survived(tmp_path, model, command):
    out = tmp_path / "run"
    with fake_servers() as servers:
        servers[0].fault("/generate", 503, 3)
        servers[0].fault("/generate", "drop", 2)
        servers[0].fault("/generate", 500, 2)
        assert main(command(out, servers, "--sglang.retries", "6")) == 0
        check(out, model)


def test_two_servers_that_differ(tmp_path, command, capsys):
    with fake_servers(2) as servers:
        servers[1].startup_label = "other"
        servers[1].label = "other"
        assert main(command(tmp_path / "run", servers)) == 1
        assert servers[1].url in (error := capsys.readouterr().err)
        assert "serves Served(" in error
        assert not drawn(*servers)


def test_a_signal_aborts_what_runs_there(tmp_path, command, capsys):
    out = tmp_path / "run"
    with fake_servers(token_seconds=0.5) as servers:

        def interrupt():
            while not servers[0].running:
                time.sleep(0.005)
            signal.raise_signal(signal.SIGTERM)

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        started = time.monotonic()
        assert main(command(out, servers)) == 0
        thread.join(10)
        assert time.monotonic() - started < 8.0, "no response was waited for: each takes up to 10 s"
        assert "SIGTERM: every finished sample is in" in capsys.readouterr().out
        assert len(servers[0].routes("/abort_request")) == 4
        assert not servers[0].running


def test_the_servers_context_counts(tmp_path, command, capsys):
    with fake_servers() as servers:
        servers[0].server_info["max_req_input_len"] = 16
        assert main(command(tmp_path / "run", servers)) == 2
        assert "the context holds 20" in capsys.readouterr().err


def test_another_model_type(tmp_path, command, capsys):
    with fake_servers(model_type="llama") as servers:
        assert main(command(tmp_path / "run", servers)) == 1
        assert "serves a model of type 'llama', model.path holds 'qwen3'" in capsys.readouterr().err


def test_no_server(tmp_path, command, capsys):
    with fake_servers() as servers:
        pass
    assert main(command(tmp_path / "run", servers, "--sglang.startup-timeout", "0.3")) == 1
    assert "not ready within 0.3 s" in capsys.readouterr().err
