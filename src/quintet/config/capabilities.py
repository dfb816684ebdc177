"""Capabilities that this version, or a single process, does not have, and marks for the fields that require them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Capability(StrEnum):
    """Missing capability that unsupported keys wait for; the value is its name in messages."""

    PROCESSES = "one process per device"
    """Not missing: `torchrun` or `--ray` starts them."""

    ENGINES = "an engine of TensorRT-LLM"
    POLICIES = "further action policies (OpenPI, GR00T, …)"
    SIMULATORS = "adapters for further simulators and real robots"
    ROBOT_ALGORITHMS = "robot learning beyond PPO and GRPO (SAC, NFT, DAgger, offline, distillation)"
    ROBOT_OVERLAP = "rollouts of robots that overlap with training"
    ROBOT_REWARDS = "learned rewards of robots"
    ROBOT_RECORDINGS = "demonstrations recorded in simulators"
    RLINF_AGENTS = "RLinf's agents (search, code, several agents)"
    RLINF_SFT = "RLinf's supervised runs (vision-language models, policies of robots, reward models)"
    NODE_GROUPS = "groups of nodes with interpreters, environment variables or robots of their own"
    MOVING_DEVICES = "devices that move between components during a step"
    API_MODELS = "evaluation of a model behind an API by a configuration (`quintet eval --endpoint` does it)"
    BACKENDS = "further training backends and optimizers (MindSpeed, FSDP Turbo, Megatron Lite, …)"
    ATTENTION = "attention to some of the tokens only"
    MEGATRON_OPTIONS = "further options of Megatron Core"
    LORA_OPTIONS = "LoRA beyond rank, scale, target modules and initial adapters of the policy"
    ROUTER_LOSSES = "losses and replay of expert routers, and heads for several tokens"
    ROUTER_OPTIONS = "routers and heads in types of their own, and routers that choose experts evenly"
    ROUTER_REPLAY = "training with the experts that the engine chose"
    MTP = "multi-token prediction"
    QUANTIZATION = "quantized training and rollouts"
    STORED_PRECISION = "learners that keep their weights in less than float32"
    MEMORY_OPTIONS = "MLPs computed in tiles"
    SHARDING_GROUPS = "sharding groups smaller than the groups of devices that share a sequence"
    ENGINE_FEATURES = "engines with expert or data parallelism, or separate prefill"
    TOOLS = "further tools and formats of tool calls, and simulated users"
    AGENT_LOOPS = "agent loops and engine servers from user code"
    CHAT_TEMPLATES = "chat templates and their arguments in the configuration"
    MEDIA = "videos, audio and image folders in prompts"
    SAMPLERS = "user classes that select or generate prompts"
    OVERSAMPLING = "rollouts of more prompts than a step trains on"
    ROLLOUT_CACHE = "responses stored by an earlier run in place of a rollout"
    REWARD_ENGINES = "reward models behind an engine, for reward functions that call them"
    REWARD_MANAGERS = "reward managers from user code"
    TEACHERS = "several teachers"
    TEACHER_DISTRIBUTIONS = "comparing distributions with those of a teacher in reinforcement learning"
    TEACHER_AND_REFERENCE = "a reference policy beside a teacher"
    RESAMPLING = "resampling of responses by their quality (PF-PPO)"
    ASYNC_TRAINERS = "dynamic scheduling and several epochs of verl's asynchronous trainers"
    PROFILING = "further profilers and options of profiles (`tracking.profile` has those of PyTorch)"
    METRIC_SERVICES = "metrics of engines for Prometheus, and traces of rollouts"
    ACCELERATORS = "accelerators other than CUDA GPUs"
    MODEL_CONFIGS = "a model configuration or data set from further sources"
    RAY_SETTINGS = "settings of a Ray that the run starts"
    PICKLED_WEIGHTS = "reading of RLinf's own weight files"
    PREFERENCES = "training on preferences (DPO)"
    ON_POLICY_DISTILLATION = "on-policy distillation of ROLL's teachers"
    REWARD_DOMAINS = "filters, refills and chat templates that differ by domain"
    REWARD_WORKERS = "rewards of ROLL's other classes (detection, video, code in a service)"
    JUDGE_ENGINES = (
        "a judge's server on several devices or of another kind (`quintet serve` and `judge_model_type: api`)"
    )
    REWARD_SHAPING = "further shaping of rewards"
    SAMPLE_MASKS = "masks and weights of responses by length, difficulty or reward"
    MIXED_LOSSES = "further losses beside the policy loss"
    CORRECTION_OPTIONS = "rollout corrections of earlier releases, and by the policy that is being updated"
    SEQUENCE_DUAL_CLIP = "a dual clip of ratios of whole responses"
    TURN_RATIOS = "probability ratios of turns, and filters by differences of probabilities"
    TURN_ESTIMATORS = "rewards compared by tag, and returns of turns with rewards, bounds or discounts of tokens"
    REMOTE_ENVS = "clients of VAGEN's environment services of 2026 (`RemoteEnv`)"
    HUB_UPLOADS = "uploads of weights to the Hugging Face hub during a run"
    TEXT_ENVS = "adapters for further environments (WebShop, GEM, sandboxes) and their tools"
    MULTI_TURN_GAE = "VAGEN's estimator multi_turn_gae of 2025-03"
    START_STATE_FILTERS = "start states chosen by the length of their solutions"
    ENV_SETTINGS = "turns and responses of different lengths by environment"
    ENV_VARIANTS = "variants of environments of early 2025"
    CONTEXT_FORMS = "histories of turns written into one message"
    GROUP_FILTERS = "filters of groups by entropy, or by numbers other than rewards"
    GRADIENT_ANALYSIS = "analysis of gradients by group"
    GRID_SYMBOLS = "own symbols and actions of grid environments"
    RESPONSE_PATTERNS = "own patterns of responses"
    SPARE_EPISODES = "spare episodes of a group"
    COLUMN_PROMPTS = "prompts of several columns"
    ROLL_CLASSES = "ROLL's own Python classes"
    ROLL_LEARNERS = "further options of ROLL's learners"
    FROZEN_MODULES = "training of some modules only"
    DEEPSPEED = "further options of DeepSpeed"
    NVME = "offloading to NVMe"
    DIFFUSION = "training of diffusion models"
    DEVICE_SHARING = "a component on some of the actor's devices only"
    SCHEDULES = "further schedules of the learning rate"
    TRACKERS = "trackers of ROLL's platform"
    RECORDED_ROLLOUTS = "recorded rollouts"
    RECIPES = "trainers of verl's recipes and experiments"
    EASYR1 = "configurations of EasyR1, whose keys are not verl's (`worker.actor`, `worker.rollout`, …)"
    FORK = "the code of a fork"
    FURTHER_KEYS = "keys of a framework that no reference documents"
    PROMPTS = "a run on prompts instead of environments"
    """Not missing: of keys that a run in environments does not read."""

    @property
    def is_missing(self) -> bool:
        """Whether this version lacks it."""
        return self not in (Capability.PROCESSES, Capability.PROMPTS)

    def refusal(self, *, plural: bool = False) -> str:
        """Return the end of a message about a setting, or several ones, that require it."""
        if self.is_missing:
            return f"{'are' if plural else 'is'} not supported yet: requires {self}"
        return f"{'require' if plural else 'requires'} {self}"


@dataclass(frozen=True, slots=True)
class Requires:
    """Annotation of a field with values that this version does not support.

    The default is always supported, and so are the values in `supported`. If `unsupported` is given, only these values,
    and lists that contain one of them, are unsupported. The JSON schema of the field has both.
    """

    capability: Capability
    supported: tuple[Any, ...] = ()
    unsupported: tuple[Any, ...] | None = None

    def applies_to(self, value: Any) -> bool:
        """Return whether a value other than the default is unsupported."""
        if self.unsupported is not None:
            return any(item in self.unsupported for item in (value if isinstance(value, tuple) else (value,)))
        # 0 equals 0.0, but not false
        return not any(
            value == other and isinstance(value, bool) == isinstance(other, bool) for other in self.supported
        )

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = dict(handler(core_schema))
        if not self.capability.is_missing:
            return schema
        unsupported = {} if self.unsupported is None else {"unsupported": list(self.unsupported)}
        return schema | {"requires": str(self.capability)} | unsupported
