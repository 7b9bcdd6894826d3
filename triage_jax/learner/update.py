"""One update: score the sampled tokens, weigh them once, accumulate the gradient over micro-batches, step or skip."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PyTree

from triage_jax.learner.batch import RolloutBatch
from triage_jax.learner.optimizer import OptimizerConfig, make_optimizer
from triage_jax.learner.sharding import MeshConfig
from triage_jax.model import ModelConfig, Numerics, Params, TokenScores, head_of, token_logprobs
from triage_jax.model.forward import forward_routed
from triage_jax.model.layout import gathered, on_mesh, split_rows
from triage_jax.model.moe import NO_ROOM
from triage_jax.objective import (
    Mean,
    Metrics,
    TokenBatch,
    Totals,
    TriageConfig,
    collapse,
    objective_by_name,
    update_inputs,
)

OVERFLOW = "moe/overflow_fraction"
"""Metric of an update whose experts have a capacity: the share of pairs of token and expert that found no room"""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How one update is computed; nothing here changes its value beyond rounding, the emulated formats' included."""

    micro_batch: int = 0
    """Rows per forward and backward pass; 0: all at once. Must divide the rows of an update. With an activation scale
    per tensor each of them has its own"""
    remat: bool = True
    """Recompute each layer in the backward pass: less memory, and the forward pass is the very program that scores"""
    max_skipped: int = 3
    """Stop after this many updates in a row were skipped for a NaN or inf in loss or gradient"""
    max_overflow: float = 0.0
    """Skip an update in which experts lacked room for a larger share of their tokens (numerics.learner.expert_capacity;
    metric moe/overflow_fraction)"""
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.max_overflow <= 1:
            raise ValueError(f"learner: max_overflow is {self.max_overflow}; accepted: a share, 0 to 1")
        if self.micro_batch < 0 or self.max_skipped < 1:
            raise ValueError("learner: micro_batch must not be negative, max_skipped must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Learner:
    """Everything static about an update; hashable, so the functions below compile once per learner and shape."""

    model: ModelConfig
    numerics: Numerics
    objective: TriageConfig = field(default_factory=TriageConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    settings: LearnerConfig = field(default_factory=LearnerConfig)
    temperature: float = 1.0
    """Of the distribution both log-probabilities belong to"""
    seed: int = 0
    """Of the stochastic rounding of gradients, where the numerics have it"""


@no_type_check  # leaves are also shapes, shardings or stacked micro-batches
@struct.dataclass
class LearnerState:
    """What the next update depends on. Parameters are the float32 master weights."""

    params: Params
    opt_state: PyTree
    step: Int[Array, ""]
    """Rollouts consumed, skipped ones included"""
    skipped_in_a_row: Int[Array, ""]
    skipped: Int[Array, ""]


@no_type_check  # leaves are also shapes, shardings or stacked micro-batches
@struct.dataclass
class UpdateReport:
    """What an update says about itself, on the device until somebody asks."""

    metrics: Metrics
    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    """Global norm before clipping"""
    update_norm: Float[Array, ""]
    param_norm: Float[Array, ""]
    applied: Bool[Array, ""]


def init_state(learner: Learner, params: Params) -> LearnerState:
    """Fresh optimiser state around float32 parameters."""
    master: Any = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    # Three zeros, not one three times: `update` donates the state's buffers, each of which may be given once.
    step, in_a_row, skipped = (jnp.zeros((), jnp.int32) for _ in range(3))
    return LearnerState(
        params=master,
        opt_state=make_optimizer(learner.optimizer).init(master),
        step=step,
        skipped_in_a_row=in_a_row,
        skipped=skipped,
    )


@partial(jax.jit, static_argnums=0)
def score(learner: Learner, params: Params, batch: RolloutBatch) -> TokenScores:
    """Log-probability and entropy of every response token under the learner, `[B, N]`."""
    micro = _micro_batches(learner, batch)
    # Nothing is rounded stochastically without a gradient, but Transformer Engine asks for a key all the same.
    key = jax.random.key(0) if learner.numerics.needs_key else None
    with on_mesh(learner.settings.mesh.data, learner.settings.mesh.fsdp):
        scores = jax.lax.map(lambda piece: _score(learner, params, piece, key)[0], micro)
    return jax.tree.map(_join, scores)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def update(
    learner: Learner, state: LearnerState, batch: RolloutBatch, old_logp: Float[Array, "B N"]
) -> tuple[LearnerState, UpdateReport]:
    """One optimiser step on `batch`, whose tokens had learner log-probabilities `old_logp` before it.

    The objective's weights and totals are taken over the whole batch before it is cut, so that neither micro-batches
    nor devices change loss or gradient. With a NaN or inf in either, or with more tokens without room in their experts
    than the settings allow, parameters and optimiser stay as they were.
    """
    config = learner.objective
    tokens = TokenBatch(
        old_logp=old_logp, sampler_logp=batch.sampler_logp, advantages=batch.advantages, mask=batch.mask
    )
    weights, totals = update_inputs(tokens, config)
    with on_mesh(learner.settings.mesh.data, learner.settings.mesh.fsdp):
        loss, metrics, grads = _accumulate(learner, state, batch, tokens, weights, totals)

    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if OVERFLOW in metrics:
        finite &= metrics[OVERFLOW].value() <= learner.settings.max_overflow
    # A NaN must not reach the moments either: the optimiser sees zeros and its result is thrown away.
    grads = jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0.0), grads)
    params: Any = state.params
    updates, opt_state = make_optimizer(learner.optimizer).update(grads, state.opt_state, params)
    new = optax.apply_updates(params, updates)
    keep = partial(jax.tree.map, lambda after, before: jnp.where(finite, after, before))
    after = LearnerState(
        params=keep(new, params),
        opt_state=keep(opt_state, state.opt_state),
        step=state.step + 1,
        skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
        skipped=state.skipped + ~finite,
    )
    report = UpdateReport(
        metrics=metrics,
        loss=loss,
        grad_norm=grad_norm,
        update_norm=optax.tree.norm(updates),
        param_norm=optax.tree.norm(after.params),
        applied=finite,
    )
    return after, report


