"""SGLang servers as the rollout engine, over HTTP."""

from triage_jax.rollout.sglang.config import SglangConfig
from triage_jax.rollout.sglang.engine import SglangEngine
from triage_jax.rollout.sglang.errors import RefitFailed, SglangError

__all__ = ["RefitFailed", "SglangConfig", "SglangEngine", "SglangError"]
