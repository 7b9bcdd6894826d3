"""NVFP4 weights as serving checkpoints store them: which tensors of which dtype, and what their numbers mean.

Two layouts, for the weight `[N, K]` of a module X. The codes are the same bytes in both, the even element in the low
nibble, and block scales lie row by row, not swizzled.

    ModelOpt            X.weight U8 [N, K/2], X.weight_scale F8_E4M3 [N, K/16], X.weight_scale_2 F32 = amax/2688,
                        X.input_scale F32 = largest |activation|/2688
    compressed-tensors  X.weight_packed U8 [N, K/2], X.weight_scale F8_E4M3 [N, K/16],
                        X.weight_global_scale F32 [1] = 2688/amax, X.input_global_scale F32 [1] likewise
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from triage_jax.nvfp4.formats import pack, unpack
from triage_jax.nvfp4.quantize import QuantizedTensor, quantize
from triage_jax.nvfp4.spec import BLOCK, QuantSpec

Layout = Literal["modelopt", "compressed-tensors"]

CODES: dict[Layout, str] = {"modelopt": ".weight", "compressed-tensors": ".weight_packed"}
GLOBAL: dict[Layout, str] = {"modelopt": ".weight_scale_2", "compressed-tensors": ".weight_global_scale"}
INPUT: dict[Layout, str] = {"modelopt": ".input_scale", "compressed-tensors": ".input_global_scale"}
BLOCKS = ".weight_scale"
STORABLE_SCOPES = ("tensor", "static")

_NAN = 0x7F
_pack = jax.jit(pack)
_quantize = jax.jit(quantize, static_argnames="spec")
_GROUP = {"num_bits": 4, "type": "float", "group_size": BLOCK, "dynamic": False}


def quantize_together(
    parts: Sequence[Float[Array, "_ K"] | Float[np.ndarray, "_ K"]], spec: QuantSpec
) -> tuple[QuantizedTensor, ...]:
    """Quantise matrices that a server multiplies as one, so that they share the global scale.

    Only the amax is shared: a 16×16 tile never spans two parts. Raises ValueError for a scope of rows, which a
    checkpoint has no room for, and as `quantize` does.
    """
    if spec.scope not in STORABLE_SCOPES:
        raise ValueError(
            f"a checkpoint stores one global scale per weight: scope {spec.scope!r} has no place"
        )
    # What is on the host is joined there, at the speed of memory; XLA's own copy takes as long as quantising.
    library = np if all(isinstance(part, np.ndarray) for part in parts) else jnp
    height = BLOCK if spec.tile == "16x16" else 1
    padded = [
        library.pad(part, ((0, -len(part) % height), (0, 0))) if len(part) % height else part
        for part in parts
    ]
    whole = _quantize(library.concatenate(padded) if len(padded) > 1 else padded[0], spec)
    starts = np.cumsum([0, *map(len, padded)])
    return tuple(
        QuantizedTensor(
            codes=whole.codes[start : start + len(part)],
            scales=whole.scales[start : start + len(part)],
            global_scale=whole.global_scale,
        )
        for start, part in zip(starts, parts, strict=False)
    )


def stored_shapes(module: str, shape: tuple[int, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Safetensors dtype and shape of every tensor that `to_tensors` makes of a weight of this shape."""
    rows, columns = shape
    return {
        f"{module}{CODES['modelopt']}": ("U8", (rows, columns // 2)),
        f"{module}{BLOCKS}": ("F8_E4M3", (rows, columns // BLOCK)),
        f"{module}{GLOBAL['modelopt']}": ("F32", ()),
        f"{module}{INPUT['modelopt']}": ("F32", ()),
    }


def to_tensors(module: str, q: QuantizedTensor, input_scale: float = 1.0) -> dict[str, np.ndarray]:
    """The ModelOpt tensors of a quantised weight `[N, K]`.

    input_scale: decode scale of the activations, amax/2688; 1 is what servers take where there is none, and what they
    ignore when each token has its own. Raises ValueError unless the global scale is one finite number.
    """
    scale = np.asarray(q.global_scale, np.float32)
    if scale.shape != () or not np.isfinite(scale):
        raise ValueError(f"{module}: a checkpoint stores one finite global scale per weight; got {scale!r}")
    return {
        f"{module}{CODES['modelopt']}": np.asarray(_pack(jnp.asarray(q.codes))),
        f"{module}{BLOCKS}": np.asarray(q.scales).view(ml_dtypes.float8_e4m3fn),
        f"{module}{GLOBAL['modelopt']}": scale,
        f"{module}{INPUT['modelopt']}": np.asarray(input_scale, np.float32),
    }


def layout_of(module: str, names: Mapping[str, object]) -> Layout | None:
    """The layout in which these tensors hold the module's weight quantised; None where they do not."""
    for layout in CODES:
        if f"{module}{CODES[layout]}" in names and f"{module}{GLOBAL[layout]}" in names:
            return layout
    return None


def from_tensors(module: str, tensors: Mapping[str, np.ndarray]) -> QuantizedTensor:
    """The weight of a module in either layout, its codes and block scales bit for bit.

    compressed-tensors stores the inverse of the global scale; here it becomes 1/that, one float32 rounding, as servers
    compute it, and is kept beside it as the encode scale. Raises ValueError naming the tensor that is missing or has
    another dtype or shape than the layout says, for a block scale that is NaN or negative, and for a global scale that
    is not finite or is negative.
    """
    layout = layout_of(module, tensors)
    if layout is None:
        raise ValueError(f"{module}: neither ModelOpt nor compressed-tensors NVFP4; got {sorted(tensors)}")
    codes = _tensor(tensors, f"{module}{CODES[layout]}", np.uint8, None)
    rows, half = codes.shape
    if (2 * half) % BLOCK:
        raise ValueError(f"{module}{CODES[layout]}: {2 * half} columns; a multiple of {BLOCK} is needed")
    shape = (rows, 2 * half // BLOCK)
    scales = _tensor(tensors, f"{module}{BLOCKS}", ml_dtypes.float8_e4m3fn, shape).view(np.uint8)
    if scales.size and scales.max() >= _NAN:
        raise ValueError(f"{module}{BLOCKS}: holds a block scale that is NaN or negative")
    name = f"{module}{GLOBAL[layout]}"
    stored = _tensor(tensors, name, np.float32, None)
    if stored.size != 1:
        raise ValueError(f"{name}: has shape {list(stored.shape)}; accepted is one number")
    scale = np.float32(stored.reshape(()))
    accepted = np.isfinite(scale) and (scale > 0 if layout == "compressed-tensors" else scale >= 0)
    if not accepted:
        raise ValueError(f"{name}: is {scale}; accepted is a positive finite number")
    stored_decode = layout == "modelopt"
    return QuantizedTensor(
        codes=unpack(jnp.asarray(codes)),
        scales=jnp.asarray(scales),
        global_scale=jnp.asarray(scale if stored_decode else np.float32(1) / scale),
        encode_scale=None if stored_decode else jnp.asarray(scale),
    )


def tensors_of(module: str, layout: Layout) -> tuple[str, str, str]:
    """Names that `from_tensors` reads."""
    return f"{module}{CODES[layout]}", f"{module}{BLOCKS}", f"{module}{GLOBAL[layout]}"


def _tensor(
    tensors: Mapping[str, np.ndarray], name: str, dtype: Any, shape: tuple[int, ...] | None
) -> np.ndarray:
    tensor = tensors.get(name)
    if tensor is None:
        raise ValueError(f"{name}: is missing")
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: has dtype {tensor.dtype}; accepted is {np.dtype(dtype).name}")
    if shape is not None and tensor.shape != shape:
        raise ValueError(f"{name}: has shape {list(tensor.shape)}; the codes imply {list(shape)}")
    return tensor


def quantization_config(ignore: Sequence[str], producer: Mapping[str, str]) -> dict[str, Any]:
    """`quantization_config` of `config.json`, as ModelOpt's export writes it; `ignore` lists what is not quantised."""
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": BLOCK,
        "ignore": list(ignore),
        "config_groups": {
            "group_0": {"weights": dict(_GROUP), "input_activations": dict(_GROUP), "targets": ["Linear"]}
        },
        "producer": dict(producer),
    }


def hf_quant_config(ignore: Sequence[str], producer: Mapping[str, str]) -> dict[str, Any]:
    """`hf_quant_config.json`: the same for readers that look there."""
    return {
        "producer": dict(producer),
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": BLOCK,
            "exclude_modules": list(ignore),
        },
    }
