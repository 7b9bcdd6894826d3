"""Model settings, read from and written as a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

Architecture = Literal["qwen3", "qwen3_moe", "llama"]
Json = Mapping[str, Any]


class ModelError(ValueError):
    """A model directory that cannot be used: the message names the file and the field or tensor."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of a decoder with grouped-query attention, rotary positions and SwiGLU, dense or of experts.

    Raises ModelError when the sizes contradict each other.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP; of one expert's in a mixture"""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_embeddings: bool
    qk_norm: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    num_experts: int = 0
    """0: a dense model"""
    experts_per_token: int = 0
    norm_topk_prob: bool = False
    """Scale the weights of a token's experts to a sum of one"""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "max_position_embeddings", "rope_theta", "rms_norm_eps"):
            if not getattr(self, name) > 0:
                raise ModelError(f"{name} = {getattr(self, name)!r}: must be positive")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}: "
                "each key/value head must serve the same number of query heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim = {self.head_dim}: rotary positions need an even number")
        if self.qk_norm != (self.architecture != "llama"):
            raise ModelError(f"qk_norm = {self.qk_norm}: qwen3 normalises queries and keys, llama does not")
        if (self.num_experts > 0) != (self.architecture == "qwen3_moe"):
            raise ModelError(f"num_experts = {self.num_experts}: qwen3_moe has experts, qwen3 and llama none")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ModelError(
                f"experts_per_token = {self.experts_per_token}: accepted are 1 to num_experts = {self.num_experts}"
            )
        special = {"bos_token_id": self.bos_token_id, "pad_token_id": self.pad_token_id}
        special |= {f"eos_token_ids[{i}]": token for i, token in enumerate(self.eos_token_ids)}
        for name, token in special.items():
            if token is not None and not 0 <= token < self.vocab_size:
                raise ModelError(f"{name} = {token}: outside the vocabulary, 0 to {self.vocab_size - 1}")

    @classmethod
    def from_hf(cls, config: Json, generation: Json | None = None) -> "ModelConfig":
        """Settings from a parsed `config.json`, and `generation_config.json` where there is one.

        Both spellings are read: `rope_theta`, or `rope_parameters` holding it. Fields that are absent get
        transformers' defaults for the architecture. The token ids of `generation` win, since that file is
        what transformers stops at. Raises ModelError for whatever the forward pass would not compute.
        """
        architecture = cast(Architecture, config.get("model_type"))
        if architecture not in get_args(Architecture):
            raise ModelError(
                f"model_type = {architecture!r}: accepted are {', '.join(get_args(Architecture))}"
            )
        _refuse_what_forward_ignores(config)

        def size(field: str, default: int | None = None) -> int:
            value = config.get(field)
            value = default if value is None else value
            if type(value) is not int:
                raise ModelError(f"{field} = {value!r}: an integer is required")
            return value

        qwen3, moe = architecture != "llama", architecture == "qwen3_moe"
        # transformers 4 and the published checkpoints say num_experts, transformers 5 num_local_experts.
        experts = "num_experts" if "num_experts" in config else "num_local_experts"
        heads, width = size("num_attention_heads"), size("hidden_size")
        if heads <= 0:
            raise ModelError(f"num_attention_heads = {heads}: must be positive")
        tokens = {k: v for k, v in (generation or {}).items() if v is not None}
        eos = tokens.get("eos_token_id", config.get("eos_token_id"))
        return cls(
            architecture=architecture,
            vocab_size=size("vocab_size"),
            hidden_size=width,
            intermediate_size=size("moe_intermediate_size" if moe else "intermediate_size"),
            num_layers=size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", 128 if qwen3 else width // heads),
            rope_theta=_rope_theta(config),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=qwen3,
            max_position_embeddings=size("max_position_embeddings", 32768 if qwen3 else 2048),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
            bos_token_id=tokens.get("bos_token_id", config.get("bos_token_id")),
            pad_token_id=tokens.get("pad_token_id", config.get("pad_token_id")),
            num_experts=size(experts) if moe else 0,
            experts_per_token=size("num_experts_per_tok") if moe else 0,
            norm_topk_prob=moe and bool(config.get("norm_topk_prob", False)),
        )

    def to_hf(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """A `config.json` for weights stored as `dtype`.

        Uses the older spellings `torch_dtype` and `rope_theta`: transformers 4 knows only those, and
        transformers 5 still converts both, so one file serves every reader.
        """
        architecture = {
            "qwen3": "Qwen3ForCausalLM",
            "qwen3_moe": "Qwen3MoeForCausalLM",
            "llama": "LlamaForCausalLM",
        }[self.architecture]
        config: dict[str, Any] = {
            "architectures": [architecture],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "torch_dtype": dtype,
        }
        if self.architecture == "llama":
            config["mlp_bias"] = False
        if self.num_experts:
            config |= {
                "moe_intermediate_size": self.intermediate_size,
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.experts_per_token,
                "norm_topk_prob": self.norm_topk_prob,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        return config | self.generation_to_hf()

    def generation_to_hf(self) -> dict[str, Any]:
        """The special tokens, as `generation_config.json` holds them."""
        eos = self.eos_token_ids
        return {
            "bos_token_id": self.bos_token_id,
            "eos_token_id": (eos[0] if len(eos) == 1 else list(eos)) if eos else None,
            "pad_token_id": self.pad_token_id,
        }


def _refuse_what_forward_ignores(config: Json) -> None:
    """A setting that changes the computation and that we do not implement must not pass in silence."""
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"hidden_act = {activation!r}: accepted is 'silu'")
    for field in ("attention_bias", "mlp_bias"):
        if config.get(field):
            raise ModelError(f"{field} = {config[field]!r}: accepted is false, projections have no bias")
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window", True):
        raise ModelError(f"sliding_window = {window!r} is in use: accepted is null, attention is full")
    if other := set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ModelError(f"layer_types has {sorted(other)}: accepted is 'full_attention'")
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise ModelError(
            "decoder_sparse_step, mlp_only_layers: accepted are experts in every layer (1 and [])"
        )
    if config.get("quantization_config") is not None:
        raise ModelError("quantization_config: accepted are unquantised weights (F32, F16 or BF16)")


def _rope_theta(config: Json) -> float:
    """The rotary base; raises for any rule of positions but the plain one."""
    for field in ("rope_scaling", "rope_parameters"):
        rope = config.get(field) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or any(isinstance(value, Mapping) for value in rope.values()):
            raise ModelError(f"{field} = {dict(rope)!r}: accepted is rope_type 'default' for all layers")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(f"{field}: partial_rotary_factor must be 1, the whole head rotates")
    top, inner = config.get("rope_theta"), (config.get("rope_parameters") or {}).get("rope_theta")
    if top is not None and inner is not None and top != inner:
        raise ModelError(f"rope_theta = {top!r} contradicts rope_parameters.rope_theta = {inner!r}")
    return float(next((theta for theta in (inner, top) if theta is not None), 10_000.0))
