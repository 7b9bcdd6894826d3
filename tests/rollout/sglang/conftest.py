"""One real SGLang server on the CPU for all tests that want one."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SERVE = ROOT / "scripts" / "serve_sglang.sh"
RUNNING = "TRIAGE_TEST_SGLANG_URL"
"""Environment variable naming a server that runs already, with the keys below and the quickstart model"""
KEYS = {"SGLANG_API_KEY": "key-of-the-tests", "SGLANG_ADMIN_KEY": "admin-key-of-the-tests"}


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with the quickstart model, guarded by KEYS, which are in this process's environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, key in KEYS.items():
            patch.setenv(name, key)
        if url := os.environ.get(RUNNING):
            yield url
            return
        if not (ROOT / ".venv-sglang" / ".installed").exists():
            pytest.skip("no SGLang here: scripts/sglang_cpu_env.sh makes .venv-sglang (3 GB, minutes)")
        port = str(_free_port())
        place = ["--port", port, "--run-dir", str(tmp_path_factory.mktemp("sglang"))]
        subprocess.run([SERVE, "cpu", "quickstart", *place, "--wait", "600"], check=True)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            # A test may have killed it: then there is nothing to stop.
            subprocess.run([SERVE, "stop", *place], check=False)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
