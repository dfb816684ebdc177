"""Rollouts: generation engine, sampling, parsing of responses, validation."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from quintet.config.capabilities import Capability, Requires
from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.interactions import InteractionsConfig
from quintet.config.native.section import Count, NonNegative, NotEmpty, PositiveShare, RunsCode, Section, Share, Texts
from quintet.config.native.state_reward import StateRewardConfig
from quintet.config.native.tool_calls import ToolCallsConfig

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
    "wm",
    "free_wm",
]


class EngineConfig(Section):
    """Options of the generation engine. `config/checks/engines.py` lists which engine supports which; an unsupported
    option is refused."""

    memory_share: PositiveShare | None = None
    """Share of device memory for weights and KV cache of an engine; requests that do not fit wait. null gives the KV
    cache of the embedded engine up to 0.3, and several vLLM or SGLang engines on a device equal shares."""
    tensor_parallel: PositiveInt = 1
    """Tensor-parallel size of one engine."""
    pipeline_parallel: PositiveInt = 1
    """Pipeline-parallel size of one engine."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] | None = None
    """Type of the engine's weights; null uses `policy.dtype`, `auto` the type in the model's configuration."""
    eager: bool = True
    """Do not capture CUDA graphs: less memory, slower decoding. Has no effect on a CPU."""
    cuda_graph_max_batch: PositiveInt | None = None
    """Maximum batch size with a CUDA graph; null leaves it to the engine."""
    torch_compile: bool = False
    """Compile the engine's model."""
    prompts_per_device: PositiveInt | None = None
    """Concurrent prompts per device, each with all its samples; null sets no limit
    besides `rollout.max_concurrent`."""
    torch_compile_max_batch: PositiveInt | None = None
    """Maximum batch size for the compiled model; null for all."""
    sleep_between_steps: bool = False
    """Free the KV cache during policy updates."""
    offload: bool = False
    """Offload the engine's weights to host memory and free its KV cache during policy updates. Has no effect on a CPU,
    or on weights that the embedded engine shares with the learner."""
    load_format: str | None = None
    """Format of the engine's initial weights: `auto`, `safetensors`, `dummy`, …; the learner's weights replace them
    before the first response. null leaves it to the engine."""
    max_batched_tokens: PositiveInt | None = None
    """Maximum tokens of one forward pass of the engine; null leaves it to the engine."""
    max_model_tokens: PositiveInt | None = None
    """Maximum tokens of prompt and response together; null uses the sum of `rollout.max_prompt_tokens` and
    `rollout.max_response_tokens`. Longer responses are truncated. Larger values have no effect."""
    chunked_prefill: bool | None = None
    """Prefill long prompts in chunks between decode steps; null leaves it to the engine."""
    block_size: PositiveInt | None = None
    """Tokens per block of the KV cache; null leaves it to the engine."""
    swap_space_gib: PositiveInt | None = None
    """CPU memory for blocks of preempted requests, GiB; null leaves it to the engine."""
    attention_backend: str | None = None
    """Attention kernels by the engine's names: `FLASH_ATTN`, `flashinfer`, `triton`; null leaves it to the engine."""
    image_cache: bool = True
    """Cache preprocessed images."""
    log_statistics: bool = False
    """Let the engine log its load."""
    log_every_steps: PositiveInt | None = None
    """Decode steps between two lines of that log; null leaves it to the engine."""
    detokenize: bool = False
    """Let the engine detokenize responses. Envs and scorers always get the text of the tokenizer."""
    print_responses: bool = False
    """Print token ids and text of all responses of a step."""
    validate_weights: bool = False
    """Compare engine and learner before the first step, by weights if the engine can return them, and by the log-probs
    of a few responses. A difference ends the run."""
    validate_weights_dir: str | None = None
    """Directory for the result of that comparison; null stores nothing."""
    arguments: Annotated[dict[str, Any], Field(default_factory=dict), RunsCode()]
    """Further arguments under the engine's names: `{enable_prefix_caching: false}`. They override the options above."""
    deterministic: bool = False
    """Batch-invariant computation in SGLang, and in the embedded engine of `quintet serve`: a response does not depend
    on the rest of the batch; slower. The embedded engine always computes so in training."""
    server_url: str | None = None
    """URL of a running SGLang server, `http://host:port`; null starts one."""
    server_python: Annotated[str | None, RunsCode()] = None
    """Python interpreter of an environment with SGLang, to start the server with; null uses the current one."""
    server_weights_dir: str | None = None
    """Directory shared with an SGLang server on another node, for weight sync; null uses shared memory of this node."""
    separate_process: bool = False
    """Run vLLM in a separate process with its own threads and memory; if it dies, only its running requests are lost.
    Otherwise vLLM runs in this process."""
    executor: Literal["mp", "ray"] = "mp"
    """What starts the processes of a vLLM engine on several devices: `mp` for processes of this machine, `ray` for
    actors of a Ray that vLLM starts or joins (`RAY_ADDRESS`). With `mp`, an engine on one device has none. `ray` needs
    GPUs, the package `ray`, and a run in one process."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.validate_weights_dir is not None and not self.validate_weights:
            yield (
                "`validate_weights_dir` needs `validate_weights`",
                "validate_weights=true",
                "validate_weights_dir=null",
            )


class SamplingConfig(Section):
    """Sampling in validation; stop conditions are those of training."""

    do_sample: bool = False
    """Sample; otherwise decode greedily."""
    temperature: NonNegative = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: PositiveShare = 1.0
    """Sample from the most likely tokens with this cumulative probability."""
    top_k: Count = 0
    """Sample from this number of most likely tokens; 0 keeps the whole vocabulary."""
    min_p: Share = 0.0
    """Do not sample tokens with a smaller share of the probability of the most likely token."""
    repetition_penalty: PositiveFloat | None = None
    """Divides positive logits of tokens that prompt or response already contain, and multiplies negative ones; null
    uses that of training."""
    samples: PositiveInt = 1
    """Episodes per held-out start state."""


class RolloutConfig(Section):
    """Rollouts."""

    ranges = (("min_response_tokens", "max_response_tokens"),)

    engine: Annotated[str, Requires(Capability.ENGINES, unsupported=("trtllm",))] = "hf"
    """Generation engine: `hf` decodes any transformers model in this process; `vllm` and `sglang` need their
    packages."""
    engine_options: EngineConfig = EngineConfig(arguments={})
    """Options of the engine."""
    max_turns: PositiveInt = 8
    """Maximum turns of an episode. A prompt has one response, or with `tool_calls` or `interactions` up to so many."""
    tool_calls: ToolCallsConfig | None = None
    """Tools that responses to prompts may call; null for none."""
    interactions: InteractionsConfig | None = None
    """Simulated users that reply to responses to prompts; null for none."""
    window_size: PositiveInt | None = 1
    """Observations in the context, including the current one; null keeps the whole history."""
    max_actions_per_turn: PositiveInt = 1
    """Maximum actions executed from one response; the rest is dropped."""
    action_separator: NotEmpty = "||"
    """Separator between the actions of one response."""
    think: bool = True
    """The policy writes `<think>…</think>` before `<answer>…</answer>`."""
    template_thinking: bool | None = None
    """Option `enable_thinking` of chat templates that have it, such as Qwen3's; null has the value of `think`."""
    response_format: Literal["whole", "strict", "anywhere", "answer"] = "whole"
    """Required form of a response. `whole`: thoughts and answer only. `strict`: the same with `thoughts`, too, which
    otherwise count wherever they are. `anywhere`: the first place with thoughts followed by an answer counts. `answer`:
    the first answer counts. An answer in a closed thought never does."""
    format_instruction: bool | None = None
    """The system message describes the form of responses and the actions, and so does the observation after an invalid
    response. null leaves it out where the env's system message or first observation has `<answer>`, and for policies
    whose vocabulary has it, as that of the presets. `thoughts` are always described."""
    ignore_case: bool = True
    """Ignore the case of action names."""
    numbered_actions: bool = False
    """Accept an action's number, counted from 1 in the order of the env, for its name: `2`, or `2 (Down)`."""
    unknown_actions: Literal["stop", "skip"] = "stop"
    """An unknown action makes a response invalid: `stop` also drops the actions after it, `skip` continues with
    them."""
    strip_special_tokens: bool = False
    """Remove special tokens from a response before it is parsed."""
    thoughts: Thoughts | None = None
    """Required content of thoughts: the observation, the prediction of the next one, or both, as text, JSON or symbols,
    each in its tags. The system message describes the form. Actions are executed wherever thoughts and answer are in a
    response, but it is only valid without anything else; with `response_format: anywhere` it is valid there. `wm` has
    observation, thoughts, answer and prediction one after the other, and `free_wm` any text between observation, answer
    and prediction. null allows any thoughts."""
    state_reward: StateRewardConfig | None = None
    """Reward for the descriptions of the state that `thoughts` demands; null gives none. Needs an env whose
    observations say where things are."""
    binary_reward: bool = False
    """Reward of an episode is 1 for success and 0 otherwise, in place of the env's rewards and of penalties."""
    format_penalty: float = -0.1
    """Added to the reward of a turn whose response cannot be parsed or contains no valid action."""
    format_reward: NonNegative = 0.0
    """Added to the reward of every other turn. Has no effect with `binary_reward`."""
    format_reward_for: Literal["valid", "executed"] = "valid"
    """Turns with `format_reward`: those with a `valid` response, or those of which an action was `executed`, even if
    another one is unknown. The others have `format_penalty`."""
    max_prompt_tokens: PositiveInt = 512
    """Maximum tokens of the context; a longer one ends the episode."""
    max_start_tokens: PositiveInt | None = None
    """Maximum tokens of the first prompt of an episode; a longer one is truncated from the left. null does not
    truncate."""
    max_observation_tokens: PositiveInt | None = None
    """Maximum tokens of an observation; a longer one is truncated from the right. null does not truncate."""
    max_response_tokens: PositiveInt = 24
    """Maximum tokens of a response; with `tool_calls` or `interactions` of all responses to a prompt and the replies
    between them."""
    truncation_ends_episode: bool = False
    """End an episode after a response that `max_response_tokens` or the context cut off, once its actions were
    executed."""
    min_response_tokens: Count = 0
    """Minimum tokens of a response."""
    do_sample: bool = True
    """Sample; otherwise decode greedily, and the episodes of a group only differ by randomness of the env."""
    temperature: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    """Temperature of sampling, and of log-probs in training."""
    top_p: PositiveShare = 1.0
    """Sample from the most likely tokens with this cumulative probability."""
    top_k: Count = 0
    """Sample from this number of most likely tokens; 0 keeps the whole vocabulary."""
    min_p: Share = 0.0
    """Do not sample tokens with a smaller share of the probability of the most likely token."""
    repetition_penalty: PositiveFloat = 1.0
    """Divides positive logits of tokens that prompt or response already contain, and multiplies negative ones."""
    ignore_end: bool = False
    """Continue after the end-of-sequence token."""
    end_token: Count | None = None
    """Id of the end-of-sequence token; null uses that of the tokenizer."""
    stop: Texts = ()
    """Stop strings; they remain at the end of the response."""
    pad_token: Count | None = None
    """Id of the padding token. Has no effect: batches are packed without padding."""
    max_concurrent: PositiveInt = 256
    """Maximum concurrent requests of the engine."""
    recompute_logprobs: bool = False
    """Use log-probs of the learner, not of the engine, as those of the behavior policy. `placement.logprobs` may give
    their computation devices of its own."""
    async_ratio: NonNegative = 0.0
    """Episodes in flight beyond those of a step, as a ratio of the episodes of a step: they continue during policy
    updates and belong to the next step. 0 runs all episodes of a step with the same weights."""
    partial: bool = False
    """Continue unfinished responses with new weights; every token records the weight version. Otherwise such episodes
    are restarted. Needs `async_ratio`."""
    max_staleness: Count | None = None
    """Maximum weight updates between the start of an episode and its training; groups of older episodes are restarted.
    null sets no limit. Needs `async_ratio`."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.async_ratio == 0 and (self.partial or self.max_staleness is not None):
            key, off = ("partial", "false") if self.partial else ("max_staleness", "null")
            yield (
                f"`{key}` needs async_ratio > 0: otherwise no episode outlasts its step",
                "async_ratio=1",
                f"{key}={off}",
            )
        frees = [name for name in ("sleep_between_steps", "offload") if getattr(self.engine_options, name)]
        if self.async_ratio > 0 and frees:
            problem = f"`engine_options.{frees[0]}` excludes async_ratio > 0: episodes continue during updates"
            yield problem, " ".join(f"engine_options.{name}=false" for name in frees), "async_ratio=0"
        if not self.do_sample and self.temperature != 1.0 and not self.recompute_logprobs:
            problem = "an engine's log-probs of greedy tokens (do_sample=false) ignore a temperature other than 1"
            yield problem, "recompute_logprobs=true", "temperature=1", "do_sample=true"
        if self.thoughts is not None and (not self.think or self.response_format == "answer"):
            problem = f"`thoughts` needs think=true and response_format=whole: it demands the form {self.thoughts}"
            yield problem, "think=true response_format=whole", "thoughts=null"
        if self.state_reward is not None and self.thoughts is None:
            problem = "`state_reward` needs `thoughts` with a description of the state"
            yield problem, "thoughts=grounding_worldmodeling", "state_reward=null"
        if self.state_reward is not None and self.binary_reward:
            yield "`state_reward` has no effect with binary_reward=true", "binary_reward=false", "state_reward=null"
        if self.ignore_end and self.end_token is not None:
            yield "`end_token` has no effect with ignore_end=true", "end_token=null", "ignore_end=false"


class ValidationConfig(Section):
    """Validation on start states that are in neither training nor demonstrations."""

    episodes: PositiveInt = 256
    """Number of held-out start states, one episode each."""
    start_state_files: Texts = ()
    """Parquet files whose rows are the held-out start states, as in `training.start_state_files`; `episodes` is then
    their number."""
    simulator: SimulatorConfig | None = None
    """Settings of a simulated env in validation; null uses those of training."""
    every_steps: Annotated[int, Field(ge=-1)] = 25
    """Validate every n-th step; 0 only before and after training, -1 only before."""
    before_training: bool = True
    """Also validate before the first step."""
    only: bool = False
    """Validate the policy without training."""
    prompts_per_device: PositiveInt | None = None
    """Concurrent held-out prompts per device, each with all its samples; null is only limited by
    `rollout.max_concurrent`."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling."""
