"""Checkpoints through Orbax: everything that decides the next step, written whole or not at all."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from triage_jax.learner.update import LearnerState

logger = logging.getLogger(__name__)
type Json = Mapping[str, Any]


class CheckpointError(RuntimeError):
    """No checkpoint could be written or read: the message names the directory and the reason."""


class Checkpoints:
    """The checkpoints of one run, by step; the newest `keep` are kept.

    Orbax writes into a temporary directory and renames it when every file is on disk, so a checkpoint that a crash cut
    short never counts as one. One that was damaged later is passed over at restore, with a warning.
    """

    def __init__(self, directory: str | Path, keep: int) -> None:
        self._directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self._directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=True
            ),
            item_names=("state", "progress"),
        )

    @property
    def steps(self) -> list[int]:
        """Steps of complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: LearnerState, progress: Json) -> None:
        """Write the checkpoint of `step`; one already there is kept. Raises CheckpointError, on a full disk for one."""
        if step in self.steps:
            return
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(dict(progress))
        )
        try:
            self._manager.save(step, args=items, force=True)
            self._manager.wait_until_finished()
        except (
            Exception
        ) as error:  # tensorstore raises ValueError, XlaRuntimeError or OSError for the same full disk
            kept = f"the newest complete one is step {self.steps[-1]}" if self.steps else "there is none yet"
            raise CheckpointError(
                f"{self._directory}: checkpoint of step {step} could not be written ({error}); {kept}"
            ) from error

    def restore(self, template: LearnerState) -> tuple[LearnerState, dict[str, Any]] | None:
        """Newest readable checkpoint, placed like `template` (arrays or shapes with shardings); None if there is none.

        Raises CheckpointError if there are checkpoints and none can be read.
        """
        failures = []
        for step in reversed(self.steps):
            try:
                items = ocp.args.Composite(
                    state=ocp.args.StandardRestore(template), progress=ocp.args.JsonRestore()
                )
                restored = self._manager.restore(step, args=items)
                return restored["state"], dict(restored["progress"])
            except Exception as error:  # damaged files surface as many types
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                failures.append(f"step {step}: {reason}")
                logger.warning(
                    "%s: checkpoint of step %d is damaged, trying the one before: %s",
                    self._directory,
                    step,
                    reason,
                )
        if failures:
            raise CheckpointError(f"{self._directory}: no checkpoint can be read ({'; '.join(failures)})")
        return None

    def discard_after(self, step: int) -> None:
        """Delete checkpoints newer than `step`: damaged ones that a restore passed over."""
        for newer in [saved for saved in self.steps if saved > step]:
            self._manager.delete(newer)

    def close(self) -> None:
        self._manager.close()


def abstract_state(state: LearnerState) -> LearnerState:
    """Shapes, dtypes and shardings of a state: what `restore` needs to place one."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
