"""The child process: deadlines, death, threads, timers, and what is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.golden import ROOT
from triage_jax.tasks.verify import MathVerifier
from triage_jax.tasks.verify.process import Checker

NEEDS_CHILD = (r"\boxed{\sqrt{2}+\frac12}", r"\frac{1+2\sqrt2}{2}")


@pytest.fixture(scope="module")
def stub():
    checker = Checker(deadline=1.0, worker="tests.tasks.stub_worker")
    yield checker
    checker.close()


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether the process ends, and is no zombie, within the time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z" and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == "1":
            return True  # an orphan: reaping it is init's business
        time.sleep(0.05)
    return False


def test_without_the_guard_the_deadline_holds():
    checker = Checker(deadline=2.0)
    for answer in ("(" * 200 + "x" + ")" * 200, "9^{9^{9^{9}}}"):
        checker.start()
        started = time.monotonic()
        assert checker.ask("18", answer) in ("timeout", "error", "different")
        assert time.monotonic() - started < checker.deadline + 20.0
    checker.close()


def test_a_hanging_request_is_killed_and_the_next_is_served(stub):
    stub.start()
    starts, pid = stub.starts, stub.pid
    started = time.monotonic()
    assert stub.ask("18", "hang") == "timeout"
    assert 1.0 <= time.monotonic() - started < 20.0
    assert gone(pid)
    assert stub.ask("18", "18") == "equal"
    assert stub.starts == starts + 1


def test_an_interrupt_leaves_no_stale_reply(stub, monkeypatch):
    stub.start()
    monkeypatch.setattr(stub._child, "_read_line", lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        stub.ask("18", "18")
    assert stub.pid is None
    assert stub.ask("18", "19") == "different"


def test_a_stopped_child_is_killed_too(stub):
    stub.start()
    pid = stub.pid
    os.kill(pid, signal.SIGSTOP)
    assert stub.ask("18", "18") == "timeout"
    assert gone(pid)


def test_a_child_killed_midway_is_an_error_and_is_replaced(stub):
    stub.start()
    starts, pid = stub.starts, stub.pid
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    assert stub.ask("18", "hang") == "error"
    assert "ended (status -9)" in stub.last_error
    assert stub.ask("18", "19") == "different"
    assert stub.starts == starts + 1


def test_a_child_that_died_between_requests_is_replaced(stub):
    stub.start()
    pid = stub.pid
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.1)
    assert stub.ask("18", "18") == "equal"
    assert stub.pid != pid


@pytest.mark.parametrize(
    ("answer", "message"),
    [("die", "status 3"), ("fail", "as asked"), ("chatter", "answered request -1")],
)
def test_failures_are_errors_with_a_reason(stub, answer, message):
    assert stub.ask("18", answer) == "error"
    assert message in stub.last_error
    assert stub.ask("18", "18") == "equal"


def test_threads_share_the_child_and_timers_survive():
    fired = []
    previous = signal.signal(signal.SIGALRM, lambda *_: fired.append(True))
    outer = signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, 100.0)
    try:
        with MathVerifier() as verifier:
            results: list[str] = []
            work = [rf"\boxed{{x+{n}}}" for n in range(12)]
            threads = [
                threading.Thread(target=lambda c=c, n=n: results.append(verifier.score(c, f"{n}+x").status))
                for n, c in enumerate(work)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert results == ["right"] * 12
            assert verifier.score(*NEEDS_CHILD).status == "right"
            assert verifier.checker.starts == 1
        assert 50.0 < signal.getitimer(signal.ITIMER_REAL)[0] < 100.0
        assert not fired
    finally:
        signal.setitimer(signal.ITIMER_REAL, *outer)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize(
    ("answer", "status"), [("hang", "timeout"), ("die", "error"), ("x+1", "right"), ("x+2", "wrong")]
)
def test_outcomes_become_statuses(stub, answer, status):
    verifier = MathVerifier()
    verifier.checker = stub
    verdict = verifier.score(rf"\boxed{{{answer}}}", "1+x")
    assert (verdict.status, verdict.reward) == (status, float(status == "right"))


PARENT = """
import sys, time
from triage_jax.tasks.verify.process import Checker
checker = Checker(worker="tests.tasks.stub_worker")
assert checker.ask("x+1", "1+x") == "equal"
print(checker.pid, flush=True)
"""


def parent(script: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_the_child_leaves_with_the_interpreter():
    with parent(PARENT) as process:
        pid = int(process.stdout.readline())
        assert process.wait(30) == 0
    assert gone(pid)


def test_an_idle_child_leaves_when_the_parent_is_killed():
    with parent(PARENT + "time.sleep(100)") as process:
        pid = int(process.stdout.readline())
        process.kill()
        process.wait(30)
    assert gone(pid)


BUSY_PARENT = """
import sys
from triage_jax.tasks.verify import MathVerifier
verifier = MathVerifier()
assert verifier.score(r"\\boxed{1+x}", "x+1").reward == 1.0
assert not any(name.partition(".")[0] in ("math_verify", "sympy", "jax", "numpy") for name in sys.modules)
print(verifier.checker.pid, flush=True)
verifier.checker.deadline = 2.0
verifier.checker.ask("18", "9^{9^{9^{9}}}")
"""


def test_a_busy_orphan_ends_by_its_own_alarm():
    with parent(BUSY_PARENT) as process:
        pid = int(process.stdout.readline())
        time.sleep(0.3)
        process.kill()
        process.wait(30)
    assert gone(pid)


def test_collecting_the_checker_ends_the_child():
    checker = Checker(worker="tests.tasks.stub_worker")
    checker.start()
    pid = checker.pid
    del checker
    assert gone(pid)


def test_a_forked_copy_starts_a_child_of_its_own(stub, monkeypatch):
    stub.start()
    pid, child = stub.pid, stub._child
    monkeypatch.setattr(child, "owner", child.owner + 1)  # as it looks from the other side of a fork
    assert stub.ask("18", "18") == "equal"
    assert stub.pid != pid
    os.kill(pid, 0)
    monkeypatch.undo()
    child.end()


def test_a_child_that_cannot_start_says_why():
    with pytest.raises(RuntimeError, match="no_such_worker"):
        Checker(worker="triage_jax.tasks.no_such_worker").start()


def test_prints_in_the_child_do_not_reach_the_protocol():
    script = (
        "import sys, types; algebra = types.SimpleNamespace(equal=lambda *_: print('noise') or True)\n"
        "import triage_jax.tasks.verify; triage_jax.tasks.verify.algebra = algebra\n"
        "from triage_jax.tasks.verify import worker; worker.main()"
    )
    request = '{"id": 7, "gold": "1", "answer": "2", "seconds": 5}\n'
    run = subprocess.run(
        [sys.executable, "-c", script], input=request, capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert run.stdout.splitlines() == ['{"ready": true}', '{"id": 7, "equal": true}']
