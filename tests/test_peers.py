"""Our checkpoints in the hands of Model-Optimizer and compressed-tensors themselves, and theirs in ours."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.test_quantize import tensors_of
from tests.tiny import tiny_config, tiny_params
from triage_jax.model import Params, load_dequantized, save_model
from triage_jax.model.selection import Selection
from triage_jax.quantize import QuantizeConfig, quantize_checkpoint

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PROGRAM = ROOT / "scripts" / "benchmark" / "peers" / "quantize_checkpoint.py"
FIELDS = {
    "q_proj": "q",
    "k_proj": "k",
    "v_proj": "v",
    "o_proj": "o",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}
LINEAR = Selection(layers="linear")
pytestmark = pytest.mark.peers
type Peer = Callable[..., None]


@pytest.fixture(scope="module")
def peer() -> Peer:
    """Runs a command of the peers' program."""
    if not PYTHON.exists():
        pytest.skip("runs once scripts/peers_env.sh has made .venv-peers (1.5 GB, minutes)")

    def call(*arguments: str | Path) -> None:
        run = subprocess.run([PYTHON, PROGRAM, *arguments], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr

    return call


@pytest.fixture
def model(tmp_path) -> Path:
    """Fresh random weights, in an ordinary directory."""
    config = tiny_config(hidden_size=64, intermediate_size=128, vocab_size=128)
    params = tiny_params(config, seed=int(np.random.default_rng().integers(2**31)))
    save_model(tmp_path / "model", params, config)
    return tmp_path / "model"


def ours(params: Params, name: str) -> np.ndarray:
    """A weight by its name in a checkpoint."""
    _, _, layer, _, part, _ = name.split(".")
    return np.asarray(getattr(params.layers, FIELDS[part])[int(layer)], np.float32)


def assert_read_alike(directory: Path, file: Path) -> None:
    """Every weight that the peer read, within an ulp: the two scales are multiplied in another order."""
    params, _ = load_dequantized(directory)
    read = load_file(file)
    assert len(read) == 2 * len(FIELDS)
    for name, values in read.items():
        np.testing.assert_allclose(ours(params, name), values, rtol=2**-22, atol=0, err_msg=name)


@pytest.mark.parametrize(("rule", "tile"), [("modelopt", "1x16"), ("te", "1x16"), ("te", "16x16")])
def test_model_optimizer_reads_what_we_write(model, tmp_path, peer, rule, tile):
    quantize_checkpoint(model, tmp_path / "out", QuantizeConfig(select=LINEAR, rule=rule, tile=tile))
    peer("dequantize", tmp_path / "out", tmp_path / "values.safetensors")
    assert_read_alike(tmp_path / "out", tmp_path / "values.safetensors")


def test_model_optimizer_writes_the_same_bytes(model, tmp_path, peer):
    quantize_checkpoint(model, tmp_path / "ours", QuantizeConfig(select=LINEAR))
    peer("modelopt", model, tmp_path / "theirs")
    left, right = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs")
    assert left.keys() == right.keys()
    for name in left.keys() - {key for key in left if key.endswith(".input_scale")}:  # theirs is calibrated
        assert left[name].tobytes() == right[name].tobytes(), name


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_we_read_what_they_write_as_they_do(model, tmp_path, peer, layout):
    peer(layout, model, tmp_path / "theirs")
    peer("dequantize", tmp_path / "theirs", tmp_path / "values.safetensors")
    assert_read_alike(tmp_path / "theirs", tmp_path / "values.safetensors")
