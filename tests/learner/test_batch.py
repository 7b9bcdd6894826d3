"""Samples to arrays."""

import numpy as np
import pytest

from triage_jax.learner import pack_batch
from triage_jax.rollout import Sample


def _sample(ids: list[int], logprobs: list[float] | None = None) -> Sample:
    logprobs = [-0.5] * len(ids) if logprobs is None else logprobs
    return Sample(
        uid="s",
        token_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        finish_reason="stop",
        weight_versions=np.zeros(len(ids), np.int32),
    )


def test_layout():
    batch = pack_batch(
        [(5, 6), (7,)],
        [_sample([8, 1], [-0.1, -0.2]), _sample([9, 9, 9])],
        np.array([1.0, -1.0]),
        np.array([True, False]),
        prompt_width=3,
        response_width=3,
    )
    assert batch.tokens.tolist() == [[0, 5, 6, 8, 1, 0], [0, 0, 7, 9, 9, 9]]
    assert batch.valid.tolist() == [[False, True, True, True, True, False], [False, False] + [True] * 4]
    assert batch.mask.tolist() == [[True, True, False], [False] * 3]
    np.testing.assert_allclose(batch.sampler_logp, [[-0.1, -0.2, 0], [-0.5] * 3])
    assert batch.advantages.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("prompt", "sample"),
    [((1, 2, 3, 4), _sample([5])), ((1,), _sample([5] * 4)), ((1,), _sample([5, 6], [-0.1]))],
)
def test_what_does_not_fit_is_named(prompt, sample):
    with pytest.raises(ValueError, match=r"sample s: prompt of \d tokens, \d response ids"):
        pack_batch([prompt], [sample], np.zeros(1), np.ones(1, bool), prompt_width=3, response_width=3)
