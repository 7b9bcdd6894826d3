"""What an HTTP exchange means before its body is read as an answer: nothing wrong, or which error to raise."""

import json
from collections.abc import Mapping

import httpx

from triage_jax.rollout.sglang.errors import (
    BadResponse,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerGone,
    SglangError,
    Unauthorized,
    shorten,
)

type Fields = dict[str, object]
"""A JSON object"""


def classify(
    status: int | None,
    body: bytes | None,
    error: Exception | None,
    *,
    url: str,
    rid: str | None = None,
) -> SglangError | None:
    """What an exchange means: None for a 200 that may be read on, else the error to raise.

    Either `error`, what the HTTP client raised, or `status` and `body` are given.
    """
    if error is not None:
        return _transport_error(error, url=url, rid=rid)
    if status is None:
        return ServerGone("no response", url=url, rid=rid)
    content = (body or b"").lstrip()
    if status == 200 and not content.startswith(b"data:"):
        return None
    message, code = read_error(content)
    if status != 200:
        return error_of(status, message, url=url, rid=rid)
    if code is not None:
        return error_of(code, message, url=url, rid=rid)
    return BadResponse("body: an event stream that was not asked for", url=url, rid=rid)


def error_of(status: int, message: str, *, url: str, rid: str | None = None) -> SglangError:
    """The error an HTTP status stands for."""
    kind: type[SglangError]
    if status in (401, 403):
        kind, what = Unauthorized, "the key is missing, wrong, or that of the other routes"
    elif status in (408, 429, 503):
        kind, what = ServerBusy, "busy, starting, draining or paused"
    elif 400 <= status < 500:
        kind, what = RequestRefused, "refused"
    elif status >= 500:
        kind, what = ServerFailed, "failed on this request"
    else:
        kind, what = BadResponse, "unexpected status"
    return kind(f"HTTP {status}, {what}", url=url, rid=rid, message=message)


def read_error(body: bytes) -> tuple[str, int | None]:
    """Message and code in any of the server's error bodies: five JSON shapes, the first server-sent event, or text."""
    text = body.decode("utf-8", errors="replace").strip()
    if text.startswith("data:"):
        text = text.partition("\n")[0].removeprefix("data:").strip()
    try:
        shape: object = json.loads(text)
    except (ValueError, RecursionError):
        return text, None
    if not isinstance(shape, dict):
        return text, None
    inner = shape.get("error", shape)
    if isinstance(inner, str):
        return inner, None
    aborted = _abort_reason(shape)
    fields = aborted if aborted is not None else inner if isinstance(inner, dict) else shape
    message = fields.get("message", fields.get("detail"))
    code = fields.get("status_code" if aborted is not None else "code")
    return text if message is None else str(message), code if isinstance(code, int) else None


def _abort_reason(shape: Mapping[str, object]) -> Fields | None:
    meta = shape.get("meta_info")
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    return reason if isinstance(reason, dict) and reason.get("type") == "abort" else None


def _transport_error(error: Exception, *, url: str, rid: str | None) -> SglangError:
    """The error for what the HTTP client raised; its text is left out where it may quote what was sent."""
    kind = type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return ServerGone(f"no connection ({kind}: {shorten(str(error))})", url=url, rid=rid)
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return ServerGone(f"no answer in time ({kind})", url=url, rid=rid)
    if isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
        return ServerGone(
            f"connection dropped ({kind}); if the server died, its weights are lost", url=url, rid=rid
        )
    if isinstance(error, httpx.DecodingError):
        return BadResponse(f"body: cannot be decoded ({kind})", url=url, rid=rid)
    return RequestRefused(f"could not be sent ({kind})", url=url, rid=rid)
