"""Reading and writing `config.json`: both spellings, defaults, and what is refused."""

import dataclasses
from typing import Any

import pytest

from triage_jax.model.config import ModelConfig, ModelError

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}


def test_reads_the_published_qwen3_spelling():
    assert ModelConfig.from_hf(QWEN3) == ModelConfig(
        architecture="qwen3",
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_embeddings=True,
        qk_norm=True,
        max_position_embeddings=40_960,
        eos_token_ids=(151_645,),
        bos_token_id=151_643,
        pad_token_id=None,
    )


def test_both_rope_spellings_are_the_same_model():
    modern = {key: value for key, value in QWEN3.items() if not key.startswith("rope")}
    modern["rope_parameters"] = {"rope_theta": 1_000_000.0, "rope_type": "default"}
    assert ModelConfig.from_hf(modern) == ModelConfig.from_hf(QWEN3)


def test_absent_fields_get_the_defaults_of_the_architecture():
    config = ModelConfig.from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.qk_norm) == (8, 64, False)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_embeddings) == (10_000.0, 1e-6, False)
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((), None, None)


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 8], None, (7, 8)),
        (7, {"eos_token_id": [9, 7]}, (9, 7)),
        (7, {"eos_token_id": None}, (7,)),
        (7, {"pad_token_id": 3}, (7,)),
        (None, None, ()),
    ],
)
def test_generation_config_decides_where_to_stop(config_eos, generation, expected):
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": config_eos}, generation).eos_token_ids == expected


@pytest.mark.parametrize("eos", [(), (2,), (2, 5)])
@pytest.mark.parametrize("source", [QWEN3, LLAMA])
def test_written_config_reads_back(source, eos):
    config = dataclasses.replace(ModelConfig.from_hf(source), eos_token_ids=eos, pad_token_id=1)
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert (
        ModelConfig.from_hf(LLAMA | {"vocab_size": 151_936}, config.generation_to_hf()).eos_token_ids == eos
    )


MOE = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def test_a_mixture_is_read_and_written_in_the_published_spelling():
    config = ModelConfig.from_hf(QWEN3 | MOE)
    assert (config.num_experts, config.experts_per_token, config.intermediate_size) == (8, 2, 64)
    assert config.norm_topk_prob
    assert ModelConfig.from_hf(config.to_hf()) == config
    newer = {key: value for key, value in MOE.items() if key != "num_experts"} | {"num_local_experts": 8}
    assert ModelConfig.from_hf(QWEN3 | newer) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3"}, "model_type = 'gemma3': accepted are qwen3, qwen3_moe, llama"),
        ({"model_type": "qwen3_moe"}, "moe_intermediate_size = None: an integer is required"),
        (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step.*experts in every layer"),
        (MOE | {"mlp_only_layers": [0]}, "mlp_only_layers.*experts in every layer"),
        (MOE | {"num_experts_per_tok": 9}, "experts_per_token = 9: accepted are 1 to num_experts = 8"),
        ({"model_type": None}, "model_type = None"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.*yarn.*accepted.*default"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.*linear"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope_parameters.*llama3"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "rope_parameters.*all layers"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta = 1000000 contradicts"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "sliding_window = 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding_attention"),
        ({"attention_bias": True}, "attention_bias = True: accepted is false"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': accepted is 'silu'"),
        ({"quantization_config": {"quant_method": "modelopt"}}, "quantization_config"),
        ({"num_key_value_heads": 5}, "num_heads = 16 is not a multiple of num_kv_heads = 5"),
        ({"num_key_value_heads": 0}, "num_kv_heads = 0: must be positive"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"head_dim": 127}, "head_dim = 127"),
        ({"vocab_size": None}, "vocab_size = None: an integer is required"),
        ({"hidden_size": "1024"}, "hidden_size = '1024'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps = 0.0"),
        ({"eos_token_id": [151_936]}, "eos_token_ids\\[0\\] = 151936: outside the vocabulary"),
    ],
)
def test_what_the_forward_pass_would_not_compute_is_refused(change: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(QWEN3 | change)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"rope_scaling": {"rope_type": "default"}},
        {"layer_types": ["full_attention"] * 28},
        {"quantization_config": None},
    ],
)
def test_settings_that_change_nothing_are_accepted(change):
    assert ModelConfig.from_hf(QWEN3 | change) == ModelConfig.from_hf(QWEN3)


def test_query_norm_follows_the_architecture():
    with pytest.raises(ModelError, match="qk_norm = False"):
        dataclasses.replace(ModelConfig.from_hf(QWEN3), qk_norm=False)
