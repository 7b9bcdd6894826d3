"""Settings of the SGLang engine: what is refused, and where the keys come from."""

import re
from pathlib import Path

import pytest

from triage_jax.rollout.sglang.config import Keys, SglangConfig, read_keys

KEY, ADMIN = "sk-user-5f2c", "sk-admin-91ab"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"urls": ()}, "urls is empty"),
        ({"urls": ("127.0.0.1:30000",)}, "urls is '127.0.0.1:30000'; accepted: http://host:port"),
        ({"urls": ("ftp://host:1",)}, "accepted: http://host:port"),
        ({"urls": ("http://host:70000",)}, "the port is no number"),
        ({"urls": ("http://host:1?key=2",)}, "accepted: http://host:port"),
        ({"urls": ("http://host:1", "http://host:1/")}, "a server is listed twice"),
        ({"concurrency": 0}, "concurrency is 0; accepted: at least 1"),
        ({"request_timeout": 0.0}, "request_timeout is 0.0; accepted: a positive number of seconds"),
        ({"startup_timeout": float("inf")}, "startup_timeout is inf"),
        ({"connect_timeout": float("nan")}, "connect_timeout is nan"),
        ({"retries": -1}, "retries is -1; accepted: 0 or more"),
        ({"backoff": 31.0}, "backoff is 31.0; accepted: 0 to 30 seconds"),
        ({"checkpoint": "modelopt", "keep_versions": 0}, "keep_versions is 0; accepted: at least 1"),
        ({"keep_versions": 0}, "keep_versions is 0; accepted: at least 1"),
        ({"probe_tokens": 1}, "probe_tokens is 1; accepted: 0, or at least 2"),
        ({"max_probe_gap": 0.0}, "max_probe_gap is 0.0; accepted: None or a positive number of nats"),
    ],
)
def test_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SglangConfig(**changes)


def test_defaults_are_accepted_and_hold_no_key() -> None:
    config = SglangConfig()
    assert config.urls == ("http://127.0.0.1:30000",)
    assert config.pause == "retract"
    assert not any(name in ("api_key", "admin_key") for name in vars(config))


def test_password_in_a_url_is_refused_without_being_quoted() -> None:
    with pytest.raises(ValueError, match="user name or password") as caught:
        SglangConfig(urls=(f"http://me:{KEY}@host:1",))
    assert KEY not in str(caught.value)


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    monkeypatch.delenv("SGLANG_ADMIN_KEY", raising=False)
    assert read_keys(SglangConfig()) == Keys()
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    assert read_keys(SglangConfig()) == Keys(api=KEY, admin=KEY)
    monkeypatch.setenv("SGLANG_ADMIN_KEY", ADMIN)
    assert read_keys(SglangConfig()) == Keys(api=KEY, admin=ADMIN)
    monkeypatch.setenv("OTHER", "sk-other")
    assert read_keys(SglangConfig(api_key_env="OTHER")).api == "sk-other"


def test_a_file_goes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ADMIN_KEY", "sk-environment")
    file = tmp_path / "key"
    file.write_text(f"{ADMIN}\n")
    assert read_keys(SglangConfig(admin_key_file=str(file))).admin == ADMIN
    file.write_text("\n")
    with pytest.raises(ValueError, match="no bearer token"):
        read_keys(SglangConfig(admin_key_file=str(file)))
    with pytest.raises(FileNotFoundError):
        read_keys(SglangConfig(admin_key_file=str(tmp_path / "absent")))


@pytest.mark.parametrize("bad", [f"{KEY} x", f"{KEY}\r\nHost: elsewhere", f"{KEY}é"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_quoted(
    bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", bad)
    with pytest.raises(ValueError, match="environment variable SGLANG_API_KEY is no bearer token") as caught:
        read_keys(SglangConfig())
    assert KEY not in str(caught.value)


def test_keys_are_not_in_a_repr() -> None:
    keys = Keys(api=KEY, admin=ADMIN)
    assert KEY not in f"{keys!r} {keys}"
    assert ADMIN not in f"{keys!r} {keys}"
