"""What this machine can execute: `python -m triage_jax.doctor [--require EXECUTION [--native]] [--json]`.

Every execution multiplies a small pair of matrices on the first device and is compared with a float64 sum of what it
should have multiplied; whether XLA really put an FP4 product into the program is read off the program. Exit status 0
if the required execution works (all that were asked for none), 1 if not.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from triage_jax.model import ModelConfig, Numerics, forward
from triage_jax.model.capacity import STEP
from triage_jax.model.numerics import ATTENTION, MLP
from triage_jax.model.params import abstract_params
from triage_jax.nvfp4 import DotRecipe, QuantSpec, dequantize, quantize, quantized_dot, te
from triage_jax.nvfp4.spec import BLOCK

EXECUTIONS = ("float32", "bf16", "emulated", "scaled_matmul", "te")
NVFP4 = EXECUTIONS[2:]
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "transformer-engine")
BLACKWELL, SMALLEST_CUDNN = (10, 0), (9, 10)
FP4_CALL = "__cudnn$blockScaledDot"
CUDA_HINT = "pip install 'triage-jax[gpu]' on a machine with an NVIDIA driver"


class ExecutionError(ValueError):
    """An execution that this machine, or this model, cannot have: the message says why and what is accepted."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What JAX sees."""

    python: str
    packages: Mapping[str, str | None]
    platform: str
    """cpu, gpu or tpu: where arrays go by default"""
    device: str
    devices: int
    capability: tuple[int, int] | None
    """CUDA compute capability"""
    cudnn: tuple[int, int] | None
    cpu: str
    cpu_bf16: str | None
    """Instruction set that multiplies BF16, if any"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one execution is here."""

    execution: str
    works: bool
    native: bool
    """Products of E2M1 operands run on FP4 tensor cores"""
    how: str
    """What is computed, or why nothing is"""
    error: float | None = None
    """Largest deviation from the float64 sum, in units of the largest element"""
    advice: str | None = None


def inspect() -> Machine:
    """Look at the default device, the installed packages and the CPU."""
    devices = jax.devices()
    capability = getattr(devices[0], "compute_capability", None)
    cpu, flags = _cpu()
    bf16 = [name for name in ("amx_bf16", "avx512_bf16") if name in flags]
    return Machine(
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        platform=devices[0].platform,
        device=devices[0].device_kind,
        devices=len(devices),
        capability=_pair(capability) if capability else None,
        cudnn=_cudnn() if devices[0].platform == "gpu" else None,
        cpu=cpu,
        cpu_bf16=bf16[0] if bf16 else None,
    )


def judge(machine: Machine, execution: str, probe: Callable[[str], tuple[float, bool]]) -> Verdict:
    """Verdict on `execution`; `probe` runs it and gives its error and whether its program has an FP4 product."""
    if execution == "te" and (reason := te.unavailable()):
        return Verdict(
            execution=execution,
            works=False,
            native=False,
            how=f"not available: {reason}",
            advice=f"a Blackwell GPU and Transformer Engine {te.VERSION}: {CUDA_HINT}",
        )
    try:
        error, fp4 = probe(execution)
    except Exception as failure:  # whatever a back end raises is the finding
        first = (str(failure).strip().splitlines() or [""])[0]
        return Verdict(
            execution=execution, works=False, native=False, how=f"fails: {type(failure).__name__}: {first}"
        )
    works = error < TOLERANCE[execution]
    native = fp4 or execution == "te"
    return Verdict(
        execution=execution,
        works=works,
        native=native,
        how=_how(machine, execution, native) if works else f"wrong: {error:.1e} from the float64 sum",
        error=error,
        advice=_advice(machine) if execution == "scaled_matmul" and not native else None,
    )


def _how(machine: Machine, execution: str, native: bool) -> str:
    if execution == "te":
        return "native FP4: Transformer Engine's quantisers and cuBLASLt"
    if execution == "scaled_matmul":
        return "native FP4: cuDNN" if native else "exact values by dequantise and dot; FP4 saves no time here"
    if execution == "float32":
        return "float32 product at highest precision"
    if machine.platform == "cpu":
        unit = machine.cpu_bf16 or "no BF16 instructions (slow)"
        product = f"BF16 product on the CPU, {unit}, float32 sums"
    else:
        product = "BF16 tensor cores, float32 sums"
    return product if execution == "bf16" else f"exact two-level NVFP4 values; {product}"


