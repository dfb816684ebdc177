"""Configuration of one run."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.data import DataConfig, EvaluationConfig, GenerationConfig, RewardConfig
from quintet.config.native.envs import EnvConfig, FrozenLakeConfig, MixedEnvConfig, SimulatorConfig
from quintet.config.native.learners import ActorConfig, CriticConfig, ReferenceConfig
from quintet.config.native.mixed_envs import RunEnv, apportion
from quintet.config.native.placement import PlacementConfig
from quintet.config.native.policy import PolicyConfig
from quintet.config.native.rollout import RolloutConfig, ValidationConfig
from quintet.config.native.section import RunsCode, Section, Seed, Texts
from quintet.config.native.tracking import CheckpointConfig, TrackingConfig
from quintet.config.native.training import SftConfig, TrainingConfig, WarmStartConfig


class Experiment(Section):
    """Configuration of one run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "frozenlake"
    """Name of the run, and of its directory under `output_dir`. A run without one is named after its environment or
    data, and its model."""
    seed: Seed = 0
    """Seed of all random numbers of the run."""
    output_dir: str = "runs"
    """Parent directory of run directories."""
    resume: str = "auto"
    """`auto` continues from the newest valid checkpoint of the run, `never` starts from scratch, a path continues from
    that checkpoint."""
    external_libs: Annotated[Texts, RunsCode()] = ()
    """Python modules that are imported first, for example to register envs or loggers."""
    policy: PolicyConfig = PolicyConfig(overrides={})
    """Model to train."""
    env: EnvConfig = FrozenLakeConfig()
    """Environment."""
    envs: dict[str, MixedEnvConfig] = {}  # noqa: RUF012 - pydantic copies it
    """Several environments in one run, in place of `env`, each under a name that you choose."""
    data: DataConfig | None = None
    """Prompts from files; null if the env creates its own."""
    reward: RewardConfig | None = None
    """Scoring of responses; null if the env computes rewards."""
    rollout: RolloutConfig = RolloutConfig()
    """Rollouts."""
    warm_start: WarmStartConfig | None = WarmStartConfig()
    """Initial supervised phase on demonstrations; null starts reinforcement learning immediately. If it is not set, a
    policy with `policy.path`, or after `sft`, has none."""
    sft: SftConfig | None = None
    """Supervised fine-tuning in place of, or before, reinforcement learning; null for none."""
    evaluation: EvaluationConfig | None = None
    """Scoring of stored responses without training; null trains."""
    generation: GenerationConfig | None = None
    """Generation of responses to prompts without training; null trains."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages, loss and KL divergence."""
    actor: ActorConfig = ActorConfig()
    """Training of the policy."""
    critic: CriticConfig = CriticConfig()
    """Training of the critic."""
    reference: ReferenceConfig = ReferenceConfig()
    """Reference policy of `algorithm.kl`."""
    training: TrainingConfig = TrainingConfig()
    """Training loop."""
    validation: ValidationConfig = ValidationConfig()
    """Validation on held-out episodes."""
    placement: PlacementConfig = PlacementConfig()
    """Devices of each component."""
    tracking: TrackingConfig = TrackingConfig()
    """Metrics, logs and reports."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""

    @property
    def sft_only(self) -> SftConfig | None:
        """The section `sft` if the run is supervised fine-tuning without reinforcement learning after it."""
        return None if self.sft is None or self.sft.then_reinforce else self.sft

    @property
    def sft_devices(self) -> int:
        """Number of devices of supervised fine-tuning: `sft.devices` or, if that is not set, all of `placement`."""
        if self.sft is not None and "devices" in self.sft.model_fields_set:
            return self.sft.devices
        return self.placement.nodes * self.placement.devices_per_node

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the domains of prompts."""
        return () if self.data is None else tuple(self.data.domains)

    @property
    def groups_per_round(self) -> int:
        """Groups of the first rollout of a step, or prompts of a batch of generation."""
        if self.generation is not None:
            return self.generation.batch_size
        return self.algorithm.filter.groups_per_round or self.training.groups_per_step

    @property
    def samples_per_prompt(self) -> int:
        """Responses to one prompt, or episodes from one start state, outside of validation."""
        return self.training.samples_per_group if self.generation is None else self.generation.samples

    @property
    def needs_critic(self) -> bool:
        return self.algorithm.advantage.trains_critic

    def simulator_config(self, *, is_validation: bool) -> SimulatorConfig:
        """Return the configuration of the simulator of training or of validations.

        Raises:
            TypeError: the run has no simulator.
        """
        env = (self.validation.simulator if is_validation else None) or self.env
        if not isinstance(env, SimulatorConfig):
            raise TypeError("the run has no simulator")
        return env

    @property
    def reference_has_adapters(self) -> bool:
        """Whether the reference is the policy with other adapters."""
        return self.policy.lora is not None and self.reference.path is None and self.reference.dtype is None

    @property
    def needs_reference(self) -> bool:
        is_distilled = self.sft_only is not None and self.sft_only.distillation is not None
        return self.algorithm.kl is not None or self.algorithm.loss.needs_teacher or is_distilled

    @property
    def scores_rollout(self) -> bool:
        """Whether the policy computes log-probs of a rollout before the updates of a step."""
        algorithm = self.algorithm
        return self.needs_learner_logprobs or (
            algorithm.train_on_observations or algorithm.advantage.needs_sum_squared_probs
        )

    @property
    def needs_learner_logprobs(self) -> bool:
        """Whether the learner's log-probs are requested, or needed beside those of the engine."""
        algorithm = self.algorithm
        return self.rollout.recompute_logprobs or algorithm.correction is not None or algorithm.loss.weighs_rollout_gap

    @property
    def run_envs(self) -> tuple[RunEnv, ...]:
        """All envs of the run with their settings: the entries of `envs` in their order, or `env` if there are none."""
        start_states, episodes = self.training.start_states, self.validation.episodes
        if not self.envs:
            return (RunEnv(self.env.name, "env", self.env, self.rollout, 1.0, start_states, episodes),)
        shares = [entry.share for entry in self.envs.values()]
        parts = apportion(episodes, shares if any(shares) else [1.0] * len(shares))
        return tuple(
            RunEnv(
                name,
                f"envs.{name}.env",
                entry.env,
                self.rollout.model_copy(update=entry.rollout_overrides()),
                entry.share,
                entry.start_states or start_states,
                max(1, part) if entry.validation_episodes is None else entry.validation_episodes,
            )
            for (name, entry), part in zip(self.envs.items(), parts, strict=True)
        )

    @property
    def validation_start_states(self) -> int:
        """Start states of one validation, over all envs."""
        return sum(env.validation_episodes for env in self.run_envs)

    @property
    def max_episode_tokens(self) -> int:
        """Maximum response tokens of an episode."""
        turns = 1 if self.env.reads_prompts else self.rollout.max_turns
        return turns * self.rollout.max_response_tokens

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.reference.path is not None and self.algorithm.kl and self.algorithm.kl.refresh_every_steps:
            refresh = "algorithm.kl.refresh_every_steps"
            yield "a reference from `reference.path` cannot be refreshed", f"{refresh}=0", "reference.path=null"
        if self.rollout.thoughts is not None and self.env.reads_prompts:
            yield "`rollout.thoughts` needs an env with actions; answers to prompts have none", "rollout.thoughts=null"
        yield from self._reply_conflicts()
        yield from self._generation_conflicts()
        yield from self._warm_start_conflicts()
        if self.envs and not any(entry.share for entry in self.envs.values()):
            first = next(iter(self.envs))
            yield f"`envs.{first}.share` is 0, as of every env: none is for training", f"envs.{first}.share=1"
        if self.envs and not self.validation_start_states:
            first = next(iter(self.envs))
            key = f"envs.{first}.validation_episodes"
            yield f"`{key}` is 0, as of every env: none is for validation", f"{key}=64"
        for name, env in self.envs.items() if self.rollout.thoughts is not None else ():
            if env.think is False:
                problem = f"`envs.{name}.think=false` excludes the sections that `rollout.thoughts` demands"
                yield problem, f"envs.{name}.think=null", "rollout.thoughts=null"
        for config in (run.config for run in self.run_envs) if self.rollout.state_reward is not None else ():
            if getattr(config, "relation_scoring", None) is None:
                problem = f"`rollout.state_reward` needs positions of objects, which the env {config.name} lacks"
                yield problem, "rollout.state_reward=null"
        if self.rollout.thoughts is not None and self.sft is not None and self.sft.episodes is not None:
            problem = "thoughts of `sft.episodes` have no sections, which `rollout.thoughts` demands"
            yield problem, "rollout.thoughts=null", "sft.episodes=null"

    def _reply_conflicts(self) -> Iterator[tuple[str, ...]]:
        keys = [f"rollout.{name}" for name in ("tool_calls", "interactions") if getattr(self.rollout, name) is not None]
        if not keys and self.data is not None and self.data.agent_loop == "tool_agent":
            yield "`data.agent_loop` needs tools, which `rollout.tool_calls` names", "data.agent_loop=null"
        for key in keys:
            without = f"{key}=null"
            if not self.env.reads_prompts:
                yield f"`{key}` needs prompts; the env {self.env.name} has actions", without
            if self.rollout.max_turns == 1:
                problem = f"`{key}` needs more than one turn: nothing replies to the last response"
                yield problem, "rollout.max_turns=5", without
            if self.reward is not None and self.reward.model is not None:
                problem = f"`{key}` excludes `reward.model`, which scores a prompt with one response"
                yield problem, "reward.model=null", without

    def _generation_conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.generation is None:
            return
        for key in (key for key in ("sft", "evaluation") if getattr(self, key) is not None):
            yield f"`generation` and `{key}` exclude each other", f"{key}=null", "generation=null"
        if not self.env.reads_prompts:
            problem = f"`generation` needs prompts; the env {self.env.name} makes its own"
            yield problem, "env.name=prompts", "generation=null"
        for key in ("tool_calls", "interactions"):
            if getattr(self.rollout, key) is not None:
                yield f"`generation` stores single responses, which excludes `rollout.{key}`", f"rollout.{key}=null"
        if self.generation.samples > 1 and not self.rollout.do_sample:
            problem = f"{self.generation.samples} greedy responses to a prompt are identical"
            yield problem, "rollout.do_sample=true", "generation.samples=1"

    def _warm_start_conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.warm_start is not None and self.warm_start.files and not self.env.is_simulator:
            problem = f"`warm_start.files` are demonstrations of robots, which the env {self.env.name} lacks"
            yield problem, "warm_start.files=[]"
