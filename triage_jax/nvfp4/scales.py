"""Block and global scales: the choices of `rules` as float32 arithmetic that XLA leaves as written."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Float32, UInt32

from triage_jax.nvfp4.formats import E2M1_MAX, e4m3_round
from triage_jax.nvfp4.rules import Element, Ratio, ScaleFloor
from triage_jax.nvfp4.spec import BLOCK, QuantSpec

FLT_MAX = np.finfo(np.float32).max
FLT_MIN = np.finfo(np.float32).tiny
SIXTH = np.float32(1 / 6)

type ScopeAmax = Callable[[UInt32[Array, "... blocks"]], Float32[Array, "..."]]
"""A of each scope from the bits that `block_amax` gives"""


@struct.dataclass
class GlobalScales:
    """A, S and D of `rules`, each a scalar or [..., 1]."""

    amax: Float32[Array, "..."]
    encode: Float32[Array, "..."]
    decode: Float32[Array, "..."]

    @property
    def divisor(self) -> Float32[Array, "..."]:
        """D, 1 where it is 0."""
        return jnp.where(self.decode == 0, 1, self.decode)


def block_amax(x: Float[Array, "... K"], spec: QuantSpec) -> UInt32[Array, "... blocks"]:
    """float32 bits of each block's largest |x|: as integers, magnitudes keep their order and NaNs come last.

    Rows beyond the last full 16×16 tile count as zeros. (XLA:CPU reduces 32-bit integers three times faster
    than 16-bit ones or floats.)
    """
    if x.ndim == 0 or x.shape[-1] % BLOCK or x.size == 0:
        raise ValueError(f"NVFP4 quantises blocks of {BLOCK} along the last axis; got shape {x.shape}")
    if spec.tile == "16x16" and x.ndim < 2:
        raise ValueError(f"tile '16x16' needs two axes; got shape {x.shape}")
    blocks = x.shape[-1] // BLOCK
    magnitude = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & np.uint32(0x7FFFFFFF)
    amax = magnitude.reshape(*x.shape[:-1], blocks, BLOCK).max(axis=-1)
    if spec.tile == "1x16":
        return amax
    return over_rows(by_tile(amax).max(axis=-2), x.shape[-2])


def by_tile(blocks: Array) -> Array:
    """[..., rows, blocks] as [..., tiles, 16, blocks], the missing rows zeros."""
    *lead, rows, columns = blocks.shape
    padded = jnp.pad(blocks, [(0, 0)] * len(lead) + [(0, -rows % BLOCK), (0, 0)])
    return padded.reshape(*lead, -1, BLOCK, columns)


def over_rows(tiles: Array, rows: int) -> Array:
    """[..., tiles, blocks], each tile's number on its rows."""
    return jnp.repeat(tiles, BLOCK, axis=-2)[..., :rows, :]


def global_scales(
    block: UInt32[Array, "... blocks"], spec: QuantSpec, scope_amax: ScopeAmax | None = None
) -> GlobalScales:
    """Scales of the scope from its blocks' largest magnitudes; raises ValueError where shards do not divide rows.

    `scope_amax` finds A in place of the spec's scope, a scalar or [..., 1]: scopes that are neither the array nor rows.
    """
    amax = _scope_amax(block, spec) if scope_amax is None else scope_amax(block)
    span = np.float32(E2M1_MAX * spec.bound)
    encode, decode = _CHAINS[spec.arithmetic.chain](amax, span)
    return GlobalScales(amax, encode, decode)


def _scope_amax(block: UInt32[Array, "... blocks"], spec: QuantSpec) -> Float32[Array, "..."]:
    if spec.scope == "static":
        # Behind the barrier, lest XLA divide at compile time by its own rules.
        return lax.optimization_barrier(jnp.float32(spec.static_amax))
    if spec.scope == "tensor":
        return as_float(block.max())
    rows = block.max(axis=-1, keepdims=True)
    if spec.shards is not None:
        if rows.size % spec.shards:
            raise ValueError(f"scope 'shard': {rows.size} rows do not split into {spec.shards} equal shards")
        shards = rows.reshape(spec.shards, -1)
        rows = jnp.broadcast_to(shards.max(axis=1, keepdims=True), shards.shape).reshape(rows.shape)
    return as_float(rows)


def _encode(amax: Array, span: np.float32) -> Array:
    encode = jnp.minimum(span / amax, FLT_MAX)
    return jnp.where((amax == 0) | (encode == 0), 1, encode)


def _inverse(amax: Array, decode: Array) -> Array:
    # The choice is within the divisor, lest XLA turn 1/(A/R) into R/A.
    return 1 / jnp.where(amax == 0, 1, decode)