def _score(
    learner: Learner, params: Params, batch: RolloutBatch, key: Array | None = None
) -> tuple[TokenScores, Metrics]:
    """Hidden states at the last prompt column and all response columns but the last predict the response."""
    hidden, chosen = forward_routed(
        params,
        batch.tokens,
        batch.valid,
        learner.model,
        learner.numerics,
        remat=learner.settings.remat,
        routes=None if batch.routes is None else jnp.moveaxis(batch.routes, 2, 0),
        key=key,
    )
    width = batch.mask.shape[1]
    scores = token_logprobs(
        split_rows(hidden[:, -width - 1 : -1]),
        gathered(head_of(params)),
        batch.tokens[:, -width:],
        temperature=learner.temperature,
    )
    return scores, _overflow(learner.numerics, chosen, batch.valid)


def _overflow(numerics: Numerics, chosen: Int[Array, "L B T k"] | None, valid: Bool[Array, "B T"]) -> Metrics:
    """Pairs of a token and an expert that had no room for it, of all layers; nothing where there is no limit."""
    if chosen is None or numerics.expert_capacity is None:
        return {}
    dropped = (chosen == NO_ROOM) & valid[None, :, :, None]
    pairs = jnp.sum(valid, dtype=jnp.float32) * (chosen.shape[0] * chosen.shape[3])
    return {OVERFLOW: Mean(jnp.sum(dropped, dtype=jnp.float32), pairs)}


def _accumulate(
    learner: Learner,
    state: LearnerState,
    batch: RolloutBatch,
    tokens: TokenBatch,
    weights: Float[Array, "B N"],
    totals: Totals,
) -> tuple[Float[Array, ""], Metrics, Params]:
    """Sum of loss, metrics and gradient over the micro-batches."""

    def loss_of(params: Params, piece: tuple[RolloutBatch, TokenBatch, Array], key: Array | None):
        rows, piece_tokens, piece_weights = piece
        scores, overflow = _score(learner, params, rows, key)
        loss, metrics = objective_by_name(learner.objective.name)(
            scores.logp,
            piece_tokens,
            learner.objective,
            totals,
            weights=piece_weights,
            step=state.step,
        )
        return loss, metrics | overflow

    def add(carry: tuple[Array, Params], given: tuple[Any, Array | None]):
        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params, *given)
        return jax.tree.map(jnp.add, carry, (loss, grads)), metrics

    pieces = _micro_batches(learner, (batch, tokens, weights))
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    keys = None
    if learner.numerics.needs_key:
        own = jax.random.fold_in(jax.random.key(learner.seed), state.step)
        keys = jax.random.split(own, jax.tree.leaves(pieces)[0].shape[0])
    (loss, grads), stacked = jax.lax.scan(add, (jnp.zeros(()), zeros), (pieces, keys))
    return loss, collapse(stacked), grads


def _micro_batches[Tree](learner: Learner, tree: Tree) -> Tree:
    """`[B, ...]` to `[M, b, ...]`, row r into piece r mod M, so that every device keeps its own rows."""
    rows = jax.tree.leaves(tree)[0].shape[0]
    size = learner.settings.micro_batch or rows
    if rows % size:
        raise ValueError(f"micro_batch = {size} does not divide the {rows} rows of an update")
    return jax.tree.map(lambda leaf: leaf.reshape(size, rows // size, *leaf.shape[1:]).swapaxes(0, 1), tree)


def _join(leaf: Array) -> Array:
    """Undo `_micro_batches`."""
    return leaf.swapaxes(0, 1).reshape(-1, *leaf.shape[2:])
