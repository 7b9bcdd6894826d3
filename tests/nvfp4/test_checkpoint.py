"""The two checkpoint layouts: bytes against recorded ones, meaning against hand-worked numbers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.golden import load
from triage_jax.nvfp4 import QuantizedTensor, QuantSpec, dequantize, quantize
from triage_jax.nvfp4.checkpoint import (
    from_tensors,
    hf_quant_config,
    layout_of,
    quantization_config,
    quantize_together,
    stored_shapes,
    tensors_of,
    to_tensors,
)

SPECS = [
    QuantSpec(),
    QuantSpec(tile="16x16"),
    QuantSpec(rule="modelopt"),
    QuantSpec(tile="16x16", rule="modelopt"),
]
F8 = ml_dtypes.float8_e4m3fn


def draw(rows: int, columns: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    values = np.random.default_rng(seed).normal(0.0, scale, (rows, columns))
    return jnp.asarray(values, jnp.bfloat16)


def small(**changes: np.ndarray | None) -> dict[str, np.ndarray]:
    """The tensors of a quantised 2×16 weight, some replaced or (None) dropped."""
    tensors = to_tensors("m", quantize(draw(2, 16), QuantSpec()))
    tensors |= {f"m.{name}": value for name, value in changes.items()}
    return {name: value for name, value in tensors.items() if value is not None}


def merge_zeros(packed: np.ndarray) -> np.ndarray:
    """Codes with both zeros as 0."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1)
    return np.where(codes == 8, 0, codes)


@pytest.mark.parametrize("name", ["outliers", "zeros", "huge", "ties", "wide"])
def test_tensors_are_those_that_model_optimizer_writes(name):
    golden = load("nvfp4_golden.npz")
    x = jnp.asarray(golden[f"{name}/x"].view(ml_dtypes.bfloat16))
    tensors = to_tensors("m", quantize(x, QuantSpec(rule="modelopt")))
    np.testing.assert_array_equal(
        merge_zeros(tensors["m.weight"]), merge_zeros(golden[f"{name}/modelopt/packed"])
    )
    np.testing.assert_array_equal(tensors["m.weight_scale"].view(np.uint8), golden[f"{name}/modelopt/sf"])
    np.testing.assert_array_equal(tensors["m.weight_scale_2"], golden[f"{name}/modelopt/dec"][0])


def test_bytes_worked_by_hand():
    # Largest |x| is 6: the global scale is 6/2688 and the first block's is 448; the second block's largest is 3.
    x = np.zeros((1, 32), np.float32)
    x[0, :4] = 6.0, -3.0, 0.5, 1.5
    x[0, 16:18] = -3.0, 1.0
    tensors = to_tensors("m", quantize(jnp.asarray(x), QuantSpec()), input_scale=0.25)
    assert tensors["m.weight"].dtype == np.uint8
    assert tensors["m.weight"].shape == (1, 16)
    # Low nibble first: 6 -> 7, -3 -> 8 + 5; 0.5 -> 1, 1.5 -> 3; in the second block x/0.5: -6 -> 15, 2 -> 4.
    assert tensors["m.weight"][0, :2].tolist() == [0xD7, 0x31]
    assert tensors["m.weight"][0, 8] == 0x4F
    assert tensors["m.weight_scale"].dtype == F8
    assert tensors["m.weight_scale"].astype(np.float32).tolist() == [[448.0, 224.0]]
    assert tensors["m.weight_scale_2"].shape == ()
    assert tensors["m.weight_scale_2"] == np.float32(6 / 2688)
    assert tensors["m.input_scale"] == np.float32(0.25)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.rule}-{spec.tile}")
def test_reading_gives_back_every_bit(spec):
    q = quantize(draw(40, 48, seed=1), spec)
    tensors = to_tensors("a.b", q)
    assert {name: (t.shape, t.dtype) for name, t in tensors.items()} == {
        name: (shape, np.dtype({"U8": np.uint8, "F8_E4M3": F8, "F32": np.float32}[dtype]))
        for name, (dtype, shape) in stored_shapes("a.b", (40, 48)).items()
    }
    back = from_tensors("a.b", tensors)
    for field in ("codes", "scales", "global_scale"):
        np.testing.assert_array_equal(getattr(back, field), getattr(q, field), err_msg=field)
        assert getattr(back, field).dtype == getattr(q, field).dtype


def test_compressed_tensors_stores_the_inverse_of_the_global_scale():
    modelopt = small()
    stored = {
        "m.weight_packed": modelopt["m.weight"],
        "m.weight_scale": modelopt["m.weight_scale"],
        "m.weight_global_scale": np.array([640.0], np.float32),
    }
    q = from_tensors("m", stored)
    assert q.global_scale.shape == ()
    assert float(q.global_scale) == np.float32(1) / np.float32(640)
    ours = from_tensors("m", modelopt)
    np.testing.assert_array_equal(q.codes, ours.codes)
    np.testing.assert_array_equal(q.scales, ours.scales)
    assert layout_of("m", stored) == "compressed-tensors"
    assert layout_of("m", modelopt) == "modelopt"
    assert layout_of("m", {"m.weight": stored["m.weight_packed"]}) is None
    assert tensors_of("m", "compressed-tensors") == tuple(stored)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.rule}-{spec.tile}")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_parts_share_the_amax_and_nothing_else(spec, wrap):
    # 20 rows: were the parts simply stacked, a 16×16 tile would hold the end of the first and the start of the second.
    parts = (draw(20, 32, seed=2), draw(24, 32, seed=3, scale=7.0))
    amax = max(float(jnp.abs(part).max()) for part in parts)
    assert amax == float(jnp.abs(parts[1]).max())
    together = wrap(lambda *parts: quantize_together(parts, spec))(*parts)
    for part, q in zip(parts, together, strict=True):
        assert q.codes.shape == part.shape
        assert q.global_scale == np.float32(amax) / np.float32(2688)
        # A part with one more tile that holds the amax has the scope, and in its first rows the tiles, of the group.
        rows = len(part) + -len(part) % 16
        alone = jnp.zeros((rows + 16, 32), part.dtype).at[: len(part)].set(part).at[rows, 0].set(amax)
        expected = quantize(alone, spec)
        np.testing.assert_array_equal(q.codes, expected.codes[: len(part)])
        np.testing.assert_array_equal(q.scales, expected.scales[: len(part)])


