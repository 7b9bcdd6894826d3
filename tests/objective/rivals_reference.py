"""Token losses of the rivals in float64, one token at a time, with their gradients worked out by hand: an oracle.

Every function takes the live, old and sampler log-probabilities and the advantages of one response's valid tokens, and
returns its token losses and the gradient of their sum with respect to the live ones.
"""

import math

import numpy as np

from triage_jax.objective import TriageConfig


def _surrogate(ratio, advantage, low, high):
    """PPO's loss and its derivative by log ratio."""
    loss = max(-advantage * ratio, -advantage * min(max(ratio, low), high))
    lost = (advantage > 0 and ratio > high) or (advantage < 0 and ratio < low)
    return loss, 0.0 if lost else -advantage * ratio


def _each(live, reference, advantages, low, high, weights=None):
    weights = np.ones(len(live)) if weights is None else weights
    pairs = [
        _surrogate(math.exp(x - y), a, low, high) for x, y, a in zip(live, reference, advantages, strict=True)
    ]
    return tuple(np.asarray(column) * weights for column in zip(*pairs, strict=True))


def _ppo(live, old, advantages, config, weights=None):
    return _each(live, old, advantages, 1 - config.clip.low, 1 + config.clip.high, weights)


def grpo(live, old, sampler, advantages, config):
    return _ppo(live, old, advantages, config)


def dr_grpo(live, old, sampler, advantages, config):
    return _ppo(live, old, advantages, config, len(live) / config.rivals.dr_grpo.max_tokens)


def gspo(live, old, sampler, advantages, config):
    bounds, n = config.rivals.gspo, len(live)
    s = math.exp(np.mean(live - old))
    losses, slopes = zip(
        *(_surrogate(s, a, 1 - bounds.low, 1 + bounds.high) for a in advantages), strict=True
    )
    return np.asarray(losses), np.full(n, sum(slopes) / n)  # d log s / d logp = 1 / n


def cispo(live, old, sampler, advantages, config):
    bounds = config.rivals.cispo
    slopes = -np.clip(np.exp(live - old), bounds.low, bounds.high) * advantages
    return slopes * live, slopes


def clip_sampler(live, old, sampler, advantages, config):
    return _ppo(live, sampler, advantages, config)


def tis_token(live, old, sampler, advantages, config):
    rho = np.exp(old - sampler)
    return _ppo(live, old, advantages, config, np.clip(rho, config.tis.low, config.tis.high))


def tis_sequence(live, old, sampler, advantages, config):
    weight = min(math.exp(max(sum(old - sampler), -20)), config.rivals.tis_sequence.high)
    return _ppo(live, old, advantages, config, weight)


def icepop(live, old, sampler, advantages, config):
    band = config.rivals.icepop
    weights = [rho if band.low <= rho <= band.high else 0.0 for rho in np.exp(old - sampler)]
    return _ppo(live, old, advantages, config, np.asarray(weights))


def geo_rejection(live, old, sampler, advantages, config):
    band, rho = config.rivals.geo_rejection, np.exp(old - sampler)
    keep = band.low <= np.prod(rho) ** (1 / len(rho)) <= band.high
    return _ppo(live, old, advantages, config, rho * keep)


def k3_rejection(live, old, sampler, advantages, config):
    rho = np.exp(old - sampler)
    keep = np.mean(rho - 1 - np.log(rho)) <= config.rivals.k3_rejection.threshold
    return _ppo(live, old, advantages, config, float(keep))


def opsm(live, old, sampler, advantages, config):
    drop = np.mean(advantages) < 0 and np.mean(sampler - live) > config.rivals.opsm.threshold
    return _ppo(live, old, advantages, config, float(not drop))


def _dppo(live, sampler, advantages, config, away):
    bounds = config.rivals.dppo
    slopes = []
    for x, y, a in zip(live, sampler, advantages, strict=True):
        slopes.append(
            0.0 if away(math.exp(x), math.exp(y), a) else -min(math.exp(x - y), bounds.ratio_max) * a
        )
    slopes, log_ratio = np.asarray(slopes), live - sampler
    return slopes * live + bounds.penalty * log_ratio**2, slopes + 2 * bounds.penalty * log_ratio


def dppo_tv(live, old, sampler, advantages, config):
    bounds = config.rivals.dppo

    def away(p, q, a):
        return (a > 0 and p - q > bounds.tv_high) or (a < 0 and p - q < -bounds.tv_low)

    return _dppo(live, sampler, advantages, config, away)


def dppo_kl(live, old, sampler, advantages, config):
    bounds = config.rivals.dppo

    def away(p, q, a):
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        return (a > 0 and p > q and kl > bounds.kl_high) or (a < 0 and p < q and kl > bounds.kl_low)

    return _dppo(live, sampler, advantages, config, away)


def bapo_bounds(rows, config):
    """Bounds of an update, given (old, sampler, advantages) of the valid tokens of every response."""
    settings = config.rivals.bapo
    tokens = [
        (math.exp(o - s), a) for old, sampler, adv in rows for o, s, a in zip(old, sampler, adv, strict=True)
    ]
    low, high = settings.low, settings.high

    def met():
        positive = sum(min(q, high) * a for q, a in tokens if a > 0)
        negative = sum(max(q, low) * -a for q, a in tokens if a < 0)
        return positive >= settings.target * negative

    while not met() and low < settings.low_max:
        low = min(low + settings.step, settings.low_max)
    while not met() and high < settings.high_max:
        high = min(high + settings.step, settings.high_max)
    return low, high


RIVALS = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": grpo,
    "gspo": gspo,
    "cispo": cispo,
    "clip_sampler": clip_sampler,
    "tis_token": tis_token,
    "tis_sequence": tis_sequence,
    "icepop": icepop,
    "geo_rejection": geo_rejection,
    "k3_rejection": k3_rejection,
    "opsm": opsm,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "bapo": None,
}


def loss_and_gradient(name: str, live, batch, config: TriageConfig):
    """Loss of an update and its gradient `[B, T]`, by the objective's reduction."""
    old, sampler, advantages, mask = (
        np.asarray(x) for x in (batch.old_logp, batch.sampler_logp, batch.advantages, batch.mask)
    )
    live = np.asarray(live)
    advantages = np.broadcast_to(advantages.reshape(len(live), -1), live.shape)
    chosen = [np.flatnonzero(row) for row in mask]
    function = RIVALS[name]
    if name == "bapo":
        used = [(old[i, c], sampler[i, c], advantages[i, c]) for i, c in enumerate(chosen)]
        low, high = bapo_bounds(used, config)

        def function(live, old, sampler, advantages, config):
            return _each(live, sampler, advantages, low, high)

    gradient, total = np.zeros_like(live), 0.0
    filled = sum(len(c) > 0 for c in chosen)
    for i, c in enumerate(chosen):
        if not len(c):
            continue
        losses, slopes = function(live[i, c], old[i, c], sampler[i, c], advantages[i, c], config)
        share = 1 / mask.sum() if name in ("dapo", "cispo") else 1 / (len(c) * filled)
        total += share * losses.sum()
        gradient[i, c] = share * slopes
    return total, gradient
