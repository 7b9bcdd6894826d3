"""What a person sees while samples are drawn."""

import time
from collections.abc import Sequence

from rich import progress as rich_progress
from rich.console import Console

from triage_jax.evaluate.records import Record
from triage_jax.report import sampling_bar

EVERY_SECONDS = 30.0
"""Between two lines where there is no terminal"""


class SampleProgress:
    """A bar of samples with tokens per second on a terminal; elsewhere a line now and then."""

    def __init__(self, console: Console, total: int, finished: int) -> None:
        self._console, self._total = console, total
        self._finished = finished
        self._samples = self._tokens = self._right = 0
        self._started = self._said = time.monotonic()
        self._bar: rich_progress.Progress | None = None
        if console.is_terminal:
            self._bar = sampling_bar(console, "{task.fields[right]}", remaining=True)
            self._bar.add_task("sampling", total=total, completed=finished, rate=0.0, right="")
            self._bar.start()

    def add(self, records: Sequence[Record]) -> None:
        """Count samples that finished together."""
        self._samples += len(records)
        self._tokens += sum(record.tokens for record in records)
        self._right += sum(record.right for record in records)
        now = time.monotonic()
        if self._bar is not None:
            (task,) = self._bar.tasks
            self._bar.update(task.id, advance=len(records), rate=self._rate(now), right=self._share())
        elif now - self._said >= EVERY_SECONDS:
            self._said = now
            self._console.print(self.line(), markup=False, soft_wrap=True)

    def line(self) -> str:
        done = self._finished + self._samples
        rate = self._rate(time.monotonic())
        return f"{done}/{self._total} samples, {rate:,.0f} tokens/s, {self._share()}"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _share(self) -> str:
        return f"{self._right} of these {self._samples} right"

    def _rate(self, now: float) -> float:
        """Tokens per second of this process's samples."""
        return self._tokens / max(now - self._started, 1e-9)
