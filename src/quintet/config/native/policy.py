"""Policy model."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from quintet.config.capabilities import Capability, Requires
from quintet.config.native.section import Count, Section, Texts


class LoraConfig(Section):
    """Low-rank adapters (LoRA); base weights stay frozen."""

    rank: PositiveInt = 32
    """Rank of the adapters."""
    alpha: PositiveFloat = 16.0
    """Adapters are scaled by alpha / rank."""
    target_modules: Texts = ("all-linear",)
    """Names of the adapted layers; `all-linear` adapts every linear layer but the head."""
    path: str | None = None
    """Directory of initial adapters; null initializes new ones."""


class VisionConfig(Section):
    """Images and vision encoder of a vision-language policy."""

    ranges = (("min_pixels", "max_pixels"),)

    freeze: bool = False
    """Do not train the vision encoder."""
    min_pixels: PositiveInt | None = None
    """Smaller images are enlarged to this number of pixels; null uses that of the model's image processor."""
    max_pixels: PositiveInt | None = None
    """Larger images are reduced to this number of pixels, which limits the tokens of an image; null uses that of the
    model's image processor."""


class VlaConfig(Section):
    """Heads and inputs of a vision-language-action policy."""

    action_dim: PositiveInt = 7
    """Dimension of an action."""
    action_chunk: PositiveInt = 8
    """Actions per forward pass."""
    use_proprioception: bool = False
    """Use the state of the robot as input."""
    normalization_key: str | None = None
    """Data set whose statistics denormalize actions."""
    policy_setup: str | None = None
    """Robot and controller of the actions, such as `widowx_bridge`."""
    value_level: Literal["chunk", "action"] = "chunk"
    """One value per chunk, or per action."""
    images: PositiveInt = 1
    """Camera images per observation."""
    image_size: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)] = (224, 224)
    """Height and width of the input image, pixels."""
    center_crop: bool = False
    """Crop the center of images, as in training with augmentation."""
    vocabulary: PositiveInt | None = None
    """Vocabulary of the language model; null uses that of the model."""
    extra_vocabulary: Count = 0
    """Tokens added to the tokenizer."""
    hidden_size: PositiveInt | None = None
    """Hidden size of the language model; null uses that of the model."""
    qkv_bias: bool = False
    """Use biases in attention projections."""
    linear_bias: bool = False
    """Use biases in the other linear layers."""


class PolicyConfig(Section):
    """Policy model."""

    preset: str | None = "grid-1m"
    """Small model with random weights that is created for the run. Exclusive with `path`, which replaces the
    default."""
    path: str | None = None
    """Hugging Face model directory. Exclusive with `preset`."""
    kind: Annotated[str | None, Requires(Capability.EMBODIED, ("qwen2.5", "qwen3"))] = None
    """Kind of model if its directory does not state it: `qwen2.5_vl`, `openvla_oft`, `openpi`."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Type of weights in the engine and of matrix products in training; the optimizer always keeps float32 weights.
    `auto` takes the type in the model's configuration."""
    trust_remote_code: bool = False
    """Run Python code from the model directory."""
    tokenizer: str | None = None
    """Directory of the tokenizer; null uses the model directory."""
    fast_tokenizer: bool = True
    """Use the Rust tokenizer, not the Python one, if both exist; transformers 5 has one of each."""
    trust_tokenizer_code: bool = False
    """Run Python code from the tokenizer directory."""
    overrides: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Values that override the model's `config.json`."""
    attention: str | None = None
    """Attention of learners: `eager`, plain matrix products that materialize all scores; `sdpa`, chosen by torch;
    `flash_attention_2`, torch's flash kernels, which need CUDA. null uses the fastest available. Engines have their
    own key."""
    low_memory_loading: bool = True
    """Load weights one by one. Has no effect: this is always done."""
    freeze_router: bool = False
    """Freeze the router of a mixture of experts."""
    lora: LoraConfig | None = None
    """LoRA; null trains all weights."""
    vision: VisionConfig = VisionConfig()
    """Vision-language policies: images and vision encoder."""
    vla: Annotated[VlaConfig | None, Requires(Capability.EMBODIED)] = None
    """Vision-language-action heads; null for a text policy."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.path is None and self.preset is None:
            yield "neither `path` nor `preset` names a model", "path=DIRECTORY", "preset=grid-1m"
        elif self.path is not None and self.preset is not None:
            yield "`path` and `preset` exclude each other", "preset=null", "path=null"
