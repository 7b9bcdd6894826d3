"""A small server on a real socket that speaks SGLang 0.5.23's HTTP and misbehaves on demand.

It samples from no model: each token and log-probability is a hash of (weights, seed, prompt, position), so a test can
say exactly what a sample must hold. `weights` is the digest of the files the server loaded last, or "startup".
"""

import hashlib
import json
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

STARTUP = "startup"
STOP = 1
VOCAB = 32


@dataclass
class Running:
    """A response being generated."""

    rid: str
    aborted: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)


def drawn(weights: str, seed: int, prompt: tuple[int, ...], position: int, last: bool) -> tuple[int, float]:
    """The token and log-probability at one position."""
    value = int.from_bytes(hashlib.sha256(f"{weights}/{seed}/{prompt}/{position}".encode()).digest()[:8])
    return (STOP if last else 2 + value % (VOCAB - 2)), -(1 + value % 1009) / 256


def response_length(seed: int, prompt: tuple[int, ...], limit: int) -> tuple[int, bool]:
    """Tokens of a response, and whether it ends with the stop token."""
    value = int.from_bytes(hashlib.sha256(f"length/{seed}/{prompt}".encode()).digest()[:8]) % (limit + 2)
    return (value + 1, True) if value < limit else (limit, False)


def expected(weights: str, seed: int, prompt: tuple[int, ...], limit: int) -> tuple[list[int], list[float]]:
    """The whole response, where no refit falls into it."""
    length, stops = response_length(seed, prompt, limit)
    pairs = [drawn(weights, seed, prompt, i, stops and i == length - 1) for i in range(length)]
    return [token for token, _ in pairs], [logprob for _, logprob in pairs]


def digest_of(path: Path) -> str:
    """Digest of a version's weights, as the server sees them."""
    return hashlib.sha256(
        b"".join(file.read_bytes() for file in sorted(path.glob("*.safetensors")))
    ).hexdigest()


