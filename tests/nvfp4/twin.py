"""A second NVFP4 quantiser, independent of the package: NumPy, rounding by search in the table of the format.

Every line is one float32 operation; the roundings to E2M1 and E4M3 are exact float64 searches. `flush`
replaces what IEEE arithmetic would leave subnormal by zero, around each operation, as XLA on a CPU does.
"""

import dataclasses

import ml_dtypes
import numpy as np

F32 = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def nearest(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Index of the nearest entry of an ascending grid, ties to the even index, saturating; x ≥ 0, no NaN."""
    x = np.minimum(x.astype(np.float64), grid[-1])
    above = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    low, high = x - grid[above - 1], grid[above] - x
    up = (high < low) | ((high == low) & (above % 2 == 0))
    return np.where(up, above, above - 1).astype(np.uint8)


@dataclasses.dataclass
class Twin:
    codes: np.ndarray
    scales: np.ndarray
    global_scale: np.ndarray

    def values(self) -> np.ndarray:
        """code × block scale in float64."""
        sign = np.where(self.codes >> 3, -1.0, 1.0)
        return sign * E2M1[self.codes & 7] * np.repeat(E4M3[self.scales], 16, axis=-1)


def flush_subnormals(v) -> np.ndarray:
    v = np.asarray(v, F32)
    return np.where(np.abs(v) < np.finfo(F32).tiny, np.copysign(F32(0), v), v)


def quantize(
    x: np.ndarray,
    *,
    tile="1x16",
    scope="tensor",
    rule="te",
    static_amax=None,
    shards=None,
    chain=None,
    scale_floor=None,
    four_over_six=None,
    bound=448,
    nan="spread",
    flush=True,
) -> Twin:
    """x finite, so that `nan` says nothing, with at least two axes."""
    assert nan == "spread" or np.isfinite(x).all()
    f = flush_subnormals if flush else lambda v: np.asarray(v, F32)
    x = f(x)
    a = np.abs(x)
    b = a.reshape(*x.shape[:-1], -1, 16).max(-1)
    if tile == "16x16":
        b = b.copy()
        for start in range(0, x.shape[-2], 16):
            b[..., start : start + 16, :] = b[..., start : start + 16, :].max(-2, keepdims=True)
    row = a.max(-1, keepdims=True)
    amax = {"tensor": a.max(), "row": row, "static": F32(static_amax or 0)}.get(scope)
    if scope == "shard":
        amax = row.reshape(shards, -1).max(1).repeat(row.size // shards).reshape(row.shape)
    amax = np.asarray(amax, F32)
    with np.errstate(all="ignore"):
        encode, decode = GLOBAL[chain or chain_of(rule, scope)](amax, F32(6 * bound), f)
        one = np.where(decode == 0, F32(1), decode)
        if four_over_six:
            score = decode if rule == "flashinfer" and scope != "row" else None
            scales = best_of_four_and_six(x, b, encode, amax, score, tile, four_over_six, bound, f)
        else:
            scales = block_scales(b, encode, one, rule, scale_floor or rule, f)
        s = np.repeat(E4M3[scales].astype(F32), 16, axis=-1)
        if rule == "modelopt":
            y = f(x / not_zero(f(s * one)))
        elif rule == "compressed_tensors":
            y = f(x / not_zero(f(s / encode)))
        elif rule == "torchao":
            factor = f(f(F32(1) / one) / s)
            # The package keeps it finite, for zeros' sake.
            factor = np.minimum(factor, np.finfo(F32).max) if flush else factor
            y = f(x * np.where(s == 0, np.finfo(F32).max, factor))
        else:
            y = f(x * block_encode(s, encode, f))
    codes = nearest(np.abs(y), E2M1) | (np.signbit(y).astype(np.uint8) << 3)
    return Twin(codes, scales, decode)


def not_zero(divisor: np.ndarray) -> np.ndarray:
    return np.where(divisor == 0, np.finfo(F32).tiny, divisor)


def chain_of(rule, scope):
    if rule.startswith("flashinfer") and scope == "row":
        return {"flashinfer": "encode_only", "flashinfer_fast": "decode_only"}[rule]
    return {"te": "encode", "compressed_tensors": "reciprocal"}.get(rule, "decode")


def bounded_encode(amax, span, f):
    return np.minimum(f(span / amax), np.finfo(F32).max)


def encode_first(amax, span, f):
    encode = bounded_encode(amax, span, f)
    return np.where((amax == 0) | (encode == 0), F32(1), encode), f(amax / span)


def decode_first(amax, span, f):
    decode = f(amax / span)
    return np.where(amax == 0, F32(1), f(F32(1) / decode)), decode


def encode_only(amax, span, f):
    encode = bounded_encode(amax, span, f)
    return encode, f(F32(1) / encode)


def decode_only(amax, span, f):
    decode = f(amax * (F32(1) / span))
    return np.where(amax == 0, F32(1), f(F32(1) / decode)), decode


def reciprocal(amax, span, f):
    encode = span * f(F32(1) / np.maximum(amax, np.finfo(F32).tiny))
    encode = np.where(encode == 0, span / amax, encode)
    encode = np.where(np.isinf(encode), F32(1), encode)
    return encode, f(F32(1) / encode)


GLOBAL = {
    "encode": encode_first,
    "decode": decode_first,
    "encode_only": encode_only,
    "decode_only": decode_only,
    "reciprocal": reciprocal,
}


def block_scales(b, encode, decode, rule, floor, f):
    sixth = F32(1 / 6)
    ratio = {
        "modelopt": lambda: b / f(F32(6) * decode),
        "compressed_tensors": lambda: zero_or(f(b / F32(6)), encode),
        "torchao": lambda: f(b / F32(6)) / decode,
        "flashinfer_fast": lambda: zero_or(f(b * sixth), encode),
    }.get(rule, lambda: zero_or(b, f(encode * sixth)))
    ratio = f(ratio())
    if floor == "modelopt":
        ratio = np.where(b == 0, F32(1), np.maximum(ratio, F32(2**-9)))
    if floor == "torchao":
        ratio = np.maximum(ratio, F32(2**-6))
    assert not np.isnan(ratio).any()
    scales = nearest(ratio, E4M3)
    return np.where(scales == 0, np.uint8(0x20), scales) if floor == "compressed_tensors" else scales


def zero_or(b, factor):
    """b·factor, 0 also where a zero meets an infinite factor."""
    return np.where(b == 0, F32(0), b * factor)


def block_encode(s, encode, f):
    return np.minimum(f(F32(1) / f(s * f(F32(1) / encode))), np.finfo(F32).max)


def best_of_four_and_six(x, b, encode, amax, score, tile, error, bound, f):
    base = f(zero_or(f(b / F32(6)), encode))
    candidates = [nearest(base, E4M3), nearest(f(base * F32(1.5)), E4M3)]
    errors = [block_error(x, scales, encode, amax, score, tile, error, bound, f) for scales in candidates]
    return np.where(errors[1] < errors[0], candidates[1], candidates[0])


def block_error(x, scales, encode, amax, score, tile, error, bound, f):
    s = np.repeat(E4M3[scales].astype(F32), 16, axis=-1)
    y = f(x * block_encode(s, encode, f))
    q = np.copysign(E2M1[nearest(np.abs(y), E2M1)].astype(F32), y)
    back = f(f(q * s) * amax) / F32(6 * bound) if score is None else f(q * s) * score
    off = f(f(back) - x)
    terms = (np.abs(off) if error == "mae" else f(off * off)).reshape(*scales.shape, 16)
    total = np.zeros(scales.shape, F32)
    for i in range(16):
        total = f(total + terms[..., i])
    return tile_errors(total, f) if tile == "16x16" else total


def tile_errors(error, f):
    out = np.empty_like(error)
    for start in range(0, error.shape[-2], 16):
        rows = error[..., start : start + 16, :]
        tree = np.zeros((*rows.shape[:-2], 16, rows.shape[-1]), F32)
        tree[..., : rows.shape[-2], :] = rows
        for half in (8, 4, 2, 1):
            tree = f(tree[..., :half, :] + tree[..., half : 2 * half, :])
        out[..., start : start + 16, :] = tree
    return out


def merge_zeros(codes: np.ndarray) -> np.ndarray:
    """Codes with −0 as 0."""
    return np.where(codes == 8, 0, codes)
