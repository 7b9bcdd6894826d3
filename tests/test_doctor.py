"""What the doctor says of machines that are here and of machines that are not."""

import json
import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from tests.tiny import tiny_config
from triage_jax import doctor
from triage_jax.doctor import ExecutionError, Machine, check_execution, judge
from triage_jax.model import Numerics
from triage_jax.nvfp4 import DotRecipe, QuantSpec, te

CPU = Machine(
    python="3.12.3",
    packages={"jax": "0.12.0.1", "transformer-engine": None},
    platform="cpu",
    device="cpu",
    devices=1,
    capability=None,
    cudnn=None,
    cpu="Test CPU [x86]",
    cpu_bf16="amx_bf16",
)
B200 = replace(CPU, platform="gpu", device="NVIDIA B200", devices=8, capability=(10, 0), cudnn=(9, 12))
H200 = replace(B200, device="NVIDIA H200", capability=(9, 0))


def probed(error: float, fp4: bool):
    return lambda execution: (error, fp4)


def test_this_machine_runs_what_it_should_and_says_no_to_te(capsys):
    """The whole program, on the CPU of the test process."""
    assert doctor.main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    verdicts = {verdict["execution"]: verdict for verdict in report["executions"]}
    assert list(verdicts) == list(doctor.EXECUTIONS)
    for name in ("float32", "bf16", "emulated", "scaled_matmul"):
        assert verdicts[name]["works"]
        assert not verdicts[name]["native"]
        assert 0 < verdicts[name]["error"] < doctor.TOLERANCE[name]
    assert not verdicts["te"]["works"]
    assert report["machine"]["platform"] == "cpu"
    assert report["machine"]["devices"] == 8


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--require", "emulated"], 0),
        (["--require", "scaled_matmul"], 0),
        (["--require", "scaled_matmul", "--native"], 1),
        (["--require", "te"], 1),
    ],
)
def test_exit_status(arguments, status, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "probe", probed(1e-8, False))
    monkeypatch.setattr(doctor, "inspect", lambda: CPU)
    assert doctor.main(arguments) == status
    assert "executions" in capsys.readouterr().out


def test_native_wants_an_execution_that_can_be(capsys):
    with pytest.raises(SystemExit) as stop:
        doctor.main(["--require", "emulated", "--native"])
    assert stop.value.code == 2
    assert "--native goes with" in capsys.readouterr().err


def test_the_probe_sees_a_wrong_product(monkeypatch):
    """A product that swaps its operands' scales, or quantises nothing, is far outside the tolerance."""
    right = doctor.quantized_dot
    monkeypatch.setattr(doctor, "quantized_dot", lambda x, w, recipe, _: right(x, w, recipe, "bf16"))
    error, _ = doctor.probe("emulated")
    assert error > 100 * doctor.TOLERANCE["emulated"]
    verdict = judge(CPU, "emulated", doctor.probe)
    assert not verdict.works
    assert verdict.how.startswith("wrong: ")


def test_a_native_product_is_believed_when_the_program_has_it():
    verdict = judge(B200, "scaled_matmul", probed(1e-8, True))
    assert (verdict.works, verdict.native, verdict.how) == (True, True, "native FP4: cuDNN")
    assert verdict.advice is None


@pytest.mark.parametrize(
    ("machine", "advice"),
    [
        (CPU, "need a Blackwell GPU"),
        (H200, "compute capability 10.0; this device has 9.0"),
        (replace(B200, cudnn=(9, 9)), r"cuDNN 9\.10 on; found 9\.9: pip install"),
        (replace(B200, cudnn=None), r"cuDNN 9\.10 on; found none"),
        (B200, "XLA_FLAGS"),
    ],
)
def test_what_would_make_it_native(machine, advice):
    verdict = judge(machine, "scaled_matmul", probed(1e-8, False))
    assert verdict.works
    assert "dequantise and dot" in verdict.how
    assert re.search(advice, verdict.advice)


def test_a_back_end_that_fails_is_a_finding():
    def broken(_: str):
        raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED\nmany lines")

    verdict = judge(B200, "scaled_matmul", broken)
    assert not verdict.works
    assert verdict.how == "fails: RuntimeError: CUDNN_STATUS_NOT_SUPPORTED"


def test_te_is_judged_by_running_it_where_it_can(monkeypatch):
    monkeypatch.setattr(te, "unavailable", lambda: None)
    assert judge(B200, "te", probed(1e-3, False)).native
    monkeypatch.setattr(te, "unavailable", lambda: "Transformer Engine: too old a device")
    verdict = judge(H200, "te", probed(1e-3, False))
    assert verdict.how == "not available: Transformer Engine: too old a device"
    assert "Blackwell" in verdict.advice


@pytest.mark.parametrize(
    ("machine", "execution", "how"),
    [
        (CPU, "bf16", "BF16 product on the CPU, amx_bf16, float32 sums"),
        (replace(CPU, cpu_bf16=None), "bf16", "no BF16 instructions (slow)"),
        (H200, "emulated", "exact two-level NVFP4 values; BF16 tensor cores, float32 sums"),
    ],
)
def test_how_it_is_computed(machine, execution, how):
    assert how in judge(machine, execution, probed(1e-8, False)).how


