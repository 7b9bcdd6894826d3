"""Settings of the SGLang engine, and the two keys it may need, which are never part of them."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

type PauseMode = Literal["retract", "in_place", "abort"]


@dataclass(frozen=True, kw_only=True)
class SglangConfig:
    """Servers, patience, and how weights reach them (docs/sglang.md)."""

    urls: tuple[str, ...] = ("http://127.0.0.1:30000",)
    """Base addresses of the servers; all serve the same model"""
    concurrency: int = 64
    """Requests in flight per server"""
    request_timeout: float = 600.0
    """Seconds a sample may take, retries and pauses for new weights included"""
    connect_timeout: float = 5.0
    """Seconds to wait for a connection"""
    startup_timeout: float = 600.0
    """Seconds to wait at start until the servers are ready"""
    retries: int = 5
    """Further attempts per request after a refused connection, a full queue or a server error"""
    backoff: float = 0.5
    """Seconds before the first retry; doubles with each, jittered, at most 30"""
    api_key_env: str = "SGLANG_API_KEY"
    """Environment variable that holds the servers' --api-key; unset: requests go without"""
    admin_key_env: str = "SGLANG_ADMIN_KEY"
    """Environment variable that holds --admin-api-key; unset: the API key is used on every route"""
    api_key_file: str | None = None
    """File that holds the API key; goes before the environment variable"""
    admin_key_file: str | None = None
    """File that holds the admin key; goes before the environment variable"""
    pause: PauseMode = "retract"
    """What running requests do during a refit. retract: requeued, their prefix is recomputed with the new weights;
    in_place: go on with the old prefix; abort: cut off and drawn again"""
    weights_dir: str | None = None
    """Where weights are written for the servers to load, on a filesystem they see; None: in the run's directory"""
    checkpoint: Literal["bf16", "modelopt"] = "bf16"
    """Layout of those weights: high precision, or the learner's own NVFP4 codes as ModelOpt lays them out"""
    keep_versions: int = 2
    """Versions kept in weights_dir"""
    probe_tokens: int = 32
    """Length of the sequence both sides score after each refit; 0: no probe"""
    max_probe_gap: float | None = None
    """Mean absolute learner-server gap of the probe, nats, above which a server is left out; None: never"""

    def __post_init__(self) -> None:
        _check_urls(self.urls)
        for name in ("concurrency", "keep_versions"):
            self._accept(name, getattr(self, name) >= 1, "at least 1")
        for name in ("request_timeout", "connect_timeout", "startup_timeout"):
            self._accept(name, 0.0 < getattr(self, name) < float("inf"), "a positive number of seconds")
        self._accept("retries", self.retries >= 0, "0 or more")
        self._accept("backoff", 0.0 <= self.backoff <= 30.0, "0 to 30 seconds")
        self._accept("pause", self.pause in ("retract", "in_place", "abort"), "retract, in_place, abort")
        self._accept("checkpoint", self.checkpoint in ("bf16", "modelopt"), "bf16, modelopt")
        self._accept("probe_tokens", self.probe_tokens == 0 or self.probe_tokens >= 2, "0, or at least 2")
        gap = self.max_probe_gap
        self._accept("max_probe_gap", gap is None or gap > 0.0, "None or a positive number of nats")

    def _accept(self, name: str, valid: bool, accepted: str) -> None:
        if not valid:
            raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: {accepted}")


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The two bearer tokens. Their values appear in no repr and no message."""

    api: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)
    """Of the control routes; a server with both keys refuses each on the other's routes"""


def read_keys(config: SglangConfig) -> Keys:
    """Keys from the files or the environment variables the configuration names.

    Raises ValueError for a key that cannot stand in an HTTP header, OSError for a file that cannot be read.
    """
    api = _read_key(config.api_key_file, config.api_key_env)
    return Keys(api=api, admin=_read_key(config.admin_key_file, config.admin_key_env) or api)


def _read_key(file: str | None, variable: str) -> str | None:
    if file is not None:
        source, text = f"file {file}", Path(file).read_text(encoding="utf-8", errors="replace")
    else:
        source, text = f"environment variable {variable}", os.environ.get(variable, "")
    key = text.strip()
    if not key and file is None:
        return None
    # HTTP libraries quote an illegal header value in their exception, so it must never reach them.
    if not key or not all("!" <= character <= "~" for character in key):
        raise ValueError(f"the key in {source} is no bearer token; accepted: printable ASCII without spaces")
    return key


def _check_urls(urls: tuple[str, ...]) -> None:
    if not urls:
        raise ValueError("urls is empty; accepted: at least one server")
    for url in urls:
        parts = urlsplit(url)
        if parts.username is not None or parts.password is not None:
            raise ValueError(
                "urls holds a user name or password; accepted: http(s)://host:port, keys by file or env"
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"urls is {url!r}; accepted: http://host:port or https://host:port")
        try:
            _ = parts.port
        except ValueError:
            raise ValueError(f"urls is {url!r}: the port is no number from 0 to 65535") from None
    stripped = [url.rstrip("/") for url in urls]
    if len(set(stripped)) < len(urls):
        raise ValueError(f"urls is {urls}: a server is listed twice; accepted: each once")
