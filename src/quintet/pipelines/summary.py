"""Finish a run: report, and a table of the first and last validation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quintet.config.native.mixed_envs import ALL_ENVS
from quintet.tracking.metric_columns import read_columns
from quintet.tracking.report import TASK_SUCCESS, ComparisonRow, write_report
from quintet.tracking.videos import find_videos

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from quintet.config.native.data import RewardConfig
    from quintet.config.native.experiment import Experiment
    from quintet.pipelines.run import Run

ROWS = (
    ("success_rate", "success", True),
    ("reward", "reward", False),
    ("turns", "turns", False),
    ("episode_len", "actions", False),
    ("valid_format", "valid format", True),
)


def finish(run: Run, console: Console) -> None:
    """Write report and state of a finished run, and print the table."""
    rows = comparison_rows(run)
    summary, num_episodes = config_summary(run.config), run.config.tracking.report_episodes
    videos = find_videos(run.directory.path, run.config.tracking)
    report = write_report(run.directory.path, run.config.name, summary, rows, num_episodes, videos)
    run.directory.write_state("finished", steps=run.config.training.steps)
    console.print(comparison_table(run, [*rows, *task_rows(run)]))
    run.progress.note(f"report: {report}")


def comparison_rows(run: Run) -> list[ComparisonRow]:
    """Return the results of the run's first and last validation."""
    env = _validated_env(run)
    names = [(f"val/{env}/{key}", label, share) for key, label, share in ROWS]
    names += [(f"val/{name}/success_rate", f"success, {name}", True) for name in run.config.envs]
    return _compare(names, _validations(run))


def task_rows(run: Run) -> list[ComparisonRow]:
    """Return the success in each task in the run's first and last validation; empty if there are not several tasks."""
    lines = _validations(run)
    matches = filter(None, map(TASK_SUCCESS.fullmatch, sorted({name for line in lines for name in line})))
    return _compare([(match[0], f"success, {match[1]}", True) for match in matches], lines)


def _validated_env(run: Run) -> str:
    return ALL_ENVS if run.config.envs else run.config.env.name


def _validations(run: Run) -> list[dict[str, float]]:
    """Return the metrics of the steps with a validation."""
    reward = f"val/{_validated_env(run)}/reward"
    return list(read_columns(run.directory.metrics).lines_with(reward.__eq__))


def _compare(names: list[tuple[str, str, bool]], lines: list[dict[str, float]]) -> list[ComparisonRow]:
    """Return the first and the last value of each metric that exists: name, label, and whether it is a share."""
    no_values: dict[str, float] = {}
    before = next((line for line in lines if line["step"] == 0), no_values)
    after = next((line for line in reversed(lines) if line["step"] > 0), no_values)
    return [
        ComparisonRow(label, before.get(name), after.get(name), share)
        for name, label, share in names
        if name in before or name in after
    ]


def comparison_table(run: Run, rows: list[ComparisonRow]) -> Table:
    """Return the table for a terminal."""
    from rich.table import Table

    table = Table(title=f"{_envs(run.config)}: {_held_out(run.config)}")
    for column, align in (("", "left"), ("before RL", "right"), ("after RL", "right"), ("change", "right")):
        table.add_column(column, justify=align)  # type: ignore[arg-type]
    for row in rows:
        change = "" if row.before is None or row.after is None else f"{row.after - row.before:+.3f}"
        table.add_row(row.label, _number(row.before), _number(row.after), change)
    return table


def _envs(config: Experiment) -> str:
    return ", ".join(env.name for env in config.run_envs)


def _held_out(config: Experiment) -> str:
    episodes = "held-out questions" if config.data else f"{config.validation_start_states} held-out episodes"
    return episodes if config.validation.sampling.do_sample else f"{episodes}, greedy"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _task(config: Experiment) -> dict[str, str]:
    """Return the environments or, of a run that answers prompts, its data and reward."""
    if not config.env.reads_prompts:
        return {"env": _envs(config)}
    files = ", ".join(Path(name).name for name in (config.data.train_files if config.data else ()))
    return {"data": files, "reward": _reward_name(config.reward)} if config.reward else {"data": files}


def _reward_name(reward: RewardConfig) -> str:
    if reward.model is not None:
        return "reward model"
    return reward.function or ("LLM judge" if reward.judge else reward.kind)


def config_summary(config: Experiment) -> dict[str, str]:
    """Return the settings in the head of a report."""
    training = config.training
    return {
        "policy": config.policy.preset or str(config.policy.path),
        **_task(config),
        "advantage": config.algorithm.advantage.name,
        "episodes a step": f"{training.groups_per_step} × {training.samples_per_group}",
        "steps": str(training.steps),
        "learning rate": f"{config.actor.optimizer.learning_rate:g}",
        "seed": str(config.seed),
    }
