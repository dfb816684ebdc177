"""Sizes of a model from its `config.json`: parameters, and the dimensions that memory estimates need.

Supported are decoders like Llama: Llama, Mistral, Qwen 2 and 3, Gemma, mixtures of experts of that kind, DeepSeek's
latent attention, and the language model of a vision-language model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quintet.config.model_locations.locations import UnreadableConfigError
from quintet.config.plan.kv_blocks import attention_layers
from quintet.config.plan.vision_encoder import VisionEncoderShape, read_vision_encoder


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts of a layer."""

    count: int
    mlp: int
    """Width of one expert."""
    shared_mlp: int = 0
    """Width of the shared expert; 0 for none."""
    shared_gate: bool = False
    """Whether a gate weights the shared expert."""
    router_bias: bool = False
    active: int = 1
    """Experts per token."""
    dense_layers: int = 0
    """Layers with a plain MLP instead."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): keys and values from one compressed vector."""

    query_rank: int | None
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int | None = None
    """Maximum positions, tokens."""
    tied: bool = True
    """Whether embedding and head share one matrix."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False
    """Whether queries and keys are normalised per head."""
    norms: int = 2
    """Norms per layer."""
    recurrent_layers: int = 0
    """Layers without keys and values."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    vision: int = 0
    """Parameters of the vision encoder: exact with `encoder`, otherwise accurate to one per cent."""
    encoder: VisionEncoderShape | None = None
    """Vision encoder, None if there is none or its architecture is unknown."""
    dtype: str = "float32"
    """Type of the stored weights."""
    family: str = "llama"
    known: bool = True
    """False if the family is unknown and was counted as Llama."""

    @property
    def parameters(self) -> int:
        return self.body + self.head

    @property
    def body(self) -> int:
        """Parameters without the head; a critic has these and a value head."""
        dense = self.experts.dense_layers if self.experts else self.layers
        sparse = (self.layers - dense) * self._mixture
        attention = self.layers * (self.attention + self.norms * self.hidden)
        return self.embedding + attention + dense * self.feed_forward + sparse + self.hidden + self.vision

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def head(self) -> int:
        return 0 if self.tied else self.embedding

    @property
    def routed(self) -> int:
        """Parameters of all routed experts."""
        experts = self.experts
        return (self.layers - experts.dense_layers) * experts.count * 3 * self.hidden * experts.mlp if experts else 0

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        return self.attention + self.norms * self.hidden + max(self._mixture, 0 if self.experts else self.feed_forward)

    @property
    def attention(self) -> int:
        """Attention parameters of one layer."""
        biases = (self.heads + 2 * self.kv_heads) * self.head_dim * self.qkv_bias + self.hidden * self.output_bias
        norms = 2 * self.head_dim * self.head_norm
        if self.latent:
            norms += (self.latent.query_rank or 0) + self.latent.rank
        return sum(a * b for a, b in self.attention_linears.values()) + biases + norms

    @property
    def attention_linears(self) -> Mapping[str, tuple[int, int]]:
        """Input and output widths of the linear layers of attention, by name."""
        if self.latent:
            return _latent_linears(self.hidden, self.heads, self.latent)
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
        }

    @property
    def mlp_linears(self) -> Mapping[str, tuple[int, int]]:
        """Input and output widths of the linear layers of an MLP without experts, by name."""
        wide = (self.hidden, self.mlp)
        return {"gate_proj": wide, "up_proj": wide, "down_proj": (self.mlp, self.hidden)}

    @property
    def feed_forward(self) -> int:
        """Parameters of one MLP without experts."""
        return 3 * self.hidden * self.mlp + (2 * self.mlp + self.hidden) * self.mlp_bias

    @property
    def _mixture(self) -> int:
        """Parameters of the experts of one layer, their router and the shared expert."""
        if self.experts is None:
            return 0
        e = self.experts
        shared = 3 * self.hidden * e.shared_mlp + self.hidden * e.shared_gate
        return e.count * 3 * self.hidden * e.mlp + e.count * (self.hidden + e.router_bias) + shared

    @property
    def active_mlp(self) -> int:
        """MLP width that one token passes through in a layer."""
        e = self.experts
        return max(self.mlp * (e.dense_layers > 0), e.active * e.mlp + e.shared_mlp) if e else self.mlp

    def cache_numbers(self, tensor: int = 1) -> int:
        """Return how many numbers the KV cache of one token has on one device, over all layers.

        Key-value heads are split over `tensor` devices, at least one on each; a latent vector is replicated.
        """
        if self.latent:
            return self.layers * (self.latent.rank + self.latent.rope_dim)
        return 2 * (self.layers - self.recurrent_layers) * max(1, self.kv_heads // tensor) * self.head_dim


def _latent_linears(hidden: int, heads: int, latent: LatentAttention) -> Mapping[str, tuple[int, int]]:
    query = heads * (latent.nope_dim + latent.rope_dim)
    linears = {
        "kv_a_proj_with_mqa": (hidden, latent.rank + latent.rope_dim),
        "kv_b_proj": (latent.rank, heads * (latent.nope_dim + latent.value_dim)),
        "o_proj": (heads * latent.value_dim, hidden),
    }
    if latent.query_rank is None:
        return {"q_proj": (hidden, query), **linears}
    return {"q_a_proj": (hidden, latent.query_rank), "q_b_proj": (latent.query_rank, query), **linears}


GRID_VL_ENCODER = VisionEncoderShape(*("qwen2_5_vl", 2, 64, 128, 4, 128), patch=8, min_pixels=16**2, max_pixels=256**2)
PRESET_SHAPES: Mapping[str, ModelShape] = {
    "grid-1m": ModelShape(4, 128, 384, 8, 2, 16, 640, 2048, qkv_bias=True, family="qwen2"),
    "grid-3m": ModelShape(4, 256, 704, 8, 4, 32, 640, 4096, qkv_bias=True, family="qwen2"),
    "grid-moe": ModelShape(
        *(4, 128, 128, 8, 2, 16, 640, 2048),
        head_norm=True,
        experts=Experts(8, 128, active=2),
        family="qwen3_moe",
    ),
    "grid-vl": ModelShape(
        *(4, 128, 384, 8, 2, 16, 640, 2048),
        qkv_bias=True,
        vision=GRID_VL_ENCODER.parameters,
        encoder=GRID_VL_ENCODER,
        family="qwen2_5_vl",
    ),
    "numbers-1m": ModelShape(4, 128, 384, 4, 4, 32, 512, 2048, qkv_bias=True, family="qwen2"),
}
"""Shapes of the preset policies; the actual vocabulary may be slightly smaller."""
PRESET_CONTEXTS: Mapping[str, int] = {name: shape.context or 0 for name, shape in PRESET_SHAPES.items()}
"""Context windows of the preset policies, tokens."""

Config = Mapping[str, Any]
LLAMA = ModelShape(0, 0, 0, 0, 0, 0, 0, tied=False)
_QWEN2 = replace(LLAMA, qkv_bias=True)
_QWEN3 = replace(LLAMA, head_norm=True)
_GEMMA = replace(LLAMA, tied=True)
OPENVLA_VISION = 303_227_904 + 412_442_352 + 71_393_792
"""Parameters of OpenVLA's vision: DINOv2-L with registers, SigLIP-So400m without its pooling head, and the projector
from both (2176) over 8704 and 4096 to 4096."""
OPENVLA = ModelShape(32, 4096, 11008, 32, 32, 128, 32064, 2048, tied=False, vision=OPENVLA_VISION, family="openvla")
"""OpenVLA and OpenVLA-OFT: Llama 2 of 7 billion parameters with 64 more tokens, and two vision encoders. Their
`config.json` states no sizes of the language model."""
FAMILIES: Mapping[str, ModelShape] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "phi3", "deepseek_v2", "deepseek_v3"), LLAMA),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), _QWEN2),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text"), _QWEN3),
    "gemma": _GEMMA,
    "gemma2": replace(_GEMMA, norms=4),
    **dict.fromkeys(("gemma3", "gemma3_text"), replace(_GEMMA, norms=4, head_norm=True)),
}
"""Architecture of each family that `config.json` does not state."""
FAMILY_DEFAULTS: Mapping[str, Config] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208},
}
"""Values of keys that a family's files omit."""


