"""SGLang servers behind the engine protocol."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from triage_jax.model import ModelConfig, Numerics, Params
from triage_jax.model.quantized import check_storable
from triage_jax.rollout.protocol import (
    Capabilities,
    EngineError,
    Progress,
    Request,
    Sample,
    SamplingParams,
)
from triage_jax.rollout.routing import RouteShape
from triage_jax.rollout.sglang.client import Client
from triage_jax.rollout.sglang.config import SglangConfig
from triage_jax.rollout.sglang.fleet import Fleet
from triage_jax.rollout.sglang.loop import LoopThread
from triage_jax.rollout.sglang.probe import make_probe
from triage_jax.rollout.sglang.server import Target
from triage_jax.rollout.sglang.weights import WeightStore
from triage_jax.rollout.sglang.wire import Limits


class SglangEngine:
    """Samples on SGLang servers that load each version of the weights from a directory all of them see.

    Calls may come from several threads, also from one that runs an event loop: `generate` in one while `update_weights`
    runs in another leaves samples whose tokens carry different versions. `numerics` are the learner's, for the probe.
    """

    def __init__(
        self,
        config: SglangConfig,
        model: ModelConfig,
        numerics: Numerics,
        directory: Path,
        tokenizer_from: Path | None = None,
    ) -> None:
        """`directory`: where weights are written unless the configuration says another. Contacts no server yet.

        Raises ValueError where `checkpoint: modelopt` cannot hold the learner's numerics, and for a mixture with tied
        embeddings, which servers (0.5.23) load without a head.
        """
        if model.num_experts and model.tie_embeddings:
            raise ValueError(
                "a mixture of experts with tie_word_embeddings: SGLang 0.5.23 ignores the tie, leaves the head "
                "uninitialised and answers with NaN; accepted: an untied model"
            )
        if config.checkpoint == "modelopt":
            check_storable(numerics)
        self._config = config
        self._model = model
        self._numerics = numerics
        self._tokenizer_from = tokenizer_from
        root = Path(config.weights_dir).expanduser() if config.weights_dir else directory
        self._store = WeightStore(root, config.keep_versions)
        limits = Limits(
            vocab_size=model.vocab_size, context=model.max_position_embeddings, routes=_route_shape(model)
        )
        self._fleet = Fleet([Client(url, config, limits) for url in config.urls], config, limits)
        self._loop = LoopThread("sglang engine")
        self._refit = threading.Lock()
        self._version = -1
        self._refit_metrics: dict[str, float] = {}

    @property
    def capabilities(self) -> Capabilities:
        """With top-p or top-k the log-probabilities are those of the truncated distribution, not of the softmax."""
        known = [server for server in self._fleet.servers if server.description]
        described = sorted({server.description for server in known}) or ["SGLang, not contacted yet"]
        return Capabilities(
            logprobs_follow_temperature=True,
            deterministic=bool(known) and all(server.deterministic for server in known),
            overlaps=True,
            description=f"{len(self._fleet.servers)} server(s): {'; '.join(described)}",
        )

    @property
    def weight_version(self) -> int:
        return self._version

    def update_weights(self, params: Params, version: int) -> None:
        """Write the weights, and have every server that answers load them, prove them and go on.

        Servers that fail are left out. Raises RefitFailed when no server is left, or for weights that are not finite;
        EngineError for other weights under a version that was used already.
        """
        with self._refit:
            started = time.perf_counter()
            codes = self._numerics if self._config.checkpoint == "modelopt" else None
            snapshot = self._store.write(params, self._model, version, self._tokenizer_from, codes)
            length = self._config.probe_tokens
            probe = make_probe(params, self._model, self._numerics, length) if length else None
            self._loop.run(
                self._fleet.push(Target(snapshot=snapshot, model_type=self._model.architecture, probe=probe))
            )
            self._version = version
            self._store.release({version})
            self._refit_metrics = {
                "engine/refit_seconds": time.perf_counter() - started,
                "engine/refit_bytes": float(snapshot.size),
            }

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Sample]:
        """Draw one sample per request, retrying elsewhere what a server loses; `progress` runs in the caller's thread.

        A sample that is cut off again and again comes back with finish reason abort. An interrupt aborts what runs on
        the servers and leaves the engine usable. Raises EngineError: naming the request for one that no server takes
        or that gets no sample in time, and naming every server where none is left. Servers stop at their model's own
        end-of-text tokens, too.
        """
        if self._version < 0:
            raise EngineError("the engine has no weights yet: call update_weights first")
        _check_names(requests)
        sampling = replace(sampling, stop_ids=sampling.stop_ids or self._model.eos_token_ids)
        ticks: SimpleQueue[tuple[int, int] | None] = SimpleQueue()

        def report(samples: int, tokens: int) -> None:
            ticks.put((samples, tokens))

        with self._loop.start(self._fleet.generate(requests, sampling, report)) as job:
            job.outcome.add_done_callback(lambda _: ticks.put(None))
            while (tick := ticks.get()) is not None:
                if progress is not None:
                    progress(*tick)
            return job.outcome.result()

    def metrics(self) -> dict[str, float]:
        """Of the last refit, of the servers now, and counts since the last call."""
        servers = self._fleet.servers
        gaps = [np.abs(server.gap) for server in servers if server.live and server.gap is not None]
        live = len(self._fleet.live)
        row = self._refit_metrics | {
            "engine/servers_live": float(live),
            "engine/servers_left_out": float(len(servers) - live),
        }
        if gaps:
            row["engine/probe_gap_mean"] = float(np.mean(gaps))
            row["engine/probe_gap_max"] = float(np.max(gaps))
        return row | {f"engine/{name}": float(count) for name, count in self._fleet.take_counts().items()}

    def close(self) -> None:
        """Abort what runs, end the thread, close every connection. Calls that wait raise EngineError."""
        self._loop.close(self._fleet.close())
        self._store.close()


def _route_shape(model: ModelConfig) -> RouteShape | None:
    if not model.num_experts:
        return None
    return RouteShape(
        layers=model.num_layers, experts=model.num_experts, experts_per_token=model.experts_per_token
    )


def _check_names(requests: Sequence[Request]) -> None:
    seen: set[str] = set()
    for request in requests:
        if request.uid in seen:
            raise EngineError(f"request {request.uid}: its uid occurs twice; each names one sample")
        seen.add(request.uid)
