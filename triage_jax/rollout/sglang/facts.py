"""What a server says about itself, and whether its samples can be trained on."""

import re
from dataclasses import dataclass

from triage_jax.rollout.sglang.errors import Unsupported
from triage_jax.rollout.sglang.status import Fields
from triage_jax.rollout.sglang.wire import Limits

OLDEST = (0, 5, 23)
"""First release with version spans, explicit sampling keys and the sampling mask as they are relied on here."""

# Each changes the distribution behind the request's back.
_DISTORTING = ("preferred_sampling_params", "watermark_default_enabled", "watermark_enforce_all")


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """Start-up options of a server that matter to a trainer."""

    version: str
    context: int
    """Tokens of prompt and response together that are never cut short"""
    prompt: int
    """Tokens of the longest prompt"""
    deterministic: bool
    """Started with --enable-deterministic-inference: seeds count, and equal batches give equal bits"""
    weight_version: str
    description: str

    def within(self, limits: Limits) -> Limits:
        """The model's limits, narrowed to the server's context."""
        return Limits(
            vocab_size=limits.vocab_size,
            context=min(limits.context, self.context),
            prompt=self.prompt if limits.prompt is None else min(limits.prompt, self.prompt),
        )


def read_facts(info: Fields, *, url: str) -> ServerFacts:
    """Facts from GET /server_info.

    Raises Unsupported for another engine or a release before 0.5.23, and for options that change what is sampled:
    --preferred-sampling-params, watermarks, speculative decoding.
    """
    version = info.get("version")
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version) if isinstance(version, str) else None
    if not isinstance(version, str) or match is None or tuple(map(int, match.groups())) < OLDEST:
        raise Unsupported(f"version {version!r:.40}; accepted: SGLang 0.5.23 or later", url=url)
    for name in _DISTORTING:
        if info.get(name):
            raise Unsupported(f"started with {name}; its samples are not those of the model", url=url)
    if info.get("speculative_algorithm"):
        what = f"speculative_algorithm {info['speculative_algorithm']!r:.40}; accepted: none, its log-probabilities"
        raise Unsupported(f"{what} are not known to be the sampler's", url=url)
    longest = info.get("max_req_input_len")
    if not isinstance(longest, int):
        raise Unsupported("/server_info has no max_req_input_len", url=url)
    return ServerFacts(
        version=version,
        # The longest request is 5 tokens longer, but the scheduler silently shortens max_new_tokens so that one of them
        # stays free; and a prompt of just max_req_input_len tokens is refused.
        context=longest + 4,
        prompt=longest - 1,
        deterministic=info.get("enable_deterministic_inference") is True,
        weight_version=str(info.get("weight_version")),
        description=_describe(info, version),
    )


def _describe(info: Fields, version: str) -> str:
    names = ("dtype", "quantization", "fp4_gemm_runner_backend", "moe_runner_backend", "kv_cache_dtype")
    parts = [f"{name} {info[name]}" for name in names if info.get(name) not in (None, "auto")]
    if info.get("enable_deterministic_inference") is True:
        parts.append("deterministic")
    return ", ".join([f"SGLang {version}", *parts])
