"""Training loop, warm start and supervised fine-tuning."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from quintet.config.native.learners import OptimizerConfig
from quintet.config.native.policy import LoraConfig
from quintet.config.native.section import Count, Section, Share, Texts


class TrainingConfig(Section):
    """Training loop and batch sizes: a step collects groups_per_step × samples_per_group episodes."""

    steps: Count = 70
    """Number of steps, each a rollout and its updates."""
    groups_per_step: PositiveInt = 32
    """Groups per step, each with one start state or prompt."""
    start_states: PositiveInt | None = None
    """Number of distinct start states: after each has been used they repeat in another order. null uses new ones in
    every step."""
    start_state_files: Texts = ()
    """Parquet files whose rows are the start states, in place of seeds that the run chooses: VAGEN's layout, with
    env_name, env_config and seed in the column `extra_info`. The run must have the envs of all rows."""
    shuffle_start_states: bool = True
    """Use the rows of `start_state_files` in another order in each pass; false keeps the order of the files."""
    samples_per_group: PositiveInt = 16
    """Episodes per group."""
    mini_batches: PositiveInt = 8
    """Optimizer steps per epoch over the episodes of a step; must divide their number. Groups are not split if it also
    divides `groups_per_step`."""
    mini_batch_sequences: PositiveInt | None = None
    """Sequences of an optimizer step, in place of `mini_batches`: with a window (`rollout.window_size`) an episode has
    several, so that a step has as many optimizer steps as its turns fill. null uses `mini_batches`."""
    epochs: PositiveInt = 1
    """Epochs over the episodes of a step."""
    pipelined: bool = False
    """Train on each mini-batch as soon as its groups are complete, while engines on devices of their own generate the
    others. Needs an algorithm that computes everything within a mini-batch."""
    micro_batch_tokens: PositiveInt = 16384
    """Maximum tokens of one forward and backward pass; affects memory, not results."""
    threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """CPU threads; null uses every core."""


class WarmStartConfig(Section):
    """Initial supervised phase on demonstrations."""

    files: Texts = ()
    """Demonstrations of robots, for `env.name=simulator`: directories of data sets of LeRobot (v2.0, v2.1, v3.0) or of
    TensorFlow Datasets in RLDS form, all episodes of which are used. An empty list uses `episodes` of an expert."""
    cameras: Texts = ()
    """Image features of `files`, in the order of the policy's images, by their whole name or its last part; an empty
    list uses all."""
    state_key: str | None = None
    """Feature of `files` with the proprioception; null uses that named `state`."""
    episodes: PositiveInt = 400
    """Number of demonstrations of an expert."""
    epsilon: Share = 0.0
    """Probability that a demonstrated action is a random one (ε-greedy expert). Episodes that then fail are left out:
    the demonstrations show the response format and safe actions, but seldom the best one. Robots execute the random
    action, and the demonstration has the expert's."""
    updates: Count = 250
    """Maximum number of optimizer steps. A policy with `policy.path`, or after `sft`, has no warm start unless a key of
    `warm_start` is set."""
    until_success: Share | None = 0.5
    """Stop once the greedy policy succeeds in this share of training episodes. null makes all updates."""
    check_every_updates: PositiveInt = 2
    """Updates between two such checks of 256 episodes."""
    turns_per_update: PositiveInt = 64
    """Demonstrated turns, or chunks of a robot's actions, per optimizer step."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-3, warmup_steps=20)
    """Optimizer and schedule."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.files and self.epsilon:
            yield "`epsilon` changes what an expert does, and `files` replaces the expert", "epsilon=0.0", "files=[]"
        if not self.files and (self.cameras or self.state_key is not None):
            yield "`cameras` and `state_key` are features of `files`, which is empty", "cameras=[] state_key=null"


class SolvedEpisodesConfig(Section):
    """Demonstrations that a search generates as training data."""

    directory: str = "sft/data"
    """Directory of the data."""
    algorithm: Literal["bfs"] = "bfs"
    """Expert: breadth-first search."""
    seed: Count = 100000
    """Seed of the first episode; it increases by 1 per episode."""
    episodes: PositiveInt = 1000
    """Number of training episodes."""
    validation_episodes: PositiveInt = 100
    """Number of held-out episodes."""
    max_depth: PositiveInt = 100
    """Maximum length of a solution, actions."""
    form: Literal["message", "qwen-instruct", "base"] = "message"
    """Format of rows: chat messages, or text with a chat template applied."""
    processes: PositiveInt = 1
    """Number of search processes."""


