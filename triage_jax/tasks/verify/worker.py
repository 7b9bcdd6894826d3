"""The child process: one JSON line in, one out.

Start as `python -m triage_jax.tasks.verify.worker`. A request is `{"id", "gold", "answer", "seconds"}`, a
reply `{"id", "equal": bool}` or `{"id", "error": str}`; the first line, `{"ready": true}`, comes once the
imports are done. The process ends at end of file on its input, and by its own alarm (default action, which
also ends a long C call) when a request outlives its seconds and nobody is left to kill it.
"""

import json
import logging
import os
import signal
import sys
from typing import TextIO

MEMORY_BYTES = 4 * 2**30
GRACE_SECONDS = 3


def main() -> None:
    replies = _private_stdout()
    _limit_memory()
    from triage_jax.tasks.verify import algebra  # slow, and may print: only after standard output is private

    logging.disable(logging.CRITICAL)
    _reply(replies, {"ready": True})
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for line in sys.stdin:
        request = json.loads(line)
        _set_alarm(int(request["seconds"]) + GRACE_SECONDS)
        try:
            reply = {"equal": algebra.equal(request["gold"], request["answer"])}
        except (
            Exception
        ) as error:  # whatever the algebra raises is an answer, and the next request is another matter
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        _set_alarm(0)
        _reply(replies, {"id": request["id"], **reply})


def _private_stdout() -> TextIO:
    """The parent's pipe as a stream of our own; whatever libraries print goes to standard error instead."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _limit_memory() -> None:
    """An address-space limit turns `9^{9^9}` into a MemoryError instead of a machine out of memory."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _set_alarm(seconds: int) -> None:
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def _reply(replies: TextIO, message: dict[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