class FakeServer:
    """One server. `fault(route, kind)` makes the next calls of a route go wrong; `kill` and `restart` do as they say.

    Kinds: drop (half a body, then the connection closes), silent (closes without an answer), stall (no answer until
    `kill`), drip (a byte at a time), an int (that HTTP status), or a function that edits the body of a good answer.
    """

    def __init__(
        self, *, token_seconds: float = 0.0, startup_label: str = "default", model_type: str = "qwen3"
    ) -> None:
        self.token_seconds = token_seconds
        self.startup_label = startup_label
        self.info: dict[str, Any] = {"model_type": model_type}
        self.server_info: dict[str, Any] = {"version": "0.5.23", "max_req_input_len": 58}
        self.score: Callable[[Path | None, list[int]], list[float | None]] = lambda _, ids: (
            [-1.0] * (len(ids) - 1)
        )
        self.calls: list[tuple[str, Any]] = []
        self.history: dict[str, str] = {}
        """Label of each update to the weights' digest"""
        self.most_running = 0
        self.salt = ""
        """What makes this server's weights others than the files say"""
        self.follows_temperature = True
        self._faults: dict[str, list[Any]] = defaultdict(list)
        self._changed = threading.Condition()
        self.port = 0
        self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fault(self, route: str, kind: Any, times: int = 1) -> None:
        self._faults[route] += [kind] * times

    def routes(self, *names: str) -> list[str]:
        """Which of the named routes were called, in order."""
        return [route for route, _ in self.calls if route in names]

    def kill(self) -> None:
        """Close the socket and every connection; running requests get no answer."""
        with self._changed:
            self._dead.set()
            self._changed.notify_all()
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self._http.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def restart(self) -> None:
        """Come back on the same port, with the start-up weights."""
        self._start()

    def _start(self) -> None:
        self.label, self.weights, self.path = self.startup_label, STARTUP, None
        self.paused, self.running = False, dict[str, Running]()
        self._dead = threading.Event()
        self._http = _Http(self.port, self, self._dead)
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    # Routes: each returns (status, JSON body or text).

    def answer(self, route: str, body: Any) -> tuple[int, Any]:
        self.calls.append((route, body))
        handler = getattr(self, "_" + route.strip("/").replace("/", "_"), None)
        return (404, {"detail": "Not Found"}) if handler is None else handler(body)

    def take_fault(self, route: str) -> Any:
        return self._faults[route].pop(0) if self._faults[route] else None

    def _ready(self, _: Any) -> tuple[int, Any]:
        return (503 if self.paused else 200), ""

    def _model_info(self, _: Any) -> tuple[int, Any]:
        return 200, self.info | {"weight_version": self.label, "model_path": str(self.path)}

    def _server_info(self, _: Any) -> tuple[int, Any]:
        return 200, self.server_info

    def _v1_loads(self, _: Any) -> tuple[int, Any]:
        return 200, {"loads": [{"num_running_reqs": len(self.running), "num_waiting_reqs": 0}]}

    def _pause_generation(self, body: Any) -> tuple[int, Any]:
        with self._changed:
            self.paused = True
            if body["mode"] == "abort":
                for request in list(self.running.values()):
                    request.aborted = True
                self._changed.notify_all()
        return 200, {"status": "ok", "message": "Generation paused successfully."}

    def _continue_generation(self, _: Any) -> tuple[int, Any]:
        with self._changed:
            self.paused = False
            self._changed.notify_all()
        return 200, {"status": "ok", "message": "Generation continued successfully."}

    def _flush_cache(self, _: Any) -> tuple[int, Any]:
        busy = self.running and not self.paused
        return (400, "Flush cache failed.\n") if busy else (200, "Cache flushed.\n")

    def _update_weights_from_disk(self, body: Any) -> tuple[int, Any]:
        path = Path(body["model_path"])
        if not (path / "config.json").is_file():
            return 400, {"success": False, "message": f"no such path {path}", "num_paused_requests": 0}
        with self._changed:
            self.path, self.weights, self.label = path, self.salt + digest_of(path), body["weight_version"]
            self.history[self.label] = self.weights
        return 200, {"success": True, "message": "Succeeded.", "num_paused_requests": 0}

    def _weights_checker(self, _: Any) -> tuple[int, Any]:
        ranks = [{"checksums": {}, "per_engine_checksum": self.weights}]
        return 200, {
            "success": True,
            "message": "Success.",
            "ranks": ranks,
            "per_engine_checksum": self.weights,
        }

    def _abort_request(self, body: Any) -> tuple[int, Any]:
        with self._changed:
            for rid, request in list(self.running.items()):
                if body.get("abort_all") or rid.startswith(body["rid"]):
                    request.aborted = True
            self._changed.notify_all()
        return 200, ""

    def _generate(self, body: Any) -> tuple[int, Any]:
        ids, sampling, rid = body["input_ids"], body["sampling_params"], body["rid"]
        if any(not 0 <= token < VOCAB for token in ids):
            self._http.connections.clear()
            raise ConnectionError("an id outside the vocabulary kills the server")
        if rid in self.running:
            return 400, {"error": {"message": f"Duplicate request ID: {rid}"}}
        with self._changed:
            request = self.running[rid] = Running(rid)
            self.most_running = max(self.most_running, len(self.running))
        try:
            if sampling["max_new_tokens"] == 0:
                self._wait_unpaused(request)
                return 200, self._scored(rid, ids)
            return 200, self._sampled(request, tuple(ids), sampling)
        finally:
            self.running.pop(rid, None)

    def _scored(self, rid: str, ids: list[int]) -> dict[str, Any]:
        values = [None, *self.score(self.path, ids)]
        meta = {
            "input_token_logprobs": [[value, token, None] for value, token in zip(values, ids, strict=True)]
        }
        finish = {"type": "length", "length": 0}
        common = {"id": rid, "finish_reason": finish, "weight_version": self.label, "completion_tokens": 0}
        spans = [{"version": self.label, "start": 0, "end": 0}]
        return {
            "output_ids": [],
            "meta_info": common | meta | {"prompt_tokens": len(ids), "weight_versions": spans},
        }

    def _sampled(self, request: Running, prompt: tuple[int, ...], sampling: dict[str, Any]) -> dict[str, Any]:
        seed, limit = sampling.get("sampling_seed", 0), sampling["max_new_tokens"]
        length, stops = response_length(seed, prompt, limit)
        for position in range(length):
            self._wait_unpaused(request)
            if request.aborted:
                break
            with self._changed:
                token, logprob = drawn(self.weights, seed, prompt, position, stops and position == length - 1)
                request.tokens.append(token)
                request.logprobs.append(logprob)
                request.labels.append(self.label)
                if self.token_seconds:
                    self._changed.wait(self.token_seconds)
        finish: dict[str, Any] = (
            {"type": "stop", "matched": STOP} if stops else {"type": "length", "length": limit}
        )
        if request.aborted and len(request.tokens) < length:
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        # Eight logits, 0 to -7; only a request that asks for top log-probabilities looks at them.
        scale = sampling["temperature"] if self.follows_temperature else 1.0
        tops = {"output_top_logprobs": [[[-1.0 - rank / scale, rank, None] for rank in range(8)]]}
        return {"output_ids": request.tokens, "meta_info": self._meta(request, finish, len(prompt)) | tops}

    def _meta(self, request: Running, finish: dict[str, Any], prompt_tokens: int) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        for position, label in enumerate(request.labels):
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = position + 1
            else:
                spans.append({"version": label, "start": position, "end": position + 1})
        pairs = zip(request.logprobs, request.tokens, strict=True)
        return {
            "id": request.rid,
            "finish_reason": finish,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(request.tokens),
            "input_token_logprobs": [],
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            "weight_version": self.label,
            "weight_versions": spans or [{"version": self.label, "start": 0, "end": 0}],
        }

    def _wait_unpaused(self, request: Running) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.paused or request.aborted or self._dead.is_set())
        if self._dead.is_set():
            raise ConnectionError("killed")


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, fake: FakeServer, dead: threading.Event) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.fake, self.dead = fake, dead
        self.connections: set[Any] = set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that a test broke on purpose is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Http

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        route = self.path.partition("?")[0]
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        if len(raw) < length:
            raise ConnectionError("the client went away")
        fake, kind = self.server.fake, self.server.fake.take_fault(route)
        body = json.loads(raw) if raw else {}
        if kind in ("silent", "stall") or isinstance(kind, int):
            fake.calls.append((route, body))
            if kind == "stall":
                self.server.dead.wait()
            if not isinstance(kind, int):
                raise ConnectionError(kind)
            self._send(
                kind, {"object": "error", "message": "as the test asked", "type": str(kind), "code": kind}
            )
            return
        status, reply = fake.answer(route, body)
        self._send(status, kind(reply) if callable(kind) else reply, kind)

    def _send(self, status: int, reply: Any, kind: Any = None) -> None:
        payload = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        if self.server.dead.is_set():
            raise ConnectionError("killed")
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(reply, str) else "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        if kind == "drop":
            self.wfile.write(payload[: len(payload) // 2])
            self.wfile.flush()
            self.close_connection = True
        elif kind == "drip":
            for byte in payload:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(0.002)
        else:
            self.wfile.write(payload)


@contextmanager
def fake_servers(count: int = 1, **settings: Any) -> Iterator[list[FakeServer]]:
    """Servers that run while the block does."""
    servers = [FakeServer(**settings) for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()