def _chain_encode(amax: Array, span: np.float32) -> tuple[Array, Array]:
    return _encode(amax, span), divide(amax, span)


def _chain_decode(amax: Array, span: np.float32) -> tuple[Array, Array]:
    decode = divide(amax, span)
    return _inverse(amax, decode), decode


def _chain_encode_only(amax: Array, span: np.float32) -> tuple[Array, Array]:
    encode = jnp.minimum(span / amax, FLT_MAX)
    return encode, 1 / encode


def _chain_decode_only(amax: Array, span: np.float32) -> tuple[Array, Array]:
    decode = amax * (np.float32(1) / span)
    return _inverse(amax, decode), decode


def _chain_reciprocal(amax: Array, span: np.float32) -> tuple[Array, Array]:
    encode = span * (1 / jnp.where(amax < FLT_MIN, FLT_MIN, amax))
    # The reciprocal of an A beyond 2¹²⁶ is subnormal, hence zero to XLA on a CPU.
    encode = jnp.where(encode == 0, span / amax, encode)
    encode = jnp.where(jnp.isposinf(encode), 1, encode)
    return encode, 1 / encode


_CHAINS = {
    "encode": _chain_encode,
    "decode": _chain_decode,
    "encode_only": _chain_encode_only,
    "decode_only": _chain_decode_only,
    "reciprocal": _chain_reciprocal,
}


def scale_ratio(
    kind: Ratio, b: Float32[Array, "... blocks"], scope: GlobalScales
) -> Float32[Array, "... blocks"]:
    """What E4M3 rounds."""
    match kind:
        case "folded":
            return _times(b, scope.encode * SIXTH)
        case "sixth_first":
            return _times(b * SIXTH, scope.encode)
        case "division_first":
            return _times(divide(b, np.float32(6)), scope.encode)
        case "decode":
            return divide(b, 6 * scope.divisor)
        case "two_divisions":
            return divide(divide(b, np.float32(6)), scope.divisor)


def _times(b: Float32[Array, "... blocks"], factor: Float32[Array, "..."]) -> Float32[Array, "... blocks"]:
    """b·factor, 0 where b is: S is infinite where D is subnormal, hence zero on a CPU."""
    return jnp.where(b == 0, 0, b * factor)


def rounded_scale(
    kind: ScaleFloor, ratio: Float32[Array, "... blocks"], b: Float32[Array, "... blocks"]
) -> Float32[Array, "... blocks"]:
    """Block scales on the E4M3 grid, at most 448."""
    match kind:
        case "none":
            return e4m3_round(ratio)
        case "modelopt":
            return e4m3_round(jnp.where(b == 0, 1, _at_least(ratio, 2.0**-9)))
        case "torchao":
            return e4m3_round(_at_least(ratio, 2.0**-6))
        case "compressed_tensors":
            scale = e4m3_round(ratio)
            return jnp.where(scale == 0, 0.125, scale)


def _at_least(x: Float32[Array, "..."], bound: float) -> Float32[Array, "..."]:
    """max that leaves a NaN."""
    return jnp.where(x < bound, np.float32(bound), x)


def element_scale(
    kind: Element, scale: Float32[Array, "... blocks"], scope: GlobalScales
) -> Float32[Array, "... blocks"]:
    """The factor on x, or the divisor of it where `Arithmetic.divides`; finite where a block scale is 0."""
    match kind:
        case "reciprocal":
            return jnp.minimum(1 / (scale * (1 / scope.encode)), FLT_MAX)
        case "divide_decode":
            divisor = scale * scope.divisor
            return jnp.where(divisor == 0, FLT_MIN, divisor)
        case "divide_encode":
            divisor = divide(scale, scope.encode)
            return jnp.where(divisor == 0, FLT_MIN, divisor)
        case "two_reciprocals":
            return jnp.where(scale == 0, FLT_MAX, jnp.minimum((1 / scope.divisor) / scale, FLT_MAX))


def spread(blocks: Float[Array, "... blocks"]) -> Float[Array, "... K"]:
    """Each block's number on its 16 elements."""
    return jnp.repeat(blocks, BLOCK, axis=-1)


def divide(a: Float32[Array, "..."], b: Float32[Array, "..."] | np.float32) -> Float32[Array, "..."]:
    """a / b correctly rounded.

    XLA multiplies by 1/b where it sees that b is one constant or one broadcast number, traced or not. Inside
    a scan a barrier does not keep it from seeing; a divisor that seems to depend on every a does.
    """
    return a / jnp.where(a == a, b, a)


def as_float(bits: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    return lax.bitcast_convert_type(bits, jnp.float32)
