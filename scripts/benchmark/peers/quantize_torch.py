"""NVFP4 quantisation of one matrix by torchao, Model-Optimizer and compressed-tensors: peers of the quantise benchmark.

    python quantize_torch.py inputs.npz outputs.npz [--repeats 10] [--compile]

Runs in an environment of its own (torch 2.13, torchao 0.18, nvidia-modelopt 0.47 with omegaconf, pulp and requests,
compressed-tensors 0.20); imports nothing of this package. Reads `x`, the bits of a BF16 matrix. Every peer turns it
into packed codes, E4M3 block scales and a global scale, all dynamic, by its own public functions. Writes for each
peer that can be imported `NAME/packed`, `NAME/scales` (bits) and `NAME/seconds`, the fastest of the repeats, and
`versions`, a JSON object. `--compile` adds torchao under torch.compile.
"""

import argparse
import importlib.metadata
import json
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch

warnings.filterwarnings("ignore")

BLOCK = 16
PACKAGES = {"torchao": "torchao", "modelopt": "nvidia-modelopt", "compressed_tensors": "compressed-tensors"}


def torchao() -> Callable:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    def quantise(x):
        return nvfp4_quantize(x, BLOCK, per_tensor_amax_to_scale(x.abs().max()))[::-1]

    return quantise


def modelopt() -> Callable:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def quantise(x):
        q, scales, _ = NVFP4QTensor.quantize(x, BLOCK)
        return q._quantized_data, scales

    return quantise


def compressed_tensors() -> Callable:
    from compressed_tensors.compressors.nvfp4.helpers import quantize_and_pack_fp4
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    arguments = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=BLOCK,
        symmetric=True,
        scale_dtype=torch.float8_e4m3fn,
    )

    def quantise(x):
        x = x.float()
        blocks = x.view(len(x), -1, BLOCK)
        low, high = blocks.amin(-1), blocks.amax(-1)
        encode = generate_gparam(low.min(), high.max())
        scales, _ = calculate_qparams(low, high, arguments, global_scale=encode)
        return quantize_and_pack_fp4(x, scales, encode), scales.to(torch.float8_e4m3fn)

    return quantise


def fastest(quantise: Callable, x: torch.Tensor, repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        quantise(x)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("inputs")
    parser.add_argument("outputs")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    with np.load(arguments.inputs) as archive:
        x = torch.from_numpy(archive["x"].view(np.int16)).view(torch.bfloat16)
    results: dict[str, np.ndarray] = {}
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    for make in (torchao, modelopt, compressed_tensors):
        name = make.__name__
        try:
            quantise = make()
        except ImportError as error:
            versions[name] = f"not measured: {error}"
            continue
        versions[name] = importlib.metadata.version(PACKAGES[name])
        forms = {name: quantise}
        if arguments.compile and name == "torchao":
            forms["torchao, compiled"] = torch.compile(quantise)
        for form, call in forms.items():
            packed, scales = call(x)
            results[f"{form}/packed"] = packed.view(torch.uint8).numpy()
            results[f"{form}/scales"] = scales.reshape(len(x), -1).view(torch.uint8).numpy()
            results[f"{form}/seconds"] = np.float64(fastest(call, x, arguments.repeats))
    np.savez(arguments.outputs, versions=json.dumps(versions), **results)


if __name__ == "__main__":
    main()
