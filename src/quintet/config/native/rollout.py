"""How the policy plays, and what its engine may use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from quintet.config.capability import Capability, Waits
from quintet.config.native.section import Count, NonNegative, Section
from quintet.config.native.worlds import SimulatorConfig

__all__ = ["EngineConfig", "RolloutConfig", "SamplingConfig", "ValidationConfig"]

Thoughts = Literal[
    "grounding",
    "worldmodeling",
    "grounding_worldmodeling",
    "grounding_structured",
    "worldmodeling_structured",
    "grounding_worldmodeling_structured",
    "grounding_symbolic",
    "worldmodeling_symbolic",
    "grounding_worldmodeling_symbolic",
]
Ratio = Annotated[float, Field(gt=0.0, le=1.0)]


class EngineConfig(Section):
    """What the generation engine may use of its machine, and options of vLLM and SGLang by their own names."""

    memory_share: Ratio | None = None
    """Share of a device's memory for weights and KV cache; fewer requests run side by side where they don't fit.
    null sets no limit."""
    tensor_parallel: Annotated[PositiveInt, Waits(Capability.ENGINES)] = 1
    """Devices among which each layer of one engine is split."""
    pipeline_parallel: Annotated[PositiveInt, Waits(Capability.ENGINES)] = 1
    """Groups of devices among which the layers of one engine are shared out."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16", "auto"] | None, Waits(Capability.ENGINES)] = None
    """Type of the engine's weights; null takes `policy.dtype`, `auto` the one that the model's own configuration
    names."""
    eager: Annotated[bool, Waits(Capability.ENGINES, (True,))] = True
    """No CUDA graphs are captured: less memory, slower decoding."""
    cuda_graph_max_batch: Annotated[PositiveInt | None, Waits(Capability.ENGINES)] = None
    """Largest batch for which a CUDA graph is captured."""
    torch_compile: Annotated[bool, Waits(Capability.ENGINES)] = False
    """The engine's model is compiled."""
    prompts_per_device: Annotated[PositiveInt | None, Waits(Capability.ENGINES)] = None
    """Prompts that each device answers at a time; null shares those of a step out evenly."""
    torch_compile_max_batch: Annotated[PositiveInt | None, Waits(Capability.ENGINES)] = None
    """Largest batch for which it is."""
    sleep_between_steps: Annotated[bool, Waits(Capability.ENGINES)] = False
    """The KV cache is given back while the policy learns."""
    offload: Annotated[bool, Waits(Capability.MEMORY)] = False
    """The engine's weights move to the CPU while the policy learns."""
    load_format: Annotated[str | None, Waits(Capability.ENGINES)] = None
    """How the engine's first weights come: `auto`, `safetensors`, `dummy`, …"""
    max_batched_tokens: Annotated[PositiveInt | None, Waits(Capability.ENGINES)] = None
    """Tokens of one forward pass of the engine."""
    max_model_tokens: Annotated[PositiveInt | None, Waits(Capability.ENGINES)] = None
    """Context that the engine makes room for; null takes prompt and reply."""
    chunked_prefill: Annotated[bool | None, Waits(Capability.ENGINES)] = None
    """Long prompts are read in pieces between decoding steps."""
    block_size: Annotated[PositiveInt | None, Waits(Capability.ENGINES)] = None
    """Tokens of one block of the KV cache."""
    swap_space_gib: Annotated[PositiveInt | None, Waits(Capability.ENGINES)] = None
    """CPU memory for blocks that are set aside, GiB."""
    attention_backend: Annotated[str | None, Waits(Capability.ENGINES)] = None
    """Attention kernels, as the engine calls them: `FLASH_ATTN`, `flashinfer`, `triton`."""
    image_cache: Annotated[bool, Waits(Capability.ENGINES, (True,))] = True
    """Pictures that were prepared once are kept."""
    log_statistics: Annotated[bool, Waits(Capability.ENGINES)] = False
    """The engine logs its own load."""
    log_every_steps: Annotated[PositiveInt | None, Waits(Capability.ENGINES)] = None
    """Decoding steps between two lines of that log."""
    detokenize: Annotated[bool, Waits(Capability.ENGINES)] = False
    """The engine turns replies into text itself."""
    print_replies: Annotated[bool, Waits(Capability.ENGINES)] = False
    """Replies are written to the log."""
    validate_weights: Annotated[bool, Waits(Capability.ENGINES)] = False
    """Engine and learner are compared, weight by weight, before the first step."""
    validate_weights_dir: Annotated[str | None, Waits(Capability.ENGINES)] = None
    """Where both are stored for it; null stores nothing."""
    executor: Annotated[Literal["mp", "ray"], Waits(Capability.CLUSTER)] = "mp"
    """Who starts the processes of an engine on several devices."""


