"""What other frameworks call our metrics, so that their logs can be read and their users find their curve."""

from collections.abc import Mapping
from typing import Any

FRAMEWORKS = ("verl", "TRL", "slime", "NeMo-RL", "others")

NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "gap/abs_mean/token": {
        "TRL": ("sampling/sampling_logp_difference/mean",),
        "slime": ("train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff"),
        "others": ("sampler_trainer/logp_diff_mean",),
    },
    "gap/max_abs": {
        "TRL": ("sampling/sampling_logp_difference/max",),
        "others": ("sampler_trainer/logp_diff_max",),
    },
    "gap/k1/token": {"verl": ("rollout_corr/kl",), "slime": ("mis_kl", "train/mis_kl")},
    "gap/k3_sampler_learner/token": {
        "verl": ("rollout_corr/k3_kl",),
        "slime": ("mis_k3_kl", "train/mis_k3_kl", "train/train_rollout_kl"),
        "NeMo-RL": ("gen_kl_error", "train/gen_kl_error"),
        "others": ("mismatch_kl/all/mean",),
    },
    "gap/k3_learner_sampler/token": {"NeMo-RL": ("policy_kl_error", "train/policy_kl_error")},
    "gap/js/token": {"NeMo-RL": ("js_divergence_error", "train/js_divergence_error")},
    "gap/mult_prob_error/token": {"NeMo-RL": ("token_mult_prob_error", "train/token_mult_prob_error")},
    "gap/prob_difference/token": {
        "verl": ("training/rollout_probs_diff_mean",),
        "others": ("sampler_trainer/prob_diff_mean",),
    },
    "tis/ratio/token": {
        "verl": ("rollout_corr/rollout_is_mean",),
        "TRL": ("sampling/importance_sampling_ratio/mean",),
        "slime": ("tis", "train/tis"),
        "NeMo-RL": ("sampling_importance_ratio", "train/sampling_importance_ratio"),
        "others": ("sampler_is/weight_mean",),
    },
    "tis/ratio_max": {
        "verl": ("rollout_corr/rollout_is_max",),
        "TRL": ("sampling/importance_sampling_ratio/max",),
        "others": ("sampler_is/weight_max",),
    },
    "tis/abs/token": {"slime": ("tis_abs", "train/tis_abs")},
    "tis/clip_fraction/token": {
        "slime": ("tis_clipfrac", "train/tis_clipfrac"),
        "NeMo-RL": ("is_oob_ratio", "train/is_oob_ratio"),
        "others": ("sampler_is/frac_clipped_at_threshold",),
    },
    "tis/ess/token": {"verl": ("rollout_corr/rollout_is_eff_sample_size",)},
    "ppo/clip_fraction/token": {
        "verl": ("actor/pg_clipfrac",),
        "TRL": ("clip_ratio/region_mean",),
        "slime": ("pg_clipfrac", "train/pg_clipfrac"),
    },
    "ppo/approx_kl/token": {"verl": ("actor/ppo_kl",), "slime": ("ppo_kl", "train/ppo_kl")},
    "entropy/token": {
        "verl": ("actor/entropy",),
        "TRL": ("entropy",),
        "slime": ("train/entropy_loss",),
        "NeMo-RL": ("approx_entropy", "train/approx_entropy"),
    },
    "optimizer/grad_norm": {
        "verl": ("actor/grad_norm",),
        "TRL": ("grad_norm",),
        "slime": ("train/grad_norm",),
        "NeMo-RL": ("train/grad_norm",),
    },
    "reward/mean/response": {
        "verl": ("critic/rewards/mean", "critic/score/mean"),
        "TRL": ("reward",),
        "slime": ("rollout/raw_reward", "rollout/rewards"),
        "NeMo-RL": ("train/reward",),
    },
}
"""Our key, and the names by framework. Equal by definition; a framework may take some of them after its own clipping"""

_REVERSE = {name: key for key, by in NAMES.items() for names in by.values() for name in names}


def our_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics under our keys. Where routing was replayed, the residual gap stands for the gap."""
    flat = row | row["data"] if isinstance(row.get("data"), dict) else row  # verl's file logger nests them
    found = {}
    for name, value in flat.items():
        found.setdefault(_REVERSE.get(name, name), value)
    for name, value in flat.items():
        if name.startswith("residual_"):
            found.setdefault(name.removeprefix("residual_"), value)
    return found
