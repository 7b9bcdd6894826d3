"""The TRIAGE objective as a loop over responses and segments in PyTorch, written from the equations.

    python objective_torch.py inputs.npz outputs.npz [repeats]

Reads `live`, `old`, `sampler`, `advantages`, `mask`; writes `loss`, `gradient` and `seconds` (forward and
backward of the reported configuration, the fastest of `repeats`). Needs torch and numpy only.
"""

import sys
import time

import numpy as np
import torch

BETA = 0.0005**0.5


def gate_weights(gap, advantage, mask):
    weights = torch.ones_like(gap)
    for start in range(0, gap.shape[0], 64):
        part = slice(start, start + 64)
        valid = mask[part]
        if not valid.any() or advantage[part][valid].mean() >= 0:
            continue
        gaps = gap[part][valid]
        mean, deep = gaps.mean(), (gaps < -6).sum()
        by_mean = 0.1 if mean < -1.5 else 0.3 if mean < -0.5 else 1.0
        by_tail = {0: 1.0, 1: 0.55}.get(int(deep), 0.1)
        weights[part][valid & (gap[part] < 0)] = min(by_mean, by_tail)
    return weights


def repair_penalties(gap, advantage, mask):
    penalty, segments = gap.new_zeros(()), 0
    for start in range(0, gap.shape[0], 128):
        part = slice(start, start + 128)
        valid = mask[part]
        if not valid.any():
            continue
        segments += 1
        if advantage[part][valid].mean() > 0:
            violation = torch.clamp(-0.03 - gap[part][valid].mean(), min=0)
            penalty = penalty + BETA**2 * (torch.sqrt(1 + (violation / BETA) ** 2) - 1)
    return penalty, segments


def triage_loss(live, old, sampler, advantages, mask):
    policy, penalty, responses, segments = live.new_zeros(()), live.new_zeros(()), 0, 0
    for i in range(live.shape[0]):
        if not mask[i].any():
            continue
        responses += 1
        advantage = advantages[i].expand(live.shape[1])
        weights = gate_weights(old[i] - sampler[i], advantage, mask[i]) * mask[i]
        ratio = torch.exp(live[i] - old[i])
        losses = torch.maximum(-advantage * ratio, -advantage * torch.clamp(ratio, 0.8, 1.28))
        losses = losses * torch.clamp(torch.exp(old[i] - sampler[i]), 0, 2)
        policy = policy + (weights * losses).sum() / weights.sum()
        added, count = repair_penalties(live[i] - sampler[i], advantage, mask[i])
        penalty, segments = penalty + added, segments + count
    return policy / responses + 0.015 * penalty / segments


def main():
    source, target, repeats = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1
    with np.load(source) as archive:
        names = ("live", "old", "sampler", "advantages", "mask")
        live, *rest = (torch.from_numpy(archive[name]) for name in names)
    seconds = []
    for _ in range(repeats):
        live = live.detach().requires_grad_()
        begin = time.perf_counter()
        loss = triage_loss(live, *rest)
        loss.backward()
        seconds.append(time.perf_counter() - begin)
    np.savez(target, loss=loss.item(), gradient=live.grad.numpy(), seconds=min(seconds))


if __name__ == "__main__":
    main()