class SamplingConfig(Section):
    """How replies are drawn in validation."""

    do_sample: bool = False
    """Replies are drawn; without it the likeliest token is taken each time."""
    temperature: NonNegative = 0.0
    """Divides the logits; 0 is greedy."""
    top_p: Ratio = 1.0
    """Sample from the likeliest tokens that together reach this probability."""
    top_k: Count = 0
    """0 keeps the whole vocabulary."""
    samples: PositiveInt = 1
    """Games from each held-out start."""


class RolloutConfig(Section):
    """How the policy plays."""

    engine: Annotated[str, Waits(Capability.ENGINES, lacks=("vllm", "sglang", "trtllm"))] = "hf"
    """Generation engine."""
    engine_options: EngineConfig = EngineConfig()
    """What the engine may use."""
    max_turns: PositiveInt = 8
    """Replies of the policy in one game."""
    window_size: PositiveInt | None = 1
    """Observations in the context, the current one included; null keeps the whole history."""
    max_actions_per_turn: PositiveInt = 1
    """Actions executed from one answer; the rest is dropped."""
    action_separator: Annotated[str, Field(min_length=1)] = "||"
    """Between the actions of one answer."""
    think: bool = True
    """The policy writes `<think>…</think>` before `<answer>…</answer>`."""
    thoughts: Annotated[Thoughts | None, Waits(Capability.WORLDS)] = None
    """What thoughts must hold: what is seen, what will be seen, or both, in words, in JSON or in symbols. null
    leaves them free."""
    binary_reward: bool = False
    """A game's reward is 1 for success and 0 otherwise, in place of the world's own and of penalties."""
    format_penalty: float = -0.1
    """Added to the reward of a turn whose text can't be parsed or names no legal action."""
    format_reward: Annotated[NonNegative, Waits(Capability.WORLDS)] = 0.0
    """Added to the reward of every other turn."""
    max_prompt_tokens: PositiveInt = 512
    """A longer context ends the game."""
    max_start_tokens: PositiveInt | None = None
    """Tokens of a game's first prompt; of a longer one the end is kept. null cuts nothing."""
    max_observation_tokens: PositiveInt | None = None
    """Tokens of one observation; a longer one loses its end. null cuts nothing."""
    max_response_tokens: PositiveInt = 24
    """Tokens of one reply."""
    min_response_tokens: Annotated[Count, Waits(Capability.SAMPLING)] = 0
    """Tokens before which a reply can't end."""
    do_sample: Annotated[bool, Waits(Capability.SAMPLING)] = True
    """Replies are drawn; without it the likeliest token is taken each time."""
    temperature: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    """Divides the logits while sampling and while learning."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the likeliest tokens that together reach this probability."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 keeps the whole vocabulary."""
    repetition_penalty: Annotated[PositiveFloat, Waits(Capability.SAMPLING)] = 1.0
    """Divides the logits of tokens that were there already."""
    ignore_end: Annotated[bool, Waits(Capability.SAMPLING)] = False
    """A reply goes on beyond the end-of-sequence token."""
    end_token: Annotated[Count | None, Waits(Capability.SAMPLING)] = None
    """Number of the token that ends a reply; null asks the tokenizer."""
    pad_token: Annotated[Count | None, Waits(Capability.ENGINES)] = None
    """Number of the token with which the engine fills up; null asks the tokenizer."""
    samples: Annotated[PositiveInt, Waits(Capability.SAMPLING)] = 1
    """Replies that are drawn for each prompt of a game."""
    max_concurrent: PositiveInt = 256
    """Requests the engine decodes side by side."""
    recompute_logprobs: bool = False
    """Log-probs before the update are the learner's own rather than the engine's."""


class ValidationConfig(Section):
    """Greedy games on maps that are in neither training nor demonstrations."""

    games: PositiveInt = 256
    """Held-out start states, one game each."""
    simulator: Annotated[SimulatorConfig | None, Waits(Capability.EMBODIED)] = None
    """How a simulated world is played in validation; null plays it as in training."""
    every_steps: Annotated[int, Field(ge=-1)] = 25
    """0 validates only before and after, -1 not even after."""
    before_training: bool = True
    """Validate before the first step, too."""
    only: bool = False
    """Validate the policy as it is, and learn nothing."""
    prompts_per_device: Annotated[PositiveInt | None, Waits(Capability.ENGINES)] = None
    """Held-out prompts that each device answers at a time; null shares them out evenly."""
    sampling: SamplingConfig = SamplingConfig()
    """How replies are drawn."""
