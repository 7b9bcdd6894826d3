"""An objective as data: token losses, the parts of TRIAGE that it keeps, and its reduction."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from triage_jax.objective.batch import Response, TokenBatch, Totals, check_shapes, update_totals
from triage_jax.objective.config import Reduction, TriageConfig
from triage_jax.objective.gate import gate_weights
from triage_jax.objective.loss import objective_loss
from triage_jax.objective.metrics import Metrics
from triage_jax.objective.policy import TokenLoss, TokenLosses


@runtime_checkable
class Objective(Protocol):
    """What the learner calls: `triage_loss`, every variant, and functions of a user's own.

    Returns the loss to be minimised with respect to `logp` and metrics to be merged. `totals` and `weights` are those
    of the whole update (`update_inputs`), so that the losses of its parts add up; by default the batch's own.
    """

    def __call__(
        self,
        logp: Float[Array, "B T"],
        batch: TokenBatch,
        config: TriageConfig,
        totals: Totals | None = None,
        *,
        weights: Float[Array, "B T"] | None = None,
        step: int | Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, ""], Metrics]: ...


@runtime_checkable
class ConfiguredTokenLoss(Protocol):
    """Loss of every token of one response; `logp` and everything of the response are zero where masked."""

    def __call__(self, logp: Float[Array, " T"], response: Response, config: TriageConfig) -> TokenLosses: ...


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An `Objective`. Its metrics have the keys of `triage_loss`; those of parts it lacks say what they would do.

    `ppo/clip_fraction/token` is the share of tokens that a clip, mask or rejection of this objective leaves without
    gradient; such tokens stay in the denominator. Weights that the caller gives are applied whatever the objective,
    so that a Gate can be laid over a rival.
    """

    name: str
    token_loss: ConfiguredTokenLoss
    keeps: frozenset[str] = frozenset()
    """Of "gate", "repair" and "tis": parts that follow the configuration; the others are disabled"""
    reduction: Reduction | None = None
    """The objective's own, where its publication has one; None: the configuration's"""

    def settings(self, config: TriageConfig) -> TriageConfig:
        """`config` as this objective reads it."""
        gate, repair, tis = config.gate, config.repair, config.tis
        return replace(
            config,
            name=self.name,
            gate=gate if "gate" in self.keeps else replace(gate, enabled=False),
            repair=repair if "repair" in self.keeps else replace(repair, enabled=False),
            tis=tis if "tis" in self.keeps else replace(tis, enabled=False),
            reduction=self.reduction or config.reduction,
        )

    def weights(self, batch: TokenBatch, config: TriageConfig) -> Float[Array, "B T"]:
        """Weights of the tokens by this objective's own rule: the Gate's if it has one, else ones."""
        gap = batch.old_logp - batch.sampler_logp
        return gate_weights(gap, batch.advantages, batch.mask, self.settings(config))

    def bind(self, config: TriageConfig, totals: Totals) -> TokenLoss:
        """The token loss for one update. `config` comes from `settings`."""
        return partial(self.token_loss, config=config)

    def __call__(
        self,
        logp: Float[Array, "B T"],
        batch: TokenBatch,
        config: TriageConfig,
        totals: Totals | None = None,
        *,
        weights: Float[Array, "B T"] | None = None,
        step: int | Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, ""], Metrics]:
        """Loss and metrics; see `Objective`. Raises ValueError as `triage_loss` does."""
        check_shapes(batch, logp=logp, weights=weights)
        config = self.settings(config)
        if weights is None:
            weights = self.weights(batch, config)
        if totals is None:
            totals = update_totals(batch, weights, config)
        return objective_loss(self.bind(config, totals), logp, batch, config, totals, weights, step)