def _advice(machine: Machine) -> str:
    """What would make `scaled_matmul` native."""
    if machine.platform != "gpu":
        return f"FP4 tensor cores need a Blackwell GPU: {CUDA_HINT}"
    if machine.capability is None or machine.capability < BLACKWELL:
        found = "none" if machine.capability is None else "{}.{}".format(*machine.capability)
        return f"FP4 tensor cores need compute capability 10.0; this device has {found}"
    wanted = "{}.{}".format(*SMALLEST_CUDNN)
    if machine.cudnn is None or machine.cudnn < SMALLEST_CUDNN:
        found = "none" if machine.cudnn is None else "{}.{}".format(*machine.cudnn)
        return f"XLA takes cuDNN's FP4 product from cuDNN {wanted} on; found {found}: pip install -U nvidia-cudnn-cu13"
    return f"XLA made no FP4 product in spite of cuDNN {wanted} or newer: look for XLA_FLAGS that forbid it"


# By execution, against the float64 sum of the operands it is meant to multiply: rounding of the operands (bf16), of the
# output to BF16 (te), or the order of float32 addition.
TOLERANCE = {"float32": 1e-5, "bf16": 2e-2, "emulated": 1e-5, "scaled_matmul": 1e-5, "te": 1e-2}
_RECIPE = DotRecipe(
    weight=QuantSpec(), activation=QuantSpec(), backward="nvfp4", stochastic_rounding=False, hadamard=False
)


def probe(execution: str) -> tuple[float, bool]:
    """Multiply [64, 256] by [128, 256] on the default device: error, and whether the program has an FP4 product."""
    rng = np.random.default_rng(0)
    dtype = jnp.bfloat16 if execution == "te" else jnp.float32
    x, w = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((64, 256), (128, 256)))

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        if execution == "te":
            return te.te_dot(x, w, _RECIPE)
        return quantized_dot(x, w, _RECIPE, execution)  # pyright: ignore[reportArgumentType]

    compiled = jax.jit(product).lower(x, w).compile()
    a, b = (
        dequantize(quantize(m, QuantSpec())) if execution in NVFP4 else m.astype(jnp.float32) for m in (x, w)
    )
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    error = np.abs(np.asarray(compiled(x, w), np.float64) - exact).max() / np.abs(exact).max()
    return float(error), FP4_CALL in (compiled.as_text() or "")


def check_execution(
    execution: str,
    model: ModelConfig,
    numerics: Numerics,
    *,
    where: str = "numerics.learner.execution",
    tokens: int | None = None,
    devices: int = 1,
) -> None:
    """Raises ExecutionError if `execution` cannot run the quantised products of `model`, here, under `numerics`.

    To be called before any weight is loaded: it looks at shapes only, and traces a forward pass of them. `tokens`: rows
    times columns of one micro-batch, over all `devices`.
    """
    if execution not in EXECUTIONS:
        raise ExecutionError(f"{where} is {execution!r}; accepted: {', '.join(EXECUTIONS)}")
    names = MLP if numerics.layers == "mlp" else ATTENTION + MLP
    layers: Any = abstract_params(model, jnp.float32).layers
    for name in names if execution in NVFP4 else ():
        shape = getattr(layers, name).shape[1:]
        if shape[-1] % BLOCK:
            raise ExecutionError(
                f"{where} {execution!r}: weight {name} {list(shape)} has {shape[-1]} columns, accepted are multiples "
                f"of {BLOCK}: a block of {BLOCK} shares one scale"
            )
        if execution == "te":
            _check_te(where, name, shape, numerics.recipe, tokens, devices)
    if execution == "te" and (reason := te.unavailable()):
        raise ExecutionError(f"{where} 'te': {reason}")
    if execution == numerics.execution:
        _check_forward(where, model, numerics)


