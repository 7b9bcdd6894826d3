"""The experts that a sampler's tokens went to, checked before a learner follows them."""

import base64
import binascii
from dataclasses import dataclass

import numpy as np


class RoutingError(ValueError):
    """Routes that cannot be those of the response."""


@dataclass(frozen=True, kw_only=True)
class RouteShape:
    """Of a mixture-of-experts model."""

    layers: int
    experts: int
    experts_per_token: int


def check_routes(routes: np.ndarray, positions: int, shape: RouteShape) -> np.ndarray:
    """int32 `[positions, L, k]` as given, one row per position that was fed to the model.

    Raises RoutingError for another shape or kind of number, an expert that does not exist, or one that occurs twice
    among a token's.
    """
    expected = (positions, shape.layers, shape.experts_per_token)
    if routes.shape != expected or not np.issubdtype(routes.dtype, np.integer):
        raise RoutingError(f"{routes.dtype} {routes.shape}; expected integers {expected}")
    outside = (routes < 0) | (routes >= shape.experts)
    if outside.any():
        at = tuple(np.argwhere(outside)[0].tolist())
        raise RoutingError(f"{at} is expert {routes[at]}; accepted: 0 to {shape.experts - 1}")
    ordered = np.sort(routes, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    if twice.any():
        position, layer = np.argwhere(twice)[0].tolist()
        raise RoutingError(f"({position}, {layer}) names an expert twice: {routes[position, layer].tolist()}")
    return routes.astype(np.int32)


def decode_routes(text: object, positions: int, shape: RouteShape) -> np.ndarray:
    """Checked routes from base64 of little-endian int32, as SGLang sends them (sglang.md §2)."""
    if not isinstance(text, str):
        raise RoutingError("missing; the server needs --enable-return-routed-experts")
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise RoutingError(f"no base64: {error}") from None
    numbers = positions * shape.layers * shape.experts_per_token
    if len(raw) != 4 * numbers:
        raise RoutingError(f"{len(raw)} bytes; expected {4 * numbers}, for {positions} positions")
    routes = np.frombuffer(raw, "<i4").reshape(positions, shape.layers, shape.experts_per_token)
    return check_routes(routes, positions, shape)
