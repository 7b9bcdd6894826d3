"""The two number formats of NVFP4: E2M1 codes and E4M3 block scales, as bits and as values on the grid.

E2M1 (OCP Microscaling Formats 1.0): magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 for codes 0..7, bit 3 the sign. E4M3
(OCP 8-bit Floating Point 1.0): bias 7, largest 448, smallest 2⁻⁹, no infinity, NaN 0x7F. Everything rounds to
nearest, ties to even, and saturates: a plain cast to `float8_e4m3fn` gives NaN above 464 instead.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_SIGNIFICAND = 23
_EXPONENT_BITS = np.uint32(0x7F800000)


def _round_to_step(x: Float[Array, "..."], smallest: float, significant: int) -> Float[Array, "..."]:
    """Nearest float of `significant` bits, ties to even, whose subnormal step is `smallest`; zeros are +0.

    With step the power of two that spaces such floats at x, adding and subtracting 1.5·2²³·step leaves
    float32 no choice but the nearest multiple. Needs |x| < 2⁶⁰.
    """
    floor = np.float32(smallest * 2.0 ** (significant - 1)).view(np.uint32)
    power = jnp.maximum(lax.bitcast_convert_type(x, jnp.uint32) & _EXPONENT_BITS, floor)
    # 1.5·2^(23 - (significant - 1)) as an increment of the exponent and the first significand bit.
    shift = np.uint32(((_SIGNIFICAND - significant + 1) << _SIGNIFICAND) + (1 << (_SIGNIFICAND - 1)))
    magic = lax.bitcast_convert_type(power + shift, jnp.float32)
    return (x + magic) - magic


def _clip(x: Float[Array, "..."], limit: float) -> Float[Array, "..."]:
    """x in [-limit, limit]; a NaN stays. XLA's own max and min would cost several instructions each."""
    bound = np.float32(limit)
    return jnp.where(x > bound, bound, jnp.where(x < -bound, -bound, x))


def e2m1_round(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Nearest E2M1 value in float32, saturating at ±6; zeros are +0 and a NaN stays NaN."""
    return _round_to_step(_clip(x.astype(jnp.float32), E2M1_MAX), 0.5, 2)


def e4m3_round(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Nearest E4M3 value in float32, saturating at ±448; zeros are +0 and a NaN stays NaN."""
    return _round_to_step(_clip(x.astype(jnp.float32), E4M3_MAX), 2.0**-9, 4)


def e2m1_encode(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Code of the nearest E2M1 value; keeps the sign of zero, maps NaN to +6 (as `cvt.rn.satfinite`)."""
    x = x.astype(jnp.float32)
    m = jnp.abs(e2m1_round(x))
    # 0 ½ 1 1½ 2, then 3 4, then 6; a NaN compares false until the last choice.
    code = jnp.where(m <= 2, m + m, jnp.where(m <= 4, m + 2, np.float32(7)))
    # Adding 2²³ leaves an integer in the lowest bits, which is cheaper than converting it.
    bits = lax.bitcast_convert_type(code + np.float32(2.0**23), jnp.uint32) & np.uint32(7)
    sign = (lax.bitcast_convert_type(x, jnp.uint32) >> 28) & np.uint32(8)
    return jnp.where(jnp.isnan(x), np.uint32(7), bits | sign).astype(jnp.uint8)


def e2m1_decode(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """float32 value of each E2M1 code (its low four bits)."""
    table = jnp.asarray(E2M1_MAGNITUDES + tuple(-m for m in E2M1_MAGNITUDES), jnp.float32)
    return table[codes & 15]


def e4m3_encode(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Bits of the nearest E4M3 value, ±448 beyond it; keeps the sign of zero; NaN gives 0x7F or 0xFF."""
    clipped = _clip(x.astype(jnp.float32), E4M3_MAX)
    return lax.bitcast_convert_type(clipped.astype(jnp.float8_e4m3fn), jnp.uint8)


def e4m3_decode(bits: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """float32 value of E4M3 bits."""
    return lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)


def pack(codes: UInt8[Array, "... K"]) -> UInt8[Array, "... half"]:
    """Two codes per byte along the last axis, the even element in the low nibble (the checkpoint layout)."""
    if codes.shape[-1] % 2:
        raise ValueError(f"pack: the last axis must be even, got shape {codes.shape}")
    # XLA:CPU walks strided halves one byte at a time, and would compute what it has not stored yet twice.
    pairs = lax.optimization_barrier(codes).reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    both = lax.bitcast_convert_type(pairs, jnp.uint16)  # the even element in the low byte
    return ((both & 15) | ((both >> 4) & 240)).astype(jnp.uint8)


def unpack(packed: UInt8[Array, "... half"]) -> UInt8[Array, "... K"]:
    """Inverse of `pack`."""
    pairs = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
