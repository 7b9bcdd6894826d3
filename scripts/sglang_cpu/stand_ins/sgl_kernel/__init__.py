"""Stand-in for SGLang's compiled CPU kernels, which no package index carries.

Only what a text-only server on the `torch_native` attention back end calls is here. Any other `*_cpu` kernel may be
imported and raises when it is called; every other name is absent, as SGLang probes for GPU kernels by importing them.
"""

from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    width: int,
) -> None:
    """table[rows[i], starts[i]:ends[i]] = the next ends[i] - starts[i] of `slots`; `width` is not needed."""
    lengths = (ends - starts).tolist()
    for row, start, part in zip(
        rows.tolist(), starts.tolist(), slots[: sum(lengths)].split(lengths), strict=True
    ):
        table[row, start : start + len(part)] = part.to(table.dtype)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"the sgl_kernel stand-in has no {name}")

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            f"the sgl_kernel stand-in has no {name}: this server runs plain text models only"
        )

    return missing
