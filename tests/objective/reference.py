"""The objective in float64 NumPy, one token and one segment at a time: an oracle, not an implementation."""

import math

import numpy as np


def _segments(mask, size):
    """Indices of the valid tokens of every non-empty segment."""
    for start in range(0, len(mask), size):
        chosen = [t for t in range(start, min(start + size, len(mask))) if mask[t]]
        if chosen:
            yield chosen


def gate(gap, advantage, mask, config):
    weights = np.ones(len(gap))
    for chosen in _segments(mask, config.segment):
        if np.mean(advantage[chosen]) >= 0:
            continue
        mean, deep = np.mean(gap[chosen]), sum(gap[t] < config.deep for t in chosen)
        by_mean = config.mean_mild_weight if mean < config.mean_mild else 1.0
        by_mean = config.mean_severe_weight if mean < config.mean_severe else by_mean
        by_tail = 1 - (1 - config.floor) * min(deep / config.deep_count, 1)
        for t in chosen:
            if config.scope == "whole" or gap[t] < 0:
                weights[t] = round(min(by_mean, by_tail), 2)
    return weights


def loss(live, old, sampler, advantages, mask, config):
    """Policy loss plus Repair's contribution."""
    shares, weight_sum, valid, penalty, segments = [], 0.0, 0, 0.0, 0
    for i, row in enumerate(mask):
        if not row.any():
            continue
        advantage = np.broadcast_to(advantages[i], row.shape)
        weights = gate(old[i] - sampler[i], advantage, row, config.gate)
        numerator = denominator = 0.0
        for t in np.flatnonzero(row):
            r, a = math.exp(live[i, t] - old[i, t]), advantage[t]
            rho = min(max(math.exp(old[i, t] - sampler[i, t]), config.tis.low), config.tis.high)
            clipped = min(max(r, 1 - config.clip.low), 1 + config.clip.high)
            numerator += weights[t] * max(-a * r, -a * clipped) * rho
            denominator += weights[t]
        shares.append(numerator / denominator if config.reduction == "response" else numerator)
        weight_sum, valid = weight_sum + denominator, valid + row.sum()
        for chosen in _segments(row, config.repair.segment):
            segments += 1
            if config.repair.scope == "whole" or np.mean(advantage[chosen]) > 0:
                q = max(config.repair.target - np.mean(live[i][chosen] - sampler[i][chosen]), 0.0)
                penalty += config.repair.beta**2 * (math.sqrt(1 + (q / config.repair.beta) ** 2) - 1)
    policy = sum(shares) / {"response": len(shares), "token": weight_sum, "fixed": valid}[config.reduction]
    return policy + config.repair.coefficient * penalty / segments
