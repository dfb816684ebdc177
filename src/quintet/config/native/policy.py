"""The model that acts."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from quintet.config.capability import Capability, Waits
from quintet.config.native.section import Count, Section, Texts

__all__ = ["LoraConfig", "PolicyConfig", "VlaConfig"]


class LoraConfig(Section):
    """Low-rank adapters: the base weights stay as they are."""

    rank: PositiveInt = 32
    """Columns of the two small matrices beside each adapted one."""
    alpha: PositiveFloat = 16.0
    """The adapters' product is scaled by alpha / rank."""
    target_modules: Texts = ("all-linear",)
    """Names of the adapted layers; `all-linear` takes every linear layer but the head."""
    path: str | None = None
    """Adapters to start from; null begins with none."""


class VlaConfig(Section):
    """Heads and inputs of a vision-language-action policy."""

    action_dim: PositiveInt = 7
    """Numbers in one action."""
    action_chunk: PositiveInt = 8
    """Actions of one forward pass."""
    use_proprioception: bool = False
    """The robot's own state is an input."""
    normalization_key: str | None = None
    """Data set whose statistics turn the policy's outputs into actions."""
    policy_setup: str | None = None
    """Robot and controller that actions are meant for, such as `widowx_bridge`."""
    value_level: Literal["chunk", "action"] = "chunk"
    """One value for a chunk, or for each action."""
    images: PositiveInt = 1
    """Camera pictures in one observation."""
    image_size: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)] = (224, 224)
    """Pixels, height and width, as the policy sees them."""
    center_crop: bool = False
    """The middle of a picture is cut out, as in training with augmented pictures."""
    vocabulary: PositiveInt | None = None
    """Tokens of the language model; null asks the model."""
    extra_vocabulary: Count = 0
    """Tokens added behind the tokenizer's own."""
    hidden_size: PositiveInt | None = None
    """Width of the language model; null asks the model."""
    qkv_bias: bool = False
    """Biases in the attention's projections."""
    linear_bias: bool = False
    """Biases in the other linear layers."""


class PolicyConfig(Section):
    """The model that acts."""

    preset: str | None = "grid-1m"
    """A small model made on the spot. Exclusive with `path`."""
    path: str | None = None
    """A Hugging Face model directory. Exclusive with `preset`."""
    kind: Annotated[str | None, Waits(Capability.EMBODIED, ("qwen2.5", "qwen3"))] = None
    """What model it is, where its directory doesn't say: `qwen2.5_vl`, `openvla_oft`, `openpi`."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Type of the weights while generating and of matrix products while training; the optimizer
    always keeps float32 weights. `auto` takes the one that the model's own configuration names."""
    trust_remote_code: bool = False
    """Run code that lies in the model's directory."""
    tokenizer: str | None = None
    """A tokenizer's directory; null takes the model's own."""
    fast_tokenizer: bool = True
    """The tokenizer written in Rust rather than the one in Python, where there are both: transformers 5 has each of
    them once."""
    trust_tokenizer_code: bool = False
    """Run code that lies in the tokenizer's directory."""
    overrides: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Values put over those of the model's `config.json`."""
    attention: str | None = None
    """How learners compute attention: `eager`, plain matrix products, which hold every score at once; `sdpa`, torch's
    own choice; `flash_attention_2`, torch's kernels of that where masks allow them, which need CUDA. null takes the
    fastest there is. Engines have a key of their own."""
    low_memory_loading: bool = True
    """Weights are loaded one by one, never twice in memory. They are so without it, too."""
    freeze_router: bool = False
    """The router of a mixture of experts isn't trained."""
    lora: LoraConfig | None = None
    """null trains all weights."""
    vla: Annotated[VlaConfig | None, Waits(Capability.EMBODIED)] = None
    """null for a policy that answers in words."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.preset is None):
            raise ValueError("give either `preset` or `path`: set the other to null")
        return self