class DistillationConfig(Section):
    """Distillation from the model at `reference.path`: a divergence from its distributions as a part of the loss."""

    weight: Share = 0.5
    """Weight of the divergence; the cross-entropy of the target tokens has the rest."""
    objective: Literal[
        "forward_kl", "reverse_kl", "adaptive_kl", "skewed_forward_kl", "skewed_reverse_kl", "js_divergence"
    ] = "forward_kl"
    """Divergence of the student from the teacher, see docs/sft.md."""
    top_k: Count = 64
    """Number of tokens that the teacher finds likeliest, among which the divergence is computed; 0 takes all."""
    temperature: PositiveFloat = 1.0
    """Temperature of both distributions in the divergence."""
    teacher_temperature: PositiveFloat = 1.0
    """Further factor on the temperature of the teacher."""
    alpha: Share = 0.5
    """Probability of the teacher's unlikeliest tokens that count as its tail, in `adaptive_kl`."""
    skew: Share = 0.1
    """Share of the mixture with the own distribution, in the skewed divergences."""


class SftConfig(Section):
    """Supervised fine-tuning on demonstrations of an expert or on conversations from `data`."""

    episodes: SolvedEpisodesConfig | None = None
    """Demonstrations to train on; null trains on `data`."""
    path: str | None = None
    """Initial model; null uses `policy.path`."""
    name: str | None = None
    """Name of this stage in loggers; null uses that of the run."""
    project: str | None = None
    """Project of this stage in loggers; null uses that of the run."""
    loggers: Texts | None = None
    """Loggers of this stage; null uses those of the run."""
    output_dir: str | None = None
    """Directory of the final weights, `merged_model` and, with LoRA, `lora_adapter`; existing files of these names are
    replaced. null writes `model` and `lora_adapter` to the run directory."""
    remote_dir: str | None = None
    """Copy the final weights to this location at the end of the run: any fsspec URL, such as `hdfs://…` or `s3://…`."""
    devices: PositiveInt = 1
    """Number of devices of this stage, one process each, started by torchrun or Ray; if not set, the number of started
    processes, or with `--ray` that of `placement`."""
    epochs: PositiveInt = 1
    """Epochs over the data."""
    batch: PositiveInt = 256
    """Rows per optimizer step; remaining rows of an epoch are dropped."""
    distillation: DistillationConfig | None = None
    """Distillation from the model at `reference.path`; null trains on the target tokens alone."""
    sequences_per_pass: PositiveInt | None = None
    """Sequences per micro-batch; null fills it up to `training.micro_batch_tokens`."""
    max_tokens: PositiveInt = 2048
    """Maximum tokens of a sequence; longer ones are refused, or truncated as set by `data.truncation`."""
    train_on_prompt: bool = False
    """Also train on the tokens of prompts, and of other messages than those of the assistant."""
    before_training: bool = True
    """Compute the held-out loss before the first update; `validation.every_steps` sets how often after that."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    liger: bool = False
    """Use fused kernels of Liger; needs the package `liger-kernel` and a GPU."""
    lora: LoraConfig | None = None
    """LoRA; null trains all weights."""
    merge: bool = True
    """Merge LoRA adapters into the weights at the end; otherwise only the adapters are stored."""
    final_weights: Literal["last", "best"] = "last"
    """Final weights: those after the last step, or those with the lowest held-out loss."""
    then_reinforce: bool = False
    """Continue with reinforcement learning from the final weights; the stage is skipped if they already exist."""
    warmup_ratio: Share = 0.1
    """Share of optimizer steps for the warm-up if `optimizer.warmup_steps` is 0."""
    optimizer: OptimizerConfig = OptimizerConfig(
        learning_rate=1e-5,
        schedule="cosine",
        warmup_steps=0,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        min_learning_rate_ratio=0.0,
        stable_decay="cosine",
    )
    """Optimizer and schedule; `wsd` decays over the last tenth of the steps after the warm-up, as in verl."""
