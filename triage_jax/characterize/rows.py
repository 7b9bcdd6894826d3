"""One response per row, as other frameworks log them: which column is what, and rows turned into a dump."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from triage_jax.characterize.dumps import ABOVE_ZERO, Dump, DumpError, checked

ALIASES: dict[str, tuple[str, ...]] = {
    "learner_logp": (
        "learner_logp",
        "old_log_probs",
        "old_log_prob",
        "old_logprobs",
        "prev_logprobs",
        "log_probs",
        "train_log_probs",
        "old_per_token_logps",
        "response_logprobs",
    ),
    "sampler_logp": (
        "sampler_logp",
        "rollout_log_probs",
        "rollout_log_prob",
        "rollout_logprobs",
        "generation_logprobs",
        "sampling_per_token_logps",
        "vllm_logprobs",
    ),
    "mask": ("mask", "response_mask", "loss_mask", "loss_masks", "token_loss_mask", "completion_mask"),
    "kept": ("sample_loss_mask",),
    "advantages": ("advantages", "advantage"),
    "rewards": ("filtered_rewards", "rewards", "reward", "score", "scores", "raw_reward"),
    "group": ("group", "uid", "group_index", "group_id", "prompt", "input"),
    "step": ("step", "global_step", "rollout_id"),
}
"""Names under which verl, slime, miles, NeMo-RL, TRL and this package log a column, first match first"""

REQUIRED = ("learner_logp", "sampler_logp")


def parse_map(pairs: tuple[str, ...]) -> dict[str, str]:
    """`learner_logp=old_lp` to {"learner_logp": "old_lp"}. Raises ValueError for an unknown column."""
    found = {}
    for pair in pairs:
        name, separator, column = pair.partition("=")
        if not separator or not column or name not in ALIASES:
            raise ValueError(f"--map {pair}: accepted: COLUMN=NAME with COLUMN one of {', '.join(ALIASES)}")
        found[name] = column
    return found


def columns_of(names: frozenset[str], chosen: Mapping[str, str]) -> dict[str, str]:
    """Which name holds which column. Raises DumpError if one that is needed cannot be found."""
    found = {}
    for column, aliases in ALIASES.items():
        if column in chosen:
            if chosen[column] not in names:
                raise DumpError(f"--map {column}={chosen[column]}: no such field; found: {_list(names)}")
            found[column] = chosen[column]
        elif hit := next((name for name in aliases if name in names), None):
            found[column] = hit
    if missing := [column for column in REQUIRED if column not in found]:
        raise DumpError(
            f"no field for {' and '.join(missing)} (looked for {_list(ALIASES[missing[0]])}); found: "
            f"{_list(names)}. {_hint(names)}"
        )
    if "advantages" not in found and not {"rewards", "group"} <= found.keys():
        raise DumpError(
            f"no field for advantages, and none for rewards and group to compute them from; found: "
            f"{_list(names)}"
        )
    return found


def _hint(names: frozenset[str]) -> str:
    if "rollout_log_probs" in names and "tokens" in names:
        return (
            "slime's and miles' rollout dumps lack the learner's: write train data, --save-debug-train-data. Of train "
            "data, ranks before the last pipeline stage lack them too, and all do with --use-rollout-logprobs"
        )
    if {"input", "output", "score"} <= names:
        return "verl's rollout_data_dir holds text and scores only: log old_log_probs and rollout_log_probs with them"
    if {"prompt", "completion"} <= names:
        return "TRL's completions hold text only: log the per-token log-probabilities with them"
    return "Name the fields with --map learner_logp=NAME --map sampler_logp=NAME"


def _list(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


class RowError(ValueError):
    """One row that cannot be used: field and reason."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One response."""

    learner: Float[np.ndarray, " T"]
    sampler: Float[np.ndarray, " T"]
    mask: Bool[np.ndarray, " T"]
    advantage: Float[np.ndarray, "*token"] | None
    reward: float | None
    group: str | None


def parse_row(row: Mapping[str, Any], columns: Mapping[str, str]) -> Row:
    """Read one row. Raises RowError naming field and position.

    Leading masked positions are cut off: they are the prompt where a framework logs whole sequences. A list of one list
    is that list: NeMo-RL logs slices of a batch of one response (nemo_rl/utils/logger.py, log_batched_dict_as_jsonl).
    """
    if "kept" in columns and _number(row, columns["kept"]) == 0:
        raise RowError(f"`{columns['kept']}` is 0: the response is not in the loss")
    learner, sampler = (_vector(row, columns[name]) for name in REQUIRED)
    if len(learner) != len(sampler):
        raise RowError(
            f"`{columns['learner_logp']}` has {len(learner)} values, `{columns['sampler_logp']}` {len(sampler)}"
        )
    mask = np.ones(len(learner), bool)
    if "mask" in columns and row.get(columns["mask"]) is not None:
        mask = _vector(row, columns["mask"]) != 0
        if len(mask) != len(learner):
            raise RowError(
                f"`{columns['mask']}` has {len(mask)} values, the log-probabilities {len(learner)}"
            )
    if not mask.any():
        raise RowError("no valid token")
    for name, values, other in (
        ("learner_logp", learner, sampler),
        ("sampler_logp", sampler, learner),
    ):
        if not values[mask].any() and other[mask].any():  # as NeMo-RL's force_on_policy_ratio leaves it
            raise RowError(f"`{columns[name]}` is 0 on every valid token: it was not computed")
    for name, values in (("learner_logp", learner), ("sampler_logp", sampler)):
        bad = ~np.isfinite(values) & mask
        if bad.any():
            raise RowError(f"`{columns[name]}` is null or not finite at position {int(bad.argmax())}")
        above = (values > ABOVE_ZERO) & mask
        if above.any():
            place = int(above.argmax())
            raise RowError(f"`{columns[name]}` is {values[place]:g} at position {place}; accepted: at most 0")
    advantage = _advantage(row, columns, len(learner))
    start = int(mask.argmax())
    return Row(
        learner=learner[start:],
        sampler=sampler[start:],
        mask=mask[start:],
        advantage=advantage[start:] if advantage is not None and advantage.ndim else advantage,
        reward=_number(row, columns.get("rewards")),
        group=_group(row, columns),
    )


