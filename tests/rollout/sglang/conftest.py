"""One real SGLang server on the CPU for all tests that want one."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SERVE = ROOT / "scripts" / "serve_sglang.sh"
RUNNING = "TRIAGE_TEST_SGLANG_URL"
"""Environment variable naming a server that runs already, with the keys below and the quickstart model"""
KEYS = {"SGLANG_API_KEY": "key-of-the-tests", "SGLANG_ADMIN_KEY": "admin-key-of-the-tests"}


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A server that the tests start and end themselves."""

    port: int
    run_dir: Path

    @property
    def _place(self) -> list[str]:
        return ["--port", str(self.port), "--run-dir", str(self.run_dir)]

    def start(self) -> None:
        """Serve the quickstart model, guarded by KEYS; returns when it is ready."""
        subprocess.run([SERVE, "cpu", "quickstart", *self._place, "--wait", "600"], check=True)

    def stop(self) -> None:
        subprocess.run([SERVE, "stop", *self._place], check=False)

    def kill(self) -> None:
        """End it at once, with all its workers; it is the leader of a session of its own."""
        os.killpg(int((self.run_dir / f"{self.port}.pid").read_text()), signal.SIGKILL)


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving | None]:
    """The running server, or None where it is not ours. KEYS are in this process's environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, key in KEYS.items():
            patch.setenv(name, key)
        if os.environ.get(RUNNING):
            yield None
            return
        if not (ROOT / ".venv-sglang" / ".installed").exists():
            pytest.skip("runs once scripts/sglang_cpu_env.sh has made .venv-sglang (3 GB, minutes)")
        serving = Serving(port=_free_port(), run_dir=tmp_path_factory.mktemp("sglang"))
        serving.start()
        try:
            yield serving
        finally:
            serving.stop()


@pytest.fixture(scope="session")
def real_server(serving: Serving | None) -> str:
    """Address of a server that started with the quickstart model and wants KEYS."""
    return os.environ[RUNNING] if serving is None else f"http://127.0.0.1:{serving.port}"


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
