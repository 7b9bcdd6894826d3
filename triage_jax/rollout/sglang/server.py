"""What the fleet knows of one server, and how new weights get into it."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from triage_jax.rollout.protocol import Sample
from triage_jax.rollout.sglang.client import Client
from triage_jax.rollout.sglang.config import SglangConfig
from triage_jax.rollout.sglang.errors import (
    RefitFailed,
    ServerGone,
    SglangError,
    StaleServer,
    Unsupported,
)
from triage_jax.rollout.sglang.probe import Probe
from triage_jax.rollout.sglang.weights import Snapshot
from triage_jax.rollout.sglang.wire import Limits, parse_label, version_label

CONTROL_SECONDS = 60.0
"""A server that takes longer over anything but loading weights and sampling is taken for dead"""
ROUSE_SECONDS = 10.0
DEATHS = 2
"""A version over which a server died this often is not sent to it again"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The weights that every server must hold."""

    snapshot: Snapshot
    model_type: str
    """Of the model's config.json; a server of another architecture would die of these weights"""
    probe: Probe | None

    @property
    def label(self) -> str:
        return version_label(self.snapshot.version)


class Server:
    """One server's state. It is `live`, and gets work, only while it is known to hold the target's weights."""

    def __init__(self, client: Client, config: SglangConfig, limits: Limits) -> None:
        self.client = client
        self.limits = limits
        self.live = False
        self.target: Target | None = None
        """What it was taken in with last"""
        self.trouble: SglangError | None = None
        """Why it was left out last"""
        self.busy = 0
        self.calls: dict[str, asyncio.Task[Sample]] = {}
        self.epoch = 0
        """Counts the times it was left out: news from an earlier life is no news"""
        self.lock = asyncio.Lock()
        """Held while weights are loaded or checked"""
        self.deterministic = False
        self.description = ""
        self.gap: np.ndarray | None = None
        """Learner minus server at the last probe"""
        self._config = config
        self._limits = limits
        self.refits = 0
        """Counts the refits that were proven"""
        self._proven: dict[int, int] = {}
        """Version to the count of its refit; cleared when the server is left out"""
        self._trial: int | None = None
        self._settled = asyncio.Event()
        self._checksums: dict[str, str] = {}
        self._deaths: dict[int, int] = {}
        self._refused: int | None = None
        self._follows_temperature = False

    @property
    def url(self) -> str:
        return self.client.url

    def version_of(self, label: str) -> int | None:
        """Version of a token's label; None unless these weights were proven here, or are about to be."""
        version = parse_label(label)
        return version if version in self._proven or version == self._trial else None

    def refuses(self, target: Target) -> bool:
        """Whether loading these weights has failed here for a reason that would not go away."""
        return self._refused == target.snapshot.version

    async def settled(self, sample: Sample, since: int) -> None:
        """Wait for the verdict on weights that drew a part of the sample.

        Raises StaleServer if they failed, or if they were replaced before the request was sent, at `since` refits: a
        server that restarted may well carry the label of an older version.
        """
        drew = set(sample.weight_versions.tolist())
        while self._trial in drew:
            await self._settled.wait()
        if stale := [version for version in drew if self._proven.get(version, -1) < since]:
            what = f"drawn with {version_label(min(stale))}, which is out of date or failed its refit"
            raise StaleServer(what, url=self.url, rid=sample.uid)

    def forgive(self) -> None:
        """Let weights that failed here be tried again."""
        self._refused = None
        self._deaths.clear()

    def dismiss(self, error: SglangError) -> None:
        """Give up what it holds and everything it works on."""
        self.live = False
        self.epoch += 1
        self.trouble = error
        self._proven.clear()
        self._follows_temperature = False
        for call in self.calls.values():
            call.cancel()

    async def rouse(self) -> None:
        """Raise ServerGone unless it takes work; a pause that somebody who is gone left behind is undone first."""
        if await self.client.ready():
            return
        await self._soon(self.client.resume(), ROUSE_SECONDS)
        if not await self.client.ready():
            raise ServerGone("answers, but /ready says no: it starts or drains", url=self.url)

    async def holds(self, target: Target) -> bool:
        """Whether label and checksum say that the target's weights, proven before, are still there."""
        if target.snapshot.version not in self._proven or target.snapshot.digest not in self._checksums:
            return False
        info = await self._soon(self.client.model_info())
        checksum = await self._soon(self.client.checksum())
        return (
            info.get("weight_version") == target.label and checksum == self._checksums[target.snapshot.digest]
        )

    async def load(self, target: Target) -> None:
        """Pause, load, flush, compare checksums, go on, probe; then its samples of this version are trusted.

        Raises what went wrong; whatever it was, the server has been told to go on, and the caller must `dismiss` it.
        """
        version = target.snapshot.version
        try:
            await self._inspect(target)
            self._trial = version
            await self._swap(target)
            await self._verify(target)
        except ServerGone:
            self._deaths[version] = self._deaths.get(version, 0) + 1
            if self._deaths[version] >= DEATHS:
                self._refused = version
            raise
        except SglangError as error:
            if not error.retryable and not isinstance(error, StaleServer):
                self._refused = version
            raise
        else:
            self.refits += 1
            self._proven[version] = self.refits
            self._refused = None
        finally:
            self._trial = None
            self._settled.set()
            self._settled.clear()

    async def _inspect(self, target: Target) -> None:
        facts = await self._soon(self.client.facts())
        info = await self._soon(self.client.model_info())
        if info.get("model_type") != target.model_type:
            what = f"serves a model of type {info.get('model_type')!r:.40}; the learner's is {target.model_type!r}"
            raise Unsupported(what, url=self.url)
        self.limits = facts.within(self._limits)
        self.deterministic, self.description = facts.deterministic, facts.description

    async def _swap(self, target: Target) -> None:
        try:
            await self._soon(self.client.pause(self._config.pause))
            await self.client.update_from_disk(target.snapshot.path, target.label)
            if self._config.pause != "in_place":  # running requests hold on to their prefixes
                await self._soon(self.client.flush())
            self._compare(target, await self._soon(self.client.checksum()))
        except BaseException:
            with suppress(SglangError):  # must not hide what went wrong
                await self._soon(self.client.resume())
            raise
        await self._soon(self.client.resume())

    def _compare(self, target: Target, checksum: str) -> None:
        """Equal weights have equal checksums, different ones different: the server's are no digest of files."""
        digest = target.snapshot.digest
        for known, seen in self._checksums.items():
            if (known == digest) != (seen == checksum):
                what = (
                    "did not change, though the weights did"
                    if known != digest
                    else "is not what it was before"
                )
                raise RefitFailed(
                    f"loaded {target.label}, but its checksum {checksum:.16} {what}", url=self.url
                )
        # The last one is enough to see a refit without effect, and comparing with all would be slow after many steps.
        self._checksums = {digest: checksum}

    async def _verify(self, target: Target) -> None:
        info = await self._soon(self.client.model_info())
        if info.get("weight_version") != target.label:
            what = f"loaded {target.label}, but says it holds {info.get('weight_version')!r:.60}"
            raise StaleServer(what, url=self.url)
        await self._measure_temperature(target)
        if target.probe is None:
            return
        self.gap = target.probe.gap(await self.client.score(target.probe.ids, label=target.label))
        mean, limit = float(np.abs(self.gap).mean()), self._config.max_probe_gap
        if not np.isfinite(self.gap).all() or (limit is not None and mean > limit):
            what = f"probe of {target.label}: mean |learner - server| is {mean:.4g} nats; accepted: at most {limit}"
            raise RefitFailed(what, url=self.url)

    async def _measure_temperature(self, target: Target) -> None:
        """Once in the server's life: a start-up option that it does not tell of changes what log-probabilities mean."""
        if self._follows_temperature:
            return
        follows = await self.client.follows_temperature(target.probe.ids if target.probe else (0, 1))
        if follows is False:
            what = (
                "its log-probabilities leave the temperature out; unset SGLANG_RETURN_ORIGINAL_LOGPROB there"
            )
            raise Unsupported(what, url=self.url)
        self._follows_temperature = follows is True

    async def _soon[T](self, call: Coroutine[object, object, T], seconds: float = CONTROL_SECONDS) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await call
        except TimeoutError:
            raise ServerGone(f"no answer to a control call within {seconds:g} s", url=self.url) from None
