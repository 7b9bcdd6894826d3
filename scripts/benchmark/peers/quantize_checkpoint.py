"""NVFP4 checkpoints written and read by Model-Optimizer and by compressed-tensors, on a CPU.

    python quantize_checkpoint.py modelopt SRC DST              export SRC with Model-Optimizer
    python quantize_checkpoint.py compressed-tensors SRC DST    export SRC with compressed-tensors
    python quantize_checkpoint.py dequantize DIR FILE [MODULE]  values of DIR's weights by the reader of its layout

Runs in an environment with torch, transformers, nvidia-modelopt and compressed-tensors, apart from this package's. FILE
is a safetensors file of float32 weights under their usual names; MODULE, a regular expression, picks some.
"""

import argparse
import copy
import json
import re
import warnings
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

warnings.filterwarnings("ignore")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("modelopt", "compressed-tensors"):
        command = commands.add_parser(name)
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path)
    command = commands.add_parser("dequantize")
    command.add_argument("directory", type=Path)
    command.add_argument("file", type=Path)
    command.add_argument("module", nargs="?", default=".*")
    arguments = parser.parse_args()
    if arguments.command == "dequantize":
        dequantize(arguments.directory, arguments.file, re.compile(arguments.module))
    else:
        export = modelopt if arguments.command == "modelopt" else compressed_tensors
        export(load(arguments.source), arguments.target)


def load(source: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()


def modelopt(model: torch.nn.Module, target: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    tokens = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0))
    model = mtq.quantize(model, copy.deepcopy(mtq.NVFP4_DEFAULT_CFG), forward_loop=lambda m: m(tokens))
    export_hf_checkpoint(model, export_dir=str(target))


def compressed_tensors(model: torch.nn.Module, target: Path) -> None:
    """What llm-compressor does for the scheme NVFP4, with activation scales of 1."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    config = QuantizationConfig(
        config_groups={"NVFP4": ["Linear"]}, ignore=["lm_head"], format="nvfp4-pack-quantized"
    )
    apply_quantization_config(model, config)
    modules = {
        name: module for name, module in model.named_modules() if hasattr(module, "quantization_scheme")
    }
    amax = {name: module.weight.float().abs().max() for name, module in modules.items()}
    for name, module in modules.items():
        parent, own = name.rsplit(".", 1)
        shared = next((group for group in FUSED if own in group), (own,))
        largest = torch.stack([amax[f"{parent}.{other}"] for other in shared]).max()
        scale = generate_gparam(-largest, largest)
        blocks = module.weight.float().abs().unflatten(-1, (-1, 16)).amax(-1)
        scales, _ = calculate_qparams(-blocks, blocks, module.quantization_scheme.weights, global_scale=scale)
        module.weight_global_scale.data = scale
        module.weight_scale.data = scales
        module.input_global_scale.data = torch.ones(1)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(target)
    compressor.update_config(str(target))


def dequantize(directory: Path, file: Path, wanted: re.Pattern[str]) -> None:
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as handle:
            tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a mapping
    values = {}
    for name in tensors:
        module, _, last = name.rpartition(".")
        parts = {key: value for key, value in tensors.items() if key.rpartition(".")[0] == module}
        parts = {key.rpartition(".")[2]: value for key, value in parts.items()}
        if last == "weight_scale" and wanted.search(module):
            read = by_modelopt if "weight_scale_2" in parts else by_compressed_tensors
            values[f"{module}.weight"] = read(parts).float().contiguous()
    save_file(values, file)
    print(json.dumps({"weights": len(values)}))


def by_modelopt(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    codes, scale = parts["weight"], parts["weight_scale"]
    q = NVFP4QTensor((codes.shape[0], 2 * codes.shape[1]), torch.float32, codes)
    return q.dequantize(scale=scale, double_scale=parts["weight_scale_2"], block_sizes={-1: 16})


def by_compressed_tensors(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """As its decompressor, in float32 where that one rounds to BF16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    rows, half = parts["weight_packed"].shape
    return dequantize(
        x_q=unpack_fp4_from_uint8(parts["weight_packed"], rows, 2 * half, dtype=torch.float32),
        scale=parts["weight_scale"].float(),
        args=preset_name_to_scheme("NVFP4", ["Linear"]).weights,
        global_scale=parts["weight_global_scale"],
        dtype=torch.float32,
    )


if __name__ == "__main__":
    main()
