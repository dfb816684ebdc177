"""How the policy plays, and what its engine may use."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from quintet.config.capability import Capability, Waits
from quintet.config.native.section import Count, NonNegative, Section, Share, Texts
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
    """What the generation engine may use of its machine. Which engine takes which of these is in `config/engines.py`:
    a run that sets one which its engine doesn't take is refused."""

    memory_share: Ratio | None = None
    """Share of a device's memory for weights and KV cache; fewer requests run side by side where they don't fit.
    null sets no limit."""
    tensor_parallel: PositiveInt = 1
    """Devices among which each layer of one engine is split."""
    pipeline_parallel: PositiveInt = 1
    """Groups of devices among which the layers of one engine are shared out."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] | None = None
    """Type of the engine's weights; null takes `policy.dtype`, `auto` the one that the model's own configuration
    names."""
    eager: bool = True
    """No CUDA graphs are captured: less memory, slower decoding. On a CPU there are none either way."""
    cuda_graph_max_batch: PositiveInt | None = None
    """Largest batch for which a CUDA graph is captured; larger ones run without. null leaves it to the engine."""
    torch_compile: bool = False
    """The engine's model is compiled."""
    prompts_per_device: PositiveInt | None = None
    """Prompts that each device answers at a time, with all of their samples; null answers as many as
    `rollout.max_concurrent` allows."""
    torch_compile_max_batch: PositiveInt | None = None
    """Largest batch for which it is compiled; null for all."""
    sleep_between_steps: bool = False
    """The KV cache is given back while the policy learns."""
    offload: bool = False
    """The engine's weights move to main memory while the policy learns, and its KV cache is given back. On a CPU they
    are there already; those that the embedded engine shares with the learner are the learner's to move."""
    load_format: str | None = None
    """How the engine's first weights come: `auto`, `safetensors`, `dummy`, …; the learner's replace them before the
    first reply. null leaves it to the engine."""
    max_batched_tokens: PositiveInt | None = None
    """Tokens of one forward pass of the engine; null leaves it to the engine."""
    max_model_tokens: PositiveInt | None = None
    """Longest prompt and reply together; null takes `rollout.max_prompt_tokens` and `rollout.max_response_tokens`. A
    reply that would go beyond is cut there. More than those two need isn't made room for."""
    chunked_prefill: bool | None = None
    """Long prompts are read in pieces between decoding steps; null leaves it to the engine."""
    block_size: PositiveInt | None = None
    """Tokens of one block of the KV cache; null leaves it to the engine."""
    swap_space_gib: PositiveInt | None = None
    """CPU memory for blocks that are set aside, GiB; null leaves it to the engine."""
    attention_backend: str | None = None
    """Attention kernels, as the engine calls them: `FLASH_ATTN`, `flashinfer`, `triton`; null leaves it to the
    engine."""
    image_cache: bool = True
    """Pictures that were prepared once are kept."""
    log_statistics: bool = False
    """The engine logs its own load."""
    log_every_steps: PositiveInt | None = None
    """Decoding steps between two lines of that log; null leaves it to the engine."""
    detokenize: bool = False
    """The engine turns replies into text itself. Worlds and judges see the text that the tokenizer gives either way."""
    print_replies: bool = False
    """Token ids and texts of all replies of a step are printed."""
    validate_weights: bool = False
    """Before the first step, engine and learner are compared: weight by weight where the engine can be asked for its
    weights, and by the log-probs of a few replies. Where they differ, the run ends."""
    validate_weights_dir: str | None = None
    """Where that comparison is stored; null stores nothing."""
    arguments: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Further arguments of the engine, by its own names: `{enable_prefix_caching: false}`. They win over the options
    above."""
    deterministic: bool = False
    """SGLang computes the same for a request whatever others are in the batch; slower."""
    server_url: str | None = None
    """An SGLang server that runs already, as `http://host:port`; null starts one."""
    server_python: str | None = None
    """Python of an environment that has SGLang, by which its server is started; null takes the one that runs this."""
    server_weights_dir: str | None = None
    """Directory that the run and an SGLang server on another machine share, for new weights; null hands them over in
    this machine's memory."""
    own_process: bool = False
    """vLLM runs in a process of its own: its threads and memory aren't the learner's, and its death costs only what it
    was writing. Without it vLLM decodes in this process."""
    executor: Annotated[Literal["mp", "ray"], Waits(Capability.CLUSTER)] = "mp"
    """Who starts the processes of an engine on several devices."""

    @model_validator(mode="after")
    def _something_to_store(self) -> Self:
        if self.validate_weights_dir is not None and not self.validate_weights:
            raise ValueError("`validate_weights_dir` needs validate_weights=true")
        return self


