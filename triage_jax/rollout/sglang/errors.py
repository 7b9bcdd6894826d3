"""What can go wrong with a server, by what the caller should do about it."""

from typing import ClassVar

from triage_jax.rollout.protocol import EngineError

MESSAGE_LIMIT = 200
"""Characters of a server's message that are kept: it echoes whole request bodies and server paths."""


class SglangError(EngineError):
    """A server did not do what was asked. `str()` names the server, the request and the server's words, shortened."""

    retryable: ClassVar[bool] = False
    """True: the same request may succeed later or on another server"""

    def __init__(self, what: str, *, url: str, rid: str | None = None, message: str = "") -> None:
        self.url = url
        self.rid = rid
        self.message = shorten(message)
        request = f", request {rid}" if rid else ""
        said = f'; the server said "{self.message}"' if self.message else ""
        super().__init__(f"{url}{request}: {what}{said}")


class RequestRefused(SglangError):
    """The request is wrong, by our own checks or the server's (4xx); sending it again changes nothing."""


class Unauthorized(SglangError):
    """The key is missing, wrong, or that of the other routes (401, 403)."""


class ServerBusy(SglangError):
    """The queue is full, or the server starts, drains or is paused (503, 429, 408)."""

    retryable = True


class ServerFailed(SglangError):
    """The server failed on this request but lives (5xx)."""

    retryable = True


class ServerGone(SglangError):
    """Connection refused or dropped, or no answer in time. A server that died comes back with its start-up weights."""

    retryable = True


class BadResponse(SglangError):
    """A success that fails a check: the message names the field and what was expected."""


class StaleServer(BadResponse):
    """A sample of weights that were not asked for: the server restarted, or somebody else updates it."""


class Unsupported(SglangError):
    """A server this engine cannot train with: another engine, too old, or with options that change what is sampled."""


class RefitFailed(SglangError):
    """New weights were not loaded, or cannot be proven to be."""


def shorten(message: str) -> str:
    """The message on one line, at most MESSAGE_LIMIT characters."""
    line = " ".join(message.split())
    return line if len(line) <= MESSAGE_LIMIT else line[: MESSAGE_LIMIT - 3] + "..."
