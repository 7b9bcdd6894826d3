"""TRIAGE with the calibrated Gate: a reference window first, frozen thresholds afterwards."""

from dataclasses import replace

from jaxtyping import Array, Float

from triage_jax.objective.batch import TokenBatch
from triage_jax.objective.calibrated_gate import calibrated_gate_weights
from triage_jax.objective.config import TriageConfig
from triage_jax.objective.variants.base import Variant


class CalibratedVariant(Variant):
    """Gate and Repair are off until the configuration has thresholds; from then on the calibrated Gate weighs."""

    def settings(self, config: TriageConfig) -> TriageConfig:
        """`config` as this objective reads it."""
        config = super().settings(config)
        if config.calibration.thresholds:
            return config
        gate, repair = replace(config.gate, enabled=False), replace(config.repair, enabled=False)
        return replace(config, gate=gate, repair=repair)

    def weights(self, batch: TokenBatch, config: TriageConfig) -> Float[Array, "B T"]:
        """Ones in the reference window, then `calibrated_gate_weights`."""
        if not config.calibration.thresholds:
            return super().weights(batch, config)
        gap = batch.old_logp - batch.sampler_logp
        return calibrated_gate_weights(gap, batch.advantages, batch.mask, config)
