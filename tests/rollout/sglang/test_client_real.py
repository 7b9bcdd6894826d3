"""The client against a real SGLang 0.5.23 on the CPU: its limits and what its numbers mean. Needs .venv-sglang."""

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tests.rollout.sglang.captures import use
from triage_jax.rollout import Request, SamplingParams
from triage_jax.rollout.sglang.client import Client
from triage_jax.rollout.sglang.errors import BadResponse, RequestRefused
from triage_jax.rollout.sglang.wire import Limits

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), pytest.mark.xdist_group("sglang")]


def ask_real[T](url: str, call: Callable[[Client], Awaitable[T]]) -> T:
    """With limits so wide that nothing but the server decides."""
    return use(url, call, Limits(vocab_size=32, context=10**6), request_timeout=120.0)


def test_a_real_server_cuts_short_what_exceeds_its_context(real_server: str) -> None:
    """`ServerFacts` is exact: one token more and the server gives fewer than asked for, or refuses the prompt."""
    facts = ask_real(real_server, lambda client: client.facts())

    def ask(prompt: int, new: int) -> int:
        """Tokens of the first response that does not happen to draw the end-of-text token."""
        request = Request(uid="long", prompt_ids=(3,) * prompt, seed=1)
        sampling = SamplingParams(max_new_tokens=new, temperature=1000.0)
        for _ in range(30):
            sample = ask_real(real_server, lambda client: client.generate(request, sampling, lambda label: 0))
            if sample.finish_reason == "length":
                return len(sample.token_ids)
        raise AssertionError("30 responses ended by themselves; about one in six should")

    new = facts.context - facts.prompt
    assert ask(facts.prompt, new) == new
    with pytest.raises(BadResponse, match=f"length after {new} tokens; asked for {new + 1}"):
        ask(facts.prompt, new + 1)
    with pytest.raises(RequestRefused, match="exceeds the maximum allowed length"):
        ask(facts.prompt + 1, 1)


def test_a_real_servers_numbers_mean_what_we_say(real_server: str) -> None:
    assert ask_real(real_server, lambda client: client.follows_temperature((3, 4, 5))) is True
    prompt = (3, 4, 5, 6)

    def sample(**settings: Any) -> Any:
        request = Request(uid="u", prompt_ids=prompt, seed=2**40)
        sampling = SamplingParams(max_new_tokens=6, **settings)
        return ask_real(real_server, lambda client: client.generate(request, sampling, lambda label: 0))

    drawn = sample(temperature=1.0)
    scores = ask_real(real_server, lambda client: client.score((*prompt, *drawn.token_ids.tolist())))
    np.testing.assert_allclose(scores[len(prompt) - 1 :], drawn.logprobs, atol=0.05)
    # One token is left of the vocabulary, so its probability is 1.
    np.testing.assert_allclose(sample(temperature=0.7, top_k=1).logprobs, 0.0, atol=1e-6)
