"""E2M1 and E4M3 against their tables, exhaustively where the format is small."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.golden import load
from tests.nvfp4 import twin
from triage_jax.nvfp4 import e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode, pack, unpack
from triage_jax.nvfp4.formats import e2m1_round, e4m3_round

ALL_BF16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
FINITE_BF16 = ALL_BF16[np.isfinite(ALL_BF16)]
MODES = pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])


@MODES
def test_e2m1_of_every_finite_bf16(run):
    assert FINITE_BF16.size == 65_280
    x = FINITE_BF16.astype(np.float32)
    expected = twin.nearest(np.abs(x), twin.E2M1) | (np.signbit(x).astype(np.uint8) << 3)
    codes = run(e2m1_encode)(jnp.asarray(FINITE_BF16))
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(run(e2m1_round)(jnp.asarray(x)), run(e2m1_decode)(codes))


@MODES
def test_e2m1_matches_hardware_rule(run):
    golden = load("nvfp4_golden.npz")
    np.testing.assert_array_equal(
        run(e2m1_encode)(jnp.asarray(golden["cast/e2m1_in"])), golden["cast/e2m1_hw_rule"]
    )


def test_e2m1_decodes_the_sixteen_codes():
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    values = np.asarray(e2m1_decode(jnp.arange(16, dtype=jnp.uint8)))
    np.testing.assert_array_equal(values, expected)
    assert np.signbit(values[8])


@MODES
def test_e4m3_round_trip_of_every_code(run):
    bits = np.arange(256, dtype=np.uint8)
    values = np.asarray(run(e4m3_decode)(jnp.asarray(bits)))
    assert np.isnan(values[[127, 255]]).all()
    numbers = np.delete(bits, [127, 255])
    np.testing.assert_array_equal(run(e4m3_encode)(jnp.asarray(values[numbers])), numbers)
    np.testing.assert_array_equal(run(e4m3_round)(jnp.asarray(values[numbers])), values[numbers])


@MODES
def test_e4m3_of_every_finite_bf16_and_every_midpoint(run):
    midpoints = ((twin.E4M3[1:] + twin.E4M3[:-1]) / 2).astype(np.float32)
    x = np.concatenate([np.abs(FINITE_BF16.astype(np.float32)), midpoints, np.nextafter(midpoints, 0)])
    expected = twin.nearest(x, twin.E4M3)
    np.testing.assert_array_equal(run(e4m3_encode)(jnp.asarray(x)), expected)
    np.testing.assert_array_equal(run(e4m3_encode)(jnp.asarray(-x)), expected | 0x80)
    np.testing.assert_array_equal(run(e4m3_round)(jnp.asarray(-x)), -twin.E4M3[expected])


@MODES
def test_e4m3_saturates_and_keeps_nan(run):
    golden = load("nvfp4_golden.npz")
    x, expected = golden["cast/e4m3_in"][:-1], golden["cast/e4m3_sat"][:-1]
    np.testing.assert_array_equal(run(e4m3_encode)(jnp.asarray(x)), expected)
    assert int(run(e4m3_encode)(jnp.float32(np.nan))) & 0x7F == 0x7F
    assert np.isnan(run(e4m3_round)(jnp.float32(np.nan)))


# Subnormal numbers are zeros to XLA on a CPU, so they are left out.
NORMAL = st.floats(width=32, allow_nan=False, allow_subnormal=False)


@settings(deadline=None, max_examples=100)
@given(
    hnp.arrays(np.float32, 64, elements=st.one_of(NORMAL, st.floats(-8, 8, width=32, allow_subnormal=False)))
)
def test_e2m1_rounds_like_a_table_search(x):
    codes = e2m1_encode(jnp.asarray(x))
    np.testing.assert_array_equal(
        codes, twin.nearest(np.abs(x), twin.E2M1) | (np.signbit(x).astype(np.uint8) << 3)
    )
    np.testing.assert_array_equal(e2m1_round(jnp.asarray(x)), e2m1_decode(codes))


@settings(deadline=None, max_examples=100)
@given(
    hnp.arrays(
        np.float32, 64, elements=st.one_of(NORMAL, st.floats(-500, 500, width=32, allow_subnormal=False))
    )
)
def test_e4m3_rounds_like_a_table_search(x):
    expected = twin.nearest(np.abs(x), twin.E4M3)
    np.testing.assert_array_equal(np.asarray(e4m3_encode(jnp.asarray(x))) & 0x7F, expected)
    np.testing.assert_array_equal(e4m3_round(jnp.asarray(x)), np.sign(x) * twin.E4M3[expected])


def test_pack_puts_the_even_element_low():
    np.testing.assert_array_equal(pack(jnp.asarray([[1, 2, 15, 8]], jnp.uint8)), [[0x21, 0x8F]])


@settings(deadline=None, max_examples=30)
@given(hnp.arrays(np.uint8, (3, 10), elements=st.integers(0, 15)))
def test_unpack_inverts_pack(codes):
    np.testing.assert_array_equal(unpack(pack(jnp.asarray(codes))), codes)


def test_pack_refuses_an_odd_axis():
    with pytest.raises(ValueError, match=r"even.*\(2, 3\)"):
        pack(jnp.zeros((2, 3), jnp.uint8))