def read_shape(config: Config) -> ModelShape:
    """Return the shape that a `config.json` describes.

    Raises:
        UnreadableConfigError: a size is missing or invalid.
    """
    if config.get("model_type") == "openvla" and "hidden_size" not in config.get("text_config", {}):
        return replace(OPENVLA, dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    text = next((config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)), config)
    family = str(text.get("model_type") or config.get("model_type"))
    merged = {**FAMILY_DEFAULTS.get(family, {}), **config, **text}
    heads, hidden = _number(merged, "num_attention_heads"), _number(merged, "hidden_size")
    base, encoder = FAMILIES.get(family, LLAMA), _encoder(config, hidden)
    bias, layers = merged.get("attention_bias") is True, _number(merged, "num_hidden_layers")
    return replace(
        base,
        layers=layers,
        hidden=hidden,
        mlp=_number(merged, "intermediate_size"),
        heads=heads,
        kv_heads=_number(merged, "num_key_value_heads", heads),
        head_dim=_number(merged, "head_dim", hidden // heads),
        vocabulary=_number(merged, "vocab_size"),
        context=_number(merged, "max_position_embeddings", 0) or None,
        tied=bool(merged.get("tie_word_embeddings", base.tied)),
        qkv_bias=bias or base.qkv_bias,
        output_bias=bias,
        mlp_bias=merged.get("mlp_bias") is True,
        experts=_experts(merged, family),
        latent=_latent(merged) if "kv_lora_rank" in merged else None,
        recurrent_layers=layers - len(attention_layers(merged.get("layer_types"), layers)),
        vision=encoder.parameters if encoder else _vision(config),
        encoder=encoder,
        dtype=str(merged.get("dtype") or merged.get("torch_dtype") or "float32"),
        family=family,
        known=family in FAMILIES,
    )


def _number(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
        raise UnreadableConfigError(f"{key} is missing" if value is None else f"{key} = {value!r} is not a size")
    if value == 0 and default is None:
        raise UnreadableConfigError(f"{key} is 0")
    return value


def _experts(config: Config, family: str) -> Experts | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((_number(config, name) for name in names if config.get(name)), 0)
    if not count:
        return None
    width = _number(config, "moe_intermediate_size", _number(config, "intermediate_size"))
    shared = _number(config, "n_shared_experts", 0) * width
    return Experts(
        count,
        width,
        shared_mlp=shared or _number(config, "shared_expert_intermediate_size", 0),
        shared_gate=family == "qwen2_moe",
        router_bias=family == "deepseek_v3",
        active=_number(config, "num_experts_per_tok", 1),
        dense_layers=_dense_layers(config),
    )


def _dense_layers(config: Config) -> int:
    """Count the layers without experts: the first ones, those listed, and those between sparse ones."""
    first, every = _number(config, "first_k_dense_replace", 0), _number(config, "decoder_sparse_step", 1)
    listed = config.get("mlp_only_layers") or ()
    layers = range(min(_number(config, "num_hidden_layers"), 10**5))
    return sum(layer < first or layer in listed or (layer + 1) % max(every, 1) != 0 for layer in layers)


def _latent(config: Config) -> LatentAttention:
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    rank, rope, nope, out = (_number(config, name) for name in names)
    return LatentAttention(_number(config, "q_lora_rank", 0) or None, rank, rope, nope, out)


def _encoder(config: Config, hidden: int) -> VisionEncoderShape | None:
    try:
        return read_vision_encoder(config, hidden)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UnreadableConfigError(f"vision_config has an invalid size: {error}") from error


def _vision(config: Config) -> int:
    """Return the parameters of a vision encoder: attention and MLP of its layers, patch embedding and projector,
    without biases and norms."""
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        return 0
    family = str(config.get("model_type"))
    width = _number(vision, "embed_dim" if "embed_dim" in vision else "hidden_size", 1152)
    depth = _number(vision, "depth", _number(vision, "num_hidden_layers", 27))
    mlp = _number(vision, "intermediate_size", 4 * width)
    merged = 4 * width if "spatial_merge_size" in vision or family.startswith("qwen") else width
    out = _number(vision, "out_hidden_size", _number(config, "hidden_size", width))
    layers = depth * (4 * width * width + (3 if family == "qwen2_5_vl" else 2) * width * mlp)
    return layers + 3 * 2 * 14 * 14 * width + merged * (merged + out)
