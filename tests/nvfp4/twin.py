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


def quantize(x: np.ndarray, *, tile="1x16", scope="tensor", rule="te", static_amax=None, flush=True) -> Twin:
    """x finite, at least two axes."""

    def f(v):
        v = np.asarray(v, F32)
        return np.where(np.abs(v) < np.finfo(F32).tiny, np.copysign(F32(0), v), v) if flush else v

    x = f(x)
    a = np.abs(x)
    b = a.reshape(*x.shape[:-1], -1, 16).max(-1)
    if tile == "16x16":
        b = b.copy()
        for start in range(0, x.shape[-2], 16):
            b[..., start : start + 16, :] = b[..., start : start + 16, :].max(-2, keepdims=True)
    amax = {"tensor": a.max(), "row": a.max(-1, keepdims=True), "static": F32(static_amax or 0)}[scope]
    amax = np.asarray(amax, F32)
    with np.errstate(all="ignore"):
        global_scale = f(amax / F32(2688))
        if rule == "modelopt":
            s2 = np.where(global_scale == 0, F32(1), global_scale)
            ratio = f(b / f(F32(6) * s2))
            scales = nearest(np.where(b == 0, F32(1), np.maximum(ratio, F32(2**-9))), E4M3)
            y = f(x / np.repeat(f(E4M3[scales].astype(F32) * s2), 16, axis=-1))
        else:
            encode = np.minimum(f(F32(2688) / amax), np.finfo(F32).max)
            encode = np.where((amax == 0) | (encode == 0), F32(1), encode)
            scales = nearest(f(b * f(encode * F32(1 / 6))), E4M3)
            block = f(F32(1) / f(E4M3[scales].astype(F32) * f(F32(1) / encode)))
            y = f(x * np.repeat(np.minimum(block, np.finfo(F32).max), 16, axis=-1))
    codes = nearest(np.abs(y), E2M1) | (np.signbit(y).astype(np.uint8) << 3)
    return Twin(codes, scales, global_scale)


def merge_zeros(codes: np.ndarray) -> np.ndarray:
    """Codes with −0 as 0."""
    return np.where(codes == 8, 0, codes)