class SamplingConfig(Section):
    """How replies are drawn in validation; what ends one is as in training."""

    do_sample: bool = False
    """Replies are drawn; without it the likeliest token is taken each time."""
    temperature: NonNegative = 0.0
    """Divides the logits; 0 is greedy."""
    top_p: Ratio = 1.0
    """Sample from the likeliest tokens that together reach this probability."""
    top_k: Count = 0
    """0 keeps the whole vocabulary."""
    min_p: Share = 0.0
    """Tokens less likely than this share of the likeliest one's probability aren't drawn."""
    repetition_penalty: PositiveFloat | None = None
    """Divides the logits of tokens that were there already; null takes that of training."""
    samples: PositiveInt = 1
    """Games from each held-out start."""


class RolloutConfig(Section):
    """How the policy plays."""

    engine: Annotated[str, Waits(Capability.ENGINES, lacks=("trtllm",))] = "hf"
    """Generation engine: `hf` decodes any transformers model in this process; `vllm` and `sglang` are installed by
    themselves."""
    engine_options: EngineConfig = EngineConfig(arguments={})
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
    reply_form: Literal["whole", "anywhere", "answer"] = "whole"
    """`whole`: a reply is thoughts and answer and nothing else. `anywhere`: the first place counts where both stand one
    after the other. `answer`: the first answer counts, whatever stands around it."""
    fold_case: bool = True
    """Letter case of action words doesn't matter."""
    numbered_actions: bool = False
    """An action's number, counted from 1 in the world's own order, stands for its word: `2`, or `2 (Down)`."""
    unknown_actions: Literal["stop", "skip"] = "stop"
    """A word that is no action makes a reply invalid: it ends the reply's actions, or is skipped."""
    strip_special_tokens: bool = False
    """Special tokens that the policy wrote are taken out of a reply before it is read."""
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
    min_response_tokens: Count = 0
    """Tokens before which a reply can't end."""
    do_sample: bool = True
    """Replies are drawn; without it the likeliest token is taken each time, and the games of a group differ only where
    the world does."""
    temperature: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    """Divides the logits while sampling and while learning."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the likeliest tokens that together reach this probability."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 keeps the whole vocabulary."""
    min_p: Share = 0.0
    """Tokens less likely than this share of the likeliest one's probability aren't drawn."""
    repetition_penalty: PositiveFloat = 1.0
    """Divides positive logits of tokens that prompt or reply already hold, and multiplies negative ones."""
    ignore_end: bool = False
    """A reply goes on beyond the end-of-sequence token."""
    end_token: Count | None = None
    """Number of the token that ends a reply; null asks the tokenizer."""
    stop: Texts = ()
    """Texts that end a reply wherever they come up in it; they stay its last words."""
    pad_token: Count | None = None
    """Number of the token that fills up; must be one of the vocabulary. Nothing is filled up here."""
    max_concurrent: PositiveInt = 256
    """Requests the engine decodes side by side."""
    recompute_logprobs: bool = False
    """Log-probs before the update are the learner's own rather than the engine's."""
    async_ratio: NonNegative = 0.0
    """Games in flight beyond a step's own, in shares of a step's games: they go on while the policy learns, and the
    next step begins with them. 0 plays every step's games from start to end under the same weights."""
    partial: bool = False
    """Replies in the middle go on under new weights, and each token knows which wrote it; without it such games are
    played anew. Needs `async_ratio`."""
    max_staleness: Count | None = None
    """Weight updates that a game may have missed, at most, when it is learnt from; older ones are dropped and their
    groups played anew. null sets no bound. Needs `async_ratio`."""

    @model_validator(mode="after")
    def _in_flight(self) -> Self:
        if self.async_ratio == 0 and (self.partial or self.max_staleness is not None):
            key = "partial" if self.partial else "max_staleness"
            raise ValueError(f"`{key}` needs async_ratio > 0: otherwise no game outlasts its step")
        if self.async_ratio > 0 and self.engine_options.sleep_between_steps:
            raise ValueError("`engine_options.sleep_between_steps` can't be with async_ratio > 0: games are in flight")
        return self

    @model_validator(mode="after")
    def _their_own_logprobs(self) -> Self:
        if not self.do_sample and self.temperature != 1.0 and not self.recompute_logprobs:
            raise ValueError(
                "`do_sample` = false with a temperature other than 1: an engine's log-probs of the likeliest tokens "
                "aren't those that are learnt; set recompute_logprobs=true, or temperature=1"
            )
        if self.min_response_tokens > self.max_response_tokens:
            raise ValueError("`min_response_tokens` is more than max_response_tokens")
        if self.ignore_end and self.end_token is not None:
            raise ValueError("`end_token` has no effect with ignore_end=true: leave it out")
        return self


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
    prompts_per_device: PositiveInt | None = None
    """Held-out prompts that each device answers at a time, with all of their samples; null answers as many as
    `rollout.max_concurrent` allows."""
    sampling: SamplingConfig = SamplingConfig()
    """How replies are drawn."""
