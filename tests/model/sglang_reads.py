"""Which modules SGLang would run in NVFP4 by a checkpoint's description. Runs in SGLang's own environment.

Standard input: {"configs": descriptions, "modules": names as SGLang builds them, fused}. Standard output: one
line, for each description the list of those it quantises.
"""

import json
import sys

from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
from sglang.srt.layers.quantization.utils import is_layer_skipped

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def quantised(description: dict, modules: list[str]) -> list[str]:
    config = ModelOptFp4Config.from_config(description | {"packed_modules_mapping": FUSED})
    assert config.is_checkpoint_nvfp4_serialized
    assert config.group_size == 16
    # The rule for linear layers; a mixture's experts, one module, go by the second half alone.
    return [
        module
        for module in modules
        if not config.is_layer_excluded(module)
        and (module.endswith(".experts") or not is_layer_skipped(module, config.exclude_modules, FUSED))
    ]


asked = json.load(sys.stdin)
print(json.dumps([quantised(config, asked["modules"]) for config in asked["configs"]]))
