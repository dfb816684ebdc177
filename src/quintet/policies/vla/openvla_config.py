"""Configuration of OpenVLA policies: `config.json` of published models, with the settings of reinforcement learning."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from quintet.policies.vla.vision_tower import TIMM_SHAPES, TowerShape

PROMPT = "In: What action should the robot take to {instruction}?\nOut: "
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)


class OpenVlaConfig(PreTrainedConfig):  # type: ignore[misc]
    """Settings of an OpenVLA policy. Names are those of published models and of RLinf."""

    model_type = "openvla"
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012 - the type is transformers'

    text_config: dict[str, Any] | PreTrainedConfig | None = None
    """Language model."""
    timm_model_ids: list[str] | None = None
    """Vision towers by timm's name; their features are concatenated."""
    vision_towers: list[dict[str, Any]] | None = None
    """Sizes of vision towers, fields of `TowerShape`; null follows from `timm_model_ids`."""
    image_means: list[list[float]] | None = None
    """Means of colours, 0 to 1, by tower."""
    image_stds: list[list[float]] | None = None
    """Standard deviations of colours by tower."""
    image_resize_strategy: str = "resize-naive"
    pad_to_multiple_of: int = 64
    """Rows of the vocabulary after the last token."""
    n_action_bins: int = 256
    """Bins of each action dimension. Their tokens are the last of the vocabulary."""
    norm_stats: dict[str, Any] | None = None
    """Statistics of actions and states by data set."""
    unnorm_key: str | None = None
    """Data set whose statistics denormalize actions."""
    normalization_bounds: str = "quantiles"
    """Bounds of normalized actions: `quantiles` q01 and q99, or the `range` from min to max."""
    action_dim: int = 7
    num_action_chunks: int = 1
    num_images_in_input: int = 1
    use_proprio: bool = False
    proprio_dim: int = 8
    max_prompt_length: int = 50
    """Tokens of a prompt, to which shorter ones are padded."""
    prompt: str = PROMPT
    prompt_end: str = "▁"
    """Token that ends every prompt; empty for none."""
    use_film: bool = False
    """Scale and shift image features depending on the instruction."""
    gripper: str | None = None
    """Values of the robot's gripper, see `robot_actions.py`; null for those of the data set."""
    robot_dimensions: list[int] | None = None
    """Dimensions of actions that the robot has; null for all."""
    center_crop: bool = False
    action_head: str = "tokens"
    """`tokens`, bins of the vocabulary, or `l1`, the regression of OpenVLA-OFT."""
    learned_slots: bool = False
    """Learn an embedding of each action slot. The slots of OpenVLA-OFT are zero and differ in their position."""
    add_value_head: bool = False
    value_type: str = "chunk_level"
    """`chunk_level`, one value, or `action_level`, one for each action."""
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.text_config, dict):
            self.text_config = LlamaConfig(**{**self.text_config, "model_type": "llama"})
        elif self.text_config is None:
            self.text_config = LlamaConfig(vocab_size=32064)
        if self.timm_model_ids is None and self.vision_towers is None:
            self.timm_model_ids = list(TIMM_SHAPES)
        kwargs.pop("auto_map", None)
        count = len(self.towers)
        self.image_means = self.image_means or [list(mean) for mean in (IMAGENET_MEAN, HALF)[2 - count :]]
        self.image_stds = self.image_stds or [list(std) for std in (IMAGENET_STD, HALF)[2 - count :]]
        super().__post_init__(**kwargs)

    @property
    def towers(self) -> tuple[TowerShape, ...]:
        """Shapes of the vision towers.

        Raises:
            KeyError: the name of a tower is unknown.
        """
        if self.vision_towers is not None:
            return tuple(TowerShape(**sizes) for sizes in self.vision_towers)
        return tuple(TIMM_SHAPES[name] for name in self.timm_model_ids or ())

    @property
    def language_size(self) -> int:
        """Hidden size of the language model."""
        return int(self.get_text_config().hidden_size)

    @property
    def num_slots(self) -> int:
        """Action dimensions of a chunk."""
        return self.action_dim * self.num_action_chunks

    @property
    def num_values(self) -> int:
        """Values per chunk."""
        if not self.add_value_head:
            return 0
        return 1 if self.value_type == "chunk_level" else self.num_action_chunks

    @property
    def first_action_token(self) -> int:
        """Token of the first of the `n_action_bins` bins."""
        return int(self.get_text_config().vocab_size) - self.pad_to_multiple_of - self.n_action_bins