def test_the_table_names_everything():
    out = StringIO()
    verdicts = [judge(H200, execution, probed(1e-8, False)) for execution in ("emulated", "scaled_matmul")]
    doctor.show(H200, verdicts, Console(file=out, width=200))
    text = out.getvalue()
    for part in (
        "8 x NVIDIA H200",
        "9.0",
        "9.12",
        "Test CPU [x86]",
        "not installed",
        "scaled_matmul: FP4 tensor cores",
    ):
        assert part in text


MODEL = tiny_config(hidden_size=256, intermediate_size=384, num_heads=4, num_kv_heads=2, head_dim=64)
EXPERTS = replace(MODEL, architecture="qwen3_moe", num_experts=4, experts_per_token=2)
NUMERICS = Numerics()


@pytest.mark.parametrize("execution", ["float32", "bf16", "emulated", "scaled_matmul"])
def test_a_model_of_whole_blocks_passes(execution):
    check_execution(execution, MODEL, NUMERICS)


def test_unknown_execution():
    with pytest.raises(
        ExecutionError, match=r"^numerics\.sampler\.execution is 'fp4'; accepted: float32, bf16, emulated, "
    ):
        check_execution("fp4", MODEL, NUMERICS, where="numerics.sampler.execution")


@pytest.mark.parametrize("execution", ["emulated", "scaled_matmul"])
def test_columns_that_are_no_whole_blocks(execution):
    narrow = replace(MODEL, intermediate_size=40)
    with pytest.raises(
        ExecutionError, match=r"weight down \[256, 40\] has 40 columns, accepted are multiples of 16"
    ):
        check_execution(execution, narrow, NUMERICS)
    check_execution("bf16", narrow, NUMERICS)


def test_attention_is_checked_only_where_it_is_quantised():
    odd = replace(MODEL, num_heads=1, num_kv_heads=1, head_dim=40)
    check_execution("emulated", odd, NUMERICS)
    with pytest.raises(ExecutionError, match=r"weight o \[256, 40\]"):
        check_execution("emulated", odd, replace(NUMERICS, layers="linear"))


def test_what_the_products_refuse_is_refused_here(monkeypatch):
    """Experts' buffers hold no runs of the batch's rows: their own message, with the field in front of it."""
    native = replace(NUMERICS, execution="scaled_matmul")
    check_execution("scaled_matmul", EXPERTS, native)
    shards = replace(native, activation=QuantSpec(scope="shard", shards=2))
    with pytest.raises(ExecutionError, match=r"^numerics\.learner\.execution 'scaled_matmul': .*'shard'"):
        check_execution("scaled_matmul", EXPERTS, shards)


def te_recipe(monkeypatch, **settings) -> None:
    """Have every Numerics describe this recipe, and Transformer Engine work."""
    recipe = DotRecipe(**{"weight": QuantSpec(), "activation": QuantSpec(), "backward": "nvfp4"} | settings)
    monkeypatch.setattr(Numerics, "recipe", property(lambda _: recipe))
    monkeypatch.setattr(te, "unavailable", lambda: None)


def test_te_passes_a_model_that_fits(monkeypatch):
    te_recipe(monkeypatch)
    check_execution("te", MODEL, NUMERICS, tokens=128)
    check_execution("te", MODEL, NUMERICS)
    check_execution("te", EXPERTS, NUMERICS, tokens=96)


@pytest.mark.parametrize(
    ("settings", "model", "arguments", "message"),
    [
        ({"backward": "bf16"}, MODEL, {}, r"weight gate \[384, 256\]: te: backward is 'bf16'"),
        ({"activation": QuantSpec(scope="row")}, MODEL, {}, "activation.scope is 'row'"),
        ({}, MODEL, {"tokens": 96}, r"rows \(tokens\) = 96, accepted multiples of 64"),
        ({}, MODEL, {"devices": 8}, "accepted 'shard' with shards 8"),
        ({}, replace(MODEL, intermediate_size=192), {}, "N = 192, accepted multiples of 128"),
    ],
)
def test_te_refuses_before_anything_is_loaded(settings, model, arguments, message, monkeypatch):
    te_recipe(monkeypatch, **settings)
    with pytest.raises(ExecutionError, match=f"^numerics.learner.execution 'te': .*{message}"):
        check_execution("te", model, NUMERICS, **arguments)


def test_te_that_is_absent(monkeypatch):
    te_recipe(monkeypatch)
    monkeypatch.setattr(te, "unavailable", lambda: "Transformer Engine is not installed")
    with pytest.raises(ExecutionError, match="'te': Transformer Engine is not installed"):
        check_execution("te", MODEL, NUMERICS)
    assert issubclass(ExecutionError, ValueError)


def test_a_probe_of_bf16_shows_its_rounding():
    """BF16 keeps 8 significant bits, so the error lies near 2⁻⁹: neither zero nor anything like a wrong product's."""
    error, fp4 = doctor.probe("bf16")
    assert 2.0**-13 < error < 2.0**-6
    assert not fp4
