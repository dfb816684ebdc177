"""Policy model."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, SerializerFunctionWrapHandler, model_serializer

from quintet.config.capabilities import Capability, Requires
from quintet.config.native.section import AllowsCode, Count, Section, Texts

FURTHER_POLICIES = (
    *("openpi", "openpi_rlinf", "gr00t", "gr00t_n1d6", "gr00t_n1d7", "dexbotic_pi", "dexbotic_dm0", "starvla"),
    *("dreamzero", "fastwam", "lingbotvla", "abot_m0", "evo1", "molmoact2", "cma", "cnn_policy", "flow_policy"),
    *("resnet", "cfg_model", "value_model", "rlt_mlp_policy", "rlt_td3_mlp_policy"),
)
"""Policies of RLinf that this version does not have."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA); base weights stay frozen."""

    rank: PositiveInt = 32
    """Rank of the adapters."""
    alpha: PositiveFloat = 16.0
    """Adapters are scaled by alpha / rank."""
    target_modules: Texts = ("all-linear",)
    """Names of the adapted layers; `all-linear` adapts every linear layer but head, experts and routers."""
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
    """Data set whose statistics denormalize actions, also without its suffix `_no_noops`; null uses the only one."""
    normalization_bounds: Literal["quantiles", "range"] = "quantiles"
    """Statistics that -1 and 1 of normalized actions stand for: the `quantiles` q01 and q99, or the `range` from min to
    max."""
    action_head: Literal["tokens", "l1"] = "tokens"
    """Head of `openvla_oft`: `tokens`, a bin of each action dimension, or `l1`, the regression head of OpenVLA-OFT as
    the mean of a normal distribution."""
    state_dim: PositiveInt | None = None
    """Values in the observed state; null takes that of the simulator."""
    policy_setup: str | None = None
    """Robot that a published policy controls in ManiSkill: `widowx_bridge`, whose gripper has other values than that of
    the data set, or one with `panda` in its name."""
    value_level: Literal["chunk", "action"] = "chunk"
    """One value per chunk, or per action."""
    images: PositiveInt = 1
    """Camera images per observation."""
    image_size: Annotated[tuple[PositiveInt, PositiveInt], Field(strict=False)] = (224, 224)
    """Height and width of the input image, pixels. A preset takes any square; that of a stored policy is fixed."""
    center_crop: bool = False
    """Crop images to the central 90 % of their area, as OpenVLA-OFT does after training with random crops."""
    vocabulary: PositiveInt | None = None
    """Tokens of the language model including those of actions, which must be those of the stored policy; null does not
    check them."""
    extra_vocabulary: Count = 0
    """Tokens added to the tokenizer."""
    hidden_size: PositiveInt | None = None
    """Hidden size of the language model, or of an MLP. A preset takes any; that of a stored policy is fixed."""
    qkv_bias: bool = False
    """Use biases in attention projections."""
    linear_bias: bool = False
    """Use biases in the other linear layers."""

    @model_serializer(mode="wrap")
    def _only_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return what is set. Other fields are the policy's own, which a run that reads them must not replace."""
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set}


class PolicyConfig(Section):
    """Policy model."""

    preset: str | None = "grid-1m"
    """Small model with random weights that is created for the run; or a pretrained model of `quintet model list`, such
    as `smollm2-135m`, which is downloaded once. Exclusive with `path`, which replaces the default."""
    path: str | None = None
    """Hugging Face model directory; a `.gguf` file, which is converted once; the name of a model of the hub,
    `organisation/name` or `organisation/name@revision`, which is downloaded unless its cache has it or `HF_HUB_OFFLINE`
    is set; or a name of `quintet model list`. Exclusive with `preset`."""
    kind: Annotated[str | None, Requires(Capability.POLICIES, unsupported=FURTHER_POLICIES)] = None
    """Kind of model if its directory does not state it: `qwen2.5_vl`, `openvla_oft`, `mlp`."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Type of weights in the engine and of matrix products in training; the optimizer always keeps float32 weights.
    `auto` takes the type in the model's configuration."""
    trust_remote_code: AllowsCode = False
    """Run Python code from the model directory."""
    tokenizer: str | None = None
    """Directory of the tokenizer; null uses the model directory."""
    fast_tokenizer: bool = True
    """Use the Rust tokenizer. Has no effect: transformers 5 has one implementation of each tokenizer."""
    trust_tokenizer_code: AllowsCode = False
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
    vla: VlaConfig | None = None
    """Vision-language-action heads; null for a text policy."""

    @property
    def runs_tokenizer_code(self) -> bool:
        """Whether code from the directory of the tokenizer runs."""
        return self.trust_remote_code or self.trust_tokenizer_code

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.path is None and self.preset is None:
            yield "neither `path` nor `preset` names a model", "path=DIRECTORY", "preset=grid-1m"
        elif self.path is not None and self.preset is not None:
            yield "`path` and `preset` exclude each other", "preset=null", "path=null"