def _advantage(row: Mapping[str, Any], columns: Mapping[str, str], length: int) -> np.ndarray | None:
    if "advantages" not in columns:
        if _number(row, columns["rewards"]) is None or row.get(columns["group"]) is None:
            raise RowError(f"`{columns['rewards']}` and `{columns['group']}` are needed without advantages")
        return None
    name = columns["advantages"]
    value = _unwrapped(row.get(name))
    if isinstance(value, int | float):
        value = np.asarray(value, np.float32)
    else:
        value = _vector(row, name)
        value = value[0] if value.shape == (1,) and length > 1 else value
    value = np.asarray(value, np.float32)
    if value.ndim and len(value) != length:
        raise RowError(f"`{name}` has {len(value)} values, the log-probabilities {length}")
    if not np.isfinite(value).all():
        raise RowError(f"`{name}` is null or not finite")
    return value


def _vector(row: Mapping[str, Any], name: str) -> Float[np.ndarray, " T"]:
    value = row.get(name)
    if value is None:
        raise RowError(f"`{name}` is missing")
    value = _unwrapped(value)
    try:
        with np.errstate(over="ignore"):  # infinities are refused by name later
            vector = np.asarray(value, np.float64).astype(np.float32)  # None becomes NaN
    except (TypeError, ValueError, OverflowError):
        raise RowError(f"`{name}` is {_short(value)}; accepted: a list of numbers") from None
    if vector.ndim != 1 or not isinstance(value, list):
        raise RowError(f"`{name}` is {_short(value)}; accepted: a list of numbers")
    return vector


def _unwrapped(value: Any) -> Any:
    """Plain values of a tensor or array; the list in a list of one list."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value


def _number(row: Mapping[str, Any], name: str | None) -> float | None:
    value = row.get(name) if name else None
    value = _unwrapped(value)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else None


def _group(row: Mapping[str, Any], columns: Mapping[str, str]) -> str | None:
    value = row.get(columns["group"]) if "group" in columns else None
    return None if value is None else str(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


@dataclass(kw_only=True)
class Skipped:
    """Rows that were left out, with the first few reasons."""

    rows: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, reason: str, rows: int = 1) -> None:
        self.rows += rows
        if len(self.reasons) < 5:
            self.reasons.append(reason)


def dump_of(rows: list[Row], step: int, source: str) -> Dump:
    """Rows of one update, padded to the longest; advantages of the group where a row has none."""
    width = max(len(row.learner) for row in rows)

    def padded(vectors: Iterator[np.ndarray], dtype: type) -> np.ndarray:
        out = np.zeros((len(rows), width), dtype)
        for line, vector in zip(out, vectors, strict=True):
            line[: len(vector)] = vector
        return out

    arrays = {
        "learner_logp": padded((row.learner for row in rows), np.float32),
        "sampler_logp": padded((row.sampler for row in rows), np.float32),
        "mask": padded((row.mask for row in rows), np.bool_),
    }
    given = [row.advantage for row in rows]
    if any(advantage is None for advantage in given):
        arrays["advantages"] = group_advantages(rows)
    elif any(advantage.ndim for advantage in given if advantage is not None):
        spread = (
            np.broadcast_to(row.advantage, row.learner.shape) for row in rows if row.advantage is not None
        )
        arrays["advantages"] = _per_response(padded(spread, np.float32), arrays["mask"])
    else:
        arrays["advantages"] = np.array(given, np.float32)
    if all(row.reward is not None for row in rows):
        arrays["rewards"] = np.array([row.reward for row in rows], np.float32)
    return checked(arrays, step, source)


def _per_response(advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[B] where the advantage is constant on every response, as group-relative ones are; else unchanged."""
    first = np.take_along_axis(advantages, mask.argmax(axis=1)[:, None], axis=1)
    return (
        first[:, 0]
        if np.array_equal(np.where(mask, advantages, first), np.broadcast_to(first, mask.shape))
        else advantages
    )


def group_advantages(rows: list[Row]) -> Float[np.ndarray, " B"]:
    """(reward - mean) / (std + 1e-6) over the rows of a group, population std; 0 where all rewards are equal.

    Raises DumpError if every row is a group by itself, as with an identifier of the response (verl's `uid` in newer
    rollout files).
    """
    rewards = np.array([row.reward for row in rows], float)
    groups = np.unique([row.group or "" for row in rows], return_inverse=True)[1]
    if groups.max() + 1 == len(rows) > 1:
        raise DumpError(
            f"each of the {len(rows)} responses is a group by itself (the first: {_short(rows[0].group)}): no "
            "advantages can be computed; name the prompt's field with --map group=NAME"
        )
    advantages = np.zeros(len(rows), np.float32)
    for group in range(groups.max() + 1):
        inside = groups == group
        of = rewards[inside]
        if of.min() < of.max():
            advantages[inside] = (of - of.mean()) / (of.std() + 1e-6)
    return advantages