def _check_forward(where: str, model: ModelConfig, numerics: Numerics) -> None:
    """Whatever the products themselves refuse, they refuse while being traced."""
    tokens, valid = (jax.ShapeDtypeStruct((1, BLOCK), dtype) for dtype in (jnp.int32, jnp.bool))
    trace = partial(forward, config=model, numerics=numerics)
    try:
        jax.eval_shape(trace, abstract_params(model, jnp.float32), tokens, valid)
    except ValueError as error:
        raise ExecutionError(f"{where} {numerics.execution!r}: {error}") from error


def _check_te(
    where: str, name: str, shape: tuple[int, ...], recipe: DotRecipe, tokens: int | None, devices: int
) -> None:
    try:
        te.check_recipe(recipe)
        te.check_shards(recipe, devices)
        # Without a token count, and of experts, whose buffers are filled up: as many rows on each device as fit.
        *experts, outputs, inputs = shape
        rows = STEP * devices if tokens is None or experts else tokens
        te.check_sizes(rows, outputs, inputs, recipe, devices)
    except ValueError as error:
        raise ExecutionError(f"{where} 'te': weight {name} {list(shape)}: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m triage_jax.doctor", description=__doc__)
    parser.add_argument("--require", choices=EXECUTIONS, help="exit with 1 unless this execution works here")
    parser.add_argument(
        "--native", action="store_true", help="the required execution must run on FP4 tensor cores"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    options = parser.parse_args(arguments)
    if options.native and options.require not in ("scaled_matmul", "te"):
        parser.error("--native goes with --require scaled_matmul or te")

    machine = inspect()
    verdicts = [judge(machine, execution, probe) for execution in EXECUTIONS]
    if options.json:
        report = {"machine": asdict(machine), "executions": [asdict(verdict) for verdict in verdicts]}
        print(json.dumps(report, indent=1))
    else:
        show(machine, verdicts)
    met = [v.works and (v.native or not options.native) for v in verdicts if v.execution == options.require]
    return 0 if all(met) else 1


def show(machine: Machine, verdicts: Sequence[Verdict], console: Console | None = None) -> None:
    """Both tables, and what is missing."""
    console = console or Console(highlight=False)
    table = Table(title="machine", show_header=False, title_justify="left")
    table.add_row("devices", escape(f"{machine.devices} x {machine.device} ({machine.platform})"))
    if machine.platform == "gpu":
        table.add_row("compute capability", _dotted(machine.capability))
        table.add_row("cuDNN", _dotted(machine.cudnn))
    table.add_row("CPU", escape(f"{machine.cpu}, BF16: {machine.cpu_bf16 or 'none'}"))
    table.add_row("Python", machine.python)
    for name, version in machine.packages.items():
        table.add_row(name, version or "not installed")
    console.print(table)
    table = Table(
        "execution", "works", "FP4", "error", "here it is", title="executions", title_justify="left"
    )
    for verdict in verdicts:
        error = "-" if verdict.error is None else f"{verdict.error:.0e}"
        marks = ("yes" if verdict.works else "no", "native" if verdict.native else "-")
        table.add_row(verdict.execution, *marks, error, escape(verdict.how))
    console.print(table)
    for verdict in verdicts:
        if verdict.advice:
            console.print(f"{verdict.execution}: {verdict.advice}", markup=False)


def _dotted(pair: tuple[int, int] | None) -> str:
    return "not found" if pair is None else "{}.{}".format(*pair)


def _pair(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cudnn() -> tuple[int, int] | None:
    """The cuDNN that JAX's CUDA plugin found; it numbers 9.12.1 as 91201."""
    try:
        from jax._src.lib import cuda_versions

        number = int(cuda_versions.cudnn_get_version())  # pyright: ignore[reportOptionalMemberAccess]
    except Exception:  # no plugin, or no library: either way there is none
        return None
    return number // 10_000, number // 100 % 100


def _cpu() -> tuple[str, frozenset[str]]:
    """Model name and feature flags; both empty-handed where there is no /proc."""
    info = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    for line in info.read_text().splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields.get("model name", platform.machine()), frozenset(fields.get("flags", "").split())


if __name__ == "__main__":
    sys.exit(main())