@pytest.mark.parametrize("rule", ["te", "modelopt"])
def test_a_tile_is_stored_once_per_row_and_reads_as_sixteen_blocks(rule):
    x = draw(32, 32, seed=4)
    (q,) = quantize_together([x], QuantSpec(tile="16x16", rule=rule))
    scales = to_tensors("m", q)["m.weight_scale"].view(np.uint8).reshape(2, 16, 2)
    assert (scales == scales[:, :1]).all()
    # One scale for 256 numbers: the error of each is at most half the widest step, 1 of 6 of the tile's largest.
    error = np.abs(np.asarray(dequantize(q)) - np.asarray(x, np.float32))
    largest = np.abs(np.asarray(x, np.float32)).reshape(2, 16, 2, 16).max(axis=(1, 3))
    assert (error.reshape(2, 16, 2, 16).max(axis=(1, 3)) <= largest * 0.18).all()


def test_scopes_of_rows_have_no_place():
    with pytest.raises(ValueError, match="one global scale per weight: scope 'row'"):
        quantize_together([draw(4, 16)], QuantSpec(scope="row"))
    with pytest.raises(ValueError, match=r"m: a checkpoint stores one finite global scale"):
        to_tensors("m", quantize(draw(4, 16), QuantSpec(scope="row")))
    broken = quantize(draw(4, 16).at[0, 0].set(jnp.nan), QuantSpec())
    with pytest.raises(ValueError, match=r"one finite global scale per weight; got .*nan"):
        to_tensors("m", broken)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": None}, "m: neither ModelOpt nor compressed-tensors NVFP4"),
        ({"weight_scale": None}, r"m\.weight_scale: is missing"),
        ({"weight": np.zeros((2, 8), np.int8)}, r"m\.weight: has dtype int8; accepted is uint8"),
        ({"weight": np.zeros((2, 7), np.uint8)}, "14 columns; a multiple of 16"),
        ({"weight_scale": np.ones((2, 1), np.float32)}, r"m\.weight_scale: has dtype float32; accepted is float8"),
        ({"weight_scale": np.ones((1, 2), F8)}, r"has shape \[1, 2\]; the codes imply \[2, 1\]"),
        ({"weight_scale": np.array([[1], [np.nan]], F8)}, "a block scale that is NaN or negative"),
        ({"weight_scale": np.array([[1], [-1]], F8)}, "a block scale that is NaN or negative"),
        ({"weight_scale_2": np.ones(2, np.float32)}, r"m\.weight_scale_2: has shape \[2\]; accepted is one number"),
        ({"weight_scale_2": np.array(np.inf, np.float32)}, "is inf; accepted is a positive finite number"),
        ({"weight_scale_2": np.array(-1, np.float32)}, "is -1"),
        ({"weight_scale_2": np.array(1.0)}, "has dtype float64; accepted is float32"),
    ],
)  # fmt: skip
def test_damage_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        from_tensors("m", small(**changes))


def test_an_inverse_scale_of_zero_is_damage():
    tensors = small()
    stored = {"m.weight_packed": tensors["m.weight"], "m.weight_scale": tensors["m.weight_scale"]}
    with pytest.raises(ValueError, match=r"m\.weight_global_scale: is 0\.0"):
        from_tensors("m", stored | {"m.weight_global_scale": np.zeros(1, np.float32)})


def test_all_zero_weights_survive():
    q = quantize(jnp.zeros((2, 16)), QuantSpec())
    back = from_tensors("m", to_tensors("m", q))
    assert isinstance(back, QuantizedTensor)
    assert not np.asarray(dequantize(back)).any()


def test_both_descriptions_say_the_same():
    config = quantization_config(["lm_head"], {"name": "x", "version": "1"})
    legacy = hf_quant_config(["lm_head"], {"name": "x", "version": "1"})
    assert (config["quant_method"], config["quant_algo"], config["group_size"]) == ("modelopt", "NVFP4", 16)
    assert config["ignore"] == legacy["quantization"]["exclude_modules"] == ["lm_head"]
    group = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    assert config["config_groups"] == {
        "group_0": {"weights": group, "input_activations": group, "targets": ["Linear"]}
    }
    assert legacy["quantization"]["quant_algo"] == "NVFP4"
    assert legacy["quantization"]["kv_cache_quant_algo"] is None
    assert legacy["quantization"]["group_size"] == 16
