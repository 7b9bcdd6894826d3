"""The parent's end of the child process: start, ask with a deadline, kill by process id, start again.

No signals, no threads and no pickles are used, so that it works from any thread and leaves the caller's
own timers alone.
"""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Literal

WORKER = "triage_jax.tasks.verify.worker"
START_SECONDS = 120.0
Outcome = Literal["equal", "different", "timeout", "error"]


class Checker:
    """One child process shared by all threads of this process; asks are served one at a time."""

    def __init__(self, deadline: float = 6.0, worker: str = WORKER) -> None:
        self.deadline = deadline
        self.worker = worker
        self.starts = 0
        self.last_error = ""
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._stop: weakref.finalize | None = None
        self._requests = 0

    def start(self) -> None:
        """Starts the child if it is not running; otherwise the first `ask` does, and takes seconds longer
        for it.
        """
        with self._lock:
            self._running()

    def ask(self, gold: str, answer: str) -> Outcome:
        """Compare two answers within the deadline. Raises RuntimeError only if no child can be started at
        all.
        """
        with self._lock:
            child = self._running()
            self._requests += 1
            request = {"id": self._requests, "gold": gold, "answer": answer, "seconds": self.deadline}
            try:
                reply = child.exchange(request, self.deadline)
            except (TimeoutError, OSError, ValueError) as error:
                self._end()
                self.last_error = f"{type(error).__name__}: {error}"
                return "timeout" if isinstance(error, TimeoutError) else "error"
            except BaseException:  # interrupted: a reply still on its way must not meet the next request
                self._end()
                raise
            if "error" in reply:
                self.last_error = reply["error"]
                return "error"
            return "equal" if reply["equal"] else "different"

    @property
    def restarts(self) -> int:
        """How many children were started after the first."""
        return max(0, self.starts - 1)

    @property
    def pid(self) -> int | None:
        """Process id of the child, None while there is none."""
        return self._child.process.pid if self._child else None

    def close(self) -> None:
        """Ends the child; a later `ask` starts another."""
        with self._lock:
            self._end()

    def _running(self) -> "_Child":
        if self._child is not None and self._child.owner != os.getpid():
            # After a fork the child belongs to the parent process: leave it alone, start our own.
            self._child = self._stop = None
        if self._child is not None and self._child.process.poll() is not None:
            self._end()
        if self._child is None:
            self._child = _Child(self.worker)
            self._stop = weakref.finalize(self, self._child.end)
            self.starts += 1
            try:
                self._child.wait_until_ready()
            except BaseException:
                self._end()
                raise
        return self._child

    def _end(self) -> None:
        if self._stop is not None:
            self._stop()
        self._child = self._stop = None


class _Child:
    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.owner = os.getpid()
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  closed in `end`
        self.process = subprocess.Popen(
            [sys.executable, "-m", worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # a Ctrl-C at the terminal is for the parent
        )
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._output, selectors.EVENT_READ)
        self.pending = b""

    @property
    def _output(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def wait_until_ready(self) -> None:
        try:
            self._read_line(START_SECONDS)
        except (TimeoutError, OSError) as error:
            self.errors.seek(0)
            details = self.errors.read().decode(errors="replace").strip()[-2000:]
            raise RuntimeError(
                f"the answer checker ({sys.executable} -m {self.worker}) did not start: {details}"
            ) from error

    def exchange(self, request: dict[str, object], seconds: float) -> dict:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        reply = json.loads(self._read_line(seconds))
        if reply.get("id") != request["id"]:
            raise ValueError(f"the checker answered request {reply.get('id')}, not {request['id']}")
        return reply

    def _read_line(self, seconds: float) -> bytes:
        until = time.monotonic() + seconds
        while b"\n" not in self.pending:
            left = until - time.monotonic()
            if left <= 0 or not self.selector.select(left):
                raise TimeoutError(f"no answer within {seconds} s")
            chunk = os.read(self._output, 65536)
            if not chunk:
                raise ConnectionError(f"the checker process ended (status {self.process.wait()})")
            self.pending += chunk
        line, _, self.pending = self.pending.partition(b"\n")
        return line

    def end(self) -> None:
        if self.owner != os.getpid():
            return
        self.process.kill()
        self.process.wait()
        self.selector.close()
        self.errors.close()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # unsent bytes to a dead child
                continue
