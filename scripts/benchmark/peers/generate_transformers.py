"""Tokens a second of `transformers.generate` on the CPU: the peer of the engine benchmark.

    python generate_transformers.py MODEL PROMPTS.json [--new-tokens 64] [--dtypes float32 bfloat16]
                                    [--threads N] [--repeats 3]

Runs in an environment of its own (torch 2.13, transformers 5.24, safetensors); imports nothing of this
package. MODEL is a Hugging Face directory. PROMPTS.json holds a list of prompts, each a list of token ids;
all of them form one batch, padded on the left. Every response has exactly `--new-tokens` tokens, sampled at
temperature 1 from the full vocabulary. Per dtype, one call warms up and the best of `--repeats` counts; the
time is that of the whole `generate` call, prefill included. Standard output is one JSON object:

    {"model", "batch", "prompt_tokens", "new_tokens", "threads", "torch", "transformers",
     "runs": {dtype: {"seconds", "all_seconds", "tokens_per_second"}}}

with `prompt_tokens` the padded prompt length and `tokens_per_second` = batch * new_tokens / seconds.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    tokens, mask = left_padded(json.loads(arguments.prompts.read_text()))
    runs = {}
    for dtype in arguments.dtypes:
        seconds = timings(arguments.model, getattr(torch, dtype), tokens, mask, arguments)
        rate = len(tokens) * arguments.new_tokens / min(seconds)
        runs[dtype] = {"seconds": min(seconds), "all_seconds": seconds, "tokens_per_second": rate}
        print(f"{dtype}: {rate:,.0f} tokens/s", file=sys.stderr)
    report = {
        "model": arguments.model.name,
        "batch": len(tokens),
        "prompt_tokens": tokens.shape[1],
        "new_tokens": arguments.new_tokens,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "runs": runs,
    }
    print(json.dumps(report))


def left_padded(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    if not prompts or not all(prompts):
        sys.exit("generate_transformers: PROMPTS.json must hold a non-empty list of non-empty token id lists")
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return tokens, mask


def timings(
    path: Path, dtype: torch.dtype, tokens: torch.Tensor, mask: torch.Tensor, arguments: argparse.Namespace
) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
    # A configuration of our own, so that nothing the directory recommends (top-k, penalties) slips in.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=arguments.new_tokens,
        max_new_tokens=arguments.new_tokens,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=0,
        use_cache=True,
    )
    seconds = []
    with torch.inference_mode():
        for repeat in range(arguments.repeats + 1):
            torch.manual_seed(repeat)
            start = time.perf_counter()
            output = model.generate(tokens, attention_mask=mask)
            seconds.append(time.perf_counter() - start)
            if output.shape[1] - tokens.shape[1] != arguments.new_tokens:
                sys.exit(f"generate_transformers: {output.shape[1] - tokens.shape[1]} new tokens")
    return seconds[1:]


if __name__ == "__main__":
    main()
