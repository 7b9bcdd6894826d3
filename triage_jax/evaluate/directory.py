"""An evaluation's directory: its files, who may write there, and whether it may be continued."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from triage_jax.config import ConfigError, flatten, from_dict, load_yaml, to_dict
from triage_jax.evaluate.config import MAY_CHANGE, EvaluateConfig
from triage_jax.metrics import write_atomically


@dataclass(frozen=True, kw_only=True)
class Directory:
    """Files of one evaluation."""

    root: Path

    @property
    def config(self) -> Path:
        """Settings and identity"""
        return self.root / "config.yaml"

    @property
    def samples(self) -> Path:
        return self.root / "samples.jsonl"

    @property
    def problems(self) -> Path:
        return self.root / "problems.jsonl"

    @property
    def result(self) -> Path:
        return self.root / "result.json"

    @property
    def table(self) -> Path:
        return self.root / "table.md"

    @property
    def weights(self) -> Path:
        """Those that were pushed into servers"""
        return self.root / "weights"

    def clear(self) -> None:
        """Delete what an evaluation writes, and nothing else that may lie there."""
        shutil.rmtree(self.weights, ignore_errors=True)
        for path in (self.samples, self.problems, self.result, self.table, self.config):
            path.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process per directory; the lock goes with the process, however it ends. Raises ConfigError."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(
                    f"{self.root}: another process is at work here; wait for it or choose another --out"
                ) from None
            yield

    def saved(self) -> tuple[EvaluateConfig, dict[str, Any]]:
        """Settings and identity as they were written; raises ConfigError where there are none."""
        if not self.config.is_file():
            raise ConfigError(f"{self.root}: no evaluation lies here (config.yaml is missing)")
        data = load_yaml(self.config)
        if data.keys() != {"config", "identity"}:
            raise ConfigError(f"{self.config}: not an evaluation's; expected `config` and `identity`")
        return from_dict(EvaluateConfig, data["config"], str(self.config)), data["identity"]

    def claim(self, config: EvaluateConfig, identity: dict[str, Any]) -> None:
        """Write what is evaluated, or check that it is what lies here already.

        Raises ConfigError naming the fields that differ.
        """
        if self.config.exists():
            old_config, old_identity = self.saved()
            before = flatten(to_dict(old_config)) | flatten({"identity": old_identity})
            after = flatten(to_dict(config)) | flatten({"identity": identity})
            names = sorted(before.keys() | after.keys())
            changed = [
                key for key in names if before.get(key) != after.get(key) and not key.startswith(MAY_CHANGE)
            ]
            if changed:
                lines = "\n".join(f"  {key}: {before.get(key)!r} -> {after.get(key)!r}" for key in changed)
                raise ConfigError(
                    f"{self.root} holds another evaluation; these differ:\n{lines}\n"
                    "Set them back to continue it, pass --overwrite to start anew, or choose another --out."
                )
        elif self.samples.exists():
            raise ConfigError(
                f"{self.samples}: samples without a config.yaml; pass --overwrite or choose another --out"
            )
        text = yaml.safe_dump({"config": to_dict(config), "identity": identity}, sort_keys=False)
        write_atomically(self.config, text)
