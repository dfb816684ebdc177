"""Metrics, logs, reports and checkpoints of a run."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from quintet.config.native.section import Count, ListOf, Section, Texts

Content = Literal["model", "optimizer", "extra", "hf_model"]
ALL: tuple[Content, ...] = ("model", "optimizer", "extra")


class VideoConfig(Section):
    """Videos of simulated episodes."""

    overlay: bool = True
    """Show reward, return, outcome and instruction of each robot below its picture."""
    directory: str | None = None
    """Directory of the videos, `seed_<env.seed>/<number>.mp4`; null uses `videos` in the run directory."""
    robots: PositiveInt = 16
    """Number of robots in a video, the first of the batch."""
    every_rollouts: PositiveInt = 1
    """Record every n-th rollout, from the first: a pass over all robots in a step, or a validation."""


class TorchProfilerConfig(Section):
    """Profiles of PyTorch's operators and of kernels, by `torch.profiler`."""

    activities: ListOf[Literal["cpu", "cuda"]] = ("cpu", "cuda")
    """What is recorded: operators (`cpu`) and kernels of CUDA GPUs (`cuda`), which are left out without a GPU."""
    record_shapes: bool = False
    """Record the shapes of operators' inputs."""
    profile_memory: bool = False
    """Record allocations of tensors."""
    with_stack: bool = False
    """Record the lines of Python code that called the operators."""
    with_flops: bool = False
    """Estimate the floating-point operations of matrix products and convolutions."""
    with_modules: bool = False
    """Record the modules of TorchScript models that called the operators."""
    warmup: bool = True
    """Run the profiler in the step before as well and discard what it recorded: its first step is slower."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if not self.activities:
            yield "nothing is recorded with an empty list", "activities=[cpu]"


class ProfileConfig(Section):
    """Profiles of training steps, one file per step and rank."""

    steps: ListOf[PositiveInt] | None = None
    """Steps that are profiled; null profiles every step."""
    ranks: ListOf[Count] | None = (0,)
    """Ranks that are profiled, among those with devices of the actor; null profiles all of them."""
    directory: str | None = None
    """Directory of the profiles; null uses `profile` in the run directory."""
    trace: bool = True
    """Write `step_{step}_rank_{rank}.json`: spans of phases, learners, engines, requests and environments, and memory
    over time, in Chrome's trace format."""
    torch: TorchProfilerConfig | None = None
    """Write `step_{step}_rank_{rank}.torch.json.gz` as well, the profile of `torch.profiler`; null writes none."""
    memory_snapshot: bool = False
    """Write `step_{step}_rank_{rank}.memory.pickle` as well: the blocks of GPU memory, and the last 100,000 allocations
    with the lines of Python code that made them, for https://docs.pytorch.org/memory_viz."""

    def covers(self, step: int) -> bool:
        """Return whether a step is profiled."""
        return self.steps is None or step in self.steps

    def prepares(self, step: int) -> bool:
        """Return whether the profiler warms up in a step that is not profiled itself."""
        return self.torch is not None and self.torch.warmup and not self.covers(step) and self.covers(step + 1)

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.steps == ():
            yield "no step is profiled with an empty list", "steps=[2]", "steps=null"
        if self.ranks == ():
            yield "no rank is profiled with an empty list", "ranks=[0]", "ranks=null"
        if not self.trace and self.torch is None and not self.memory_snapshot:
            yield "nothing is recorded without `trace`, `torch` and `memory_snapshot`", "trace=true"


class TrackingConfig(Section):
    """Metrics, logs and reports."""

    loggers: Texts = ("console", "jsonl", "tensorboard")
    """Loggers of metrics, see `quintet list`."""
    project: str | None = None
    """Project of the run in loggers."""
    run_name: str | None = None
    """Name of the run in loggers; null uses `name`."""
    log_dir: str | None = None
    """Directory in which each logger except `jsonl` has a directory for its files; null uses the run directory."""
    trajectories_every_steps: Count = 10
    """Store the episodes of every n-th step; 0 only stores validation episodes."""
    token_statistics: bool = False
    """Store the tokens of training episodes with the log-probs of engine and learner, entropies and advantages, which
    `quintet view` shows as colors. Each stored step needs two more forward passes, and its file is several times
    larger."""
    image_episodes: Count = 16
    """Number of episodes per stored step and per validation whose images are stored as PNG files, next to the episodes;
    equal images are stored once. The report shows these episodes."""
    validation_generations: Count = 0
    """Number of episodes per validation that are sent to the loggers, except `console` and `file`, as a table
    `val/generations` of observations, responses, rewards and images; `seed` selects them."""
    rendered_episodes: Count = 0
    """Number of episodes per stored step, and per batch of each validation, that are rendered as HTML pages, turn by
    turn: the state before each response as an image, and the response."""
    rendered_episodes_dir: str | None = None
    """Directory of the rendered episodes, `{name}/train/step_{step}/trajectory_data_{i}.html` and
    `{name}/validation_{number}/step_{batch}/trajectory_data_{i}.html`; null uses `pictures` in the run directory."""
    video: VideoConfig | None = None
    """Videos of training episodes in a simulator; null records none."""
    validation_video: VideoConfig | None = None
    """Videos of validation episodes in a simulator; null records none."""
    config_dir: str | None = None
    """Directory for a second copy of `config.yaml`; null writes none."""
    flops: bool = False
    """Log FLOP/s of policy updates per device, and MFU if the peak of the device is known."""
    profile: ProfileConfig | None = None
    """Profiles of training steps; null records none."""
    report_episodes: Annotated[int, Field(ge=0, le=200)] = 12
    """Number of episodes in `report.html`."""


class CheckpointConfig(Section):
    """Checkpoints to resume from."""

    every_steps: Count = 10
    """Save every n-th step, in the warm start every n-th update; 0 only saves the last."""
    keep: PositiveInt = 2
    """Number of newest checkpoints to keep; older ones are removed."""
    contents: ListOf[Content] = ALL
    """Parts to save besides `hf/`, the model in Hugging Face format, and the weights of critic and reference, which are
    always saved: the policy's weights as the learner holds them (`model`), the optimizer state (`optimizer`), and the
    state of data and schedules (`extra`). `hf_model` links `hf/` under verl's name `actor/huggingface`."""
    load_contents: ListOf[Content] | None = None
    """Parts to load on resume; null loads all that were saved. Without `optimizer` its state starts from zero, without
    `extra` schedules and data order do; without `model` the weights come from `hf/` if `hf_model` is listed, otherwise
    from `policy.path`."""
    remote_dir: str | None = None
    """Copy each checkpoint to this location in the background: any fsspec URL, such as `hdfs://…` or `s3://…`. A run
    without local checkpoints resumes from the newest one there. Nothing is removed there."""
    delete_after_load: bool = False
    """Remove the checkpoint that a run resumed from once its next one is complete."""
