"""Diagnosis of a run: all rules, from its metrics alone or from everything in its directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from quintet.diagnosis import policy_rules, response_rules, reward_rules, state_rules, system_rules, trajectory_rules
from quintet.diagnosis.coverage import Coverage, WaitingRule
from quintet.diagnosis.episode_files import EpisodeFile
from quintet.diagnosis.findings import Finding
from quintet.diagnosis.rule_specs import Limits, rule_specs
from quintet.diagnosis.run_data import RunData
from quintet.diagnosis.suggestions import read_config
from quintet.errors import MachineError
from quintet.tracking.metric_columns import MetricColumns, read_columns
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.run_status import RunStatus, is_run_directory, read_status

MetricRule = Callable[[RunData, Limits], Iterator[Finding]]
EpisodeRule = Callable[[RunData, EpisodeFile, Limits], Iterator[Finding]]
StateRule = Callable[[RunData, RunStatus, Limits], Iterator[Finding]]
METRIC_RULES: tuple[MetricRule, ...] = (
    system_rules.non_finite,
    reward_rules.no_group_solved,
    reward_rules.all_groups_solved,
    reward_rules.groups_alike,
    reward_rules.no_learning,
    reward_rules.reward_collapse,
    reward_rules.validation_falls,
    reward_rules.held_out_loss_rises,
    reward_rules.reward_without_success,
    policy_rules.entropy_collapse,
    policy_rules.entropy_explosion,
    policy_rules.engine_drift,
    policy_rules.policy_jumps,
    policy_rules.clipping,
    policy_rules.reference_kl,
    policy_rules.gradient_spikes,
    policy_rules.gradient_growth,
    policy_rules.skipped_updates,
    policy_rules.critic_explains_nothing,
    response_rules.responses_cut_off,
    response_rules.responses_explode,
    response_rules.responses_collapse,
    response_rules.invalid_format,
    system_rules.episodes_fail,
    system_rules.scores_fail,
    system_rules.tool_calls_fail,
    system_rules.restarts,
    system_rules.slow_phase,
    system_rules.phase_grows,
    system_rules.waiting,
    system_rules.memory_grows,
    system_rules.gpu_memory_full,
)
EPISODE_RULES: tuple[EpisodeRule, ...] = (
    trajectory_rules.same_response,
    trajectory_rules.degenerate_text,
    trajectory_rules.damaged_episodes,
)
STATE_RULES: tuple[StateRule, ...] = (state_rules.run_ended_early, state_rules.run_hangs, state_rules.memory_full)


def diagnose_metrics(rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Return the findings in the rows of a run's `metrics.jsonl`, critical ones first."""
    return _sorted(_of_metrics(RunData(MetricColumns.from_lines(rows))))


def read_run(directory: Path) -> list[RunData]:
    """Return the data of a run, of its warm start and of its fine-tuning, each with its metrics."""
    paths = RunDirectory(directory)
    composed = read_config(paths.config)
    files = (paths.metrics, paths.warm_start, directory / "sft" / paths.metrics.name)
    return [RunData(read_columns(path), composed, directory) for path in files]


def read_coverage(directory: Path, stages: Sequence[RunData] | None = None) -> Coverage:
    """Return which rules can judge a run, of its fine-tuning and warm start as well. `stages` are its data, if they are
    read already.

    Raises:
        MachineError: its metrics cannot be read.
    """
    runs = read_run(directory) if stages is None else stages
    # those of the first stages only if nothing came after them
    steps = next((max(run.last_steps) for run in runs if run.last_steps), 0)
    judged, waiting = [], []
    for rule in METRIC_RULES if any(len(run.metrics) for run in runs) else ():
        spec = rule_specs()[rule_name(rule)]
        values = max((len(series) for run in runs for series in run.matching(*spec.metrics)), default=0)
        if not spec.metrics or values >= spec.min_values:
            judged.append(spec.name)
        elif values:
            waiting.append(WaitingRule(spec.name, spec.title, spec.min_values, spec.counts))
    return Coverage(steps, judged, sorted(waiting, key=lambda each: (each.needed, each.unit)))


def diagnose_run(directory: Path, stages: Sequence[RunData] | None = None) -> list[Finding]:
    """Return the findings in a run, critical ones first; their suggestions are changes of its configuration. `stages`
    are its data, if they are read already.

    Raises:
        MachineError: the directory is no run, or a file in it cannot be read.
    """
    if not is_run_directory(directory):
        raise MachineError(f"{directory} is no run directory", hint="`quintet status` lists the runs below runs/")
    run, *others = read_run(directory) if stages is None else stages
    status, limits = read_status(directory), _limits
    findings = [finding for rule in STATE_RULES for finding in rule(run, status, limits(rule))]
    for stage in (run, *others):
        findings += _of_metrics(stage)
    for episode_rule in EPISODE_RULES:
        # validation shows the same as training
        of_files = (finding for file in run.files for finding in episode_rule(run, file, limits(episode_rule)))
        findings += islice(of_files, 1)
    return _sorted(findings)


def rule_name(rule: Callable[..., object]) -> str:
    """Return the name of a rule in `rules.yaml`."""
    return rule.__name__.replace("_", "-")


def _limits(rule: Callable[..., object]) -> Limits:
    return rule_specs()[rule_name(rule)].limits


def _of_metrics(run: RunData) -> list[Finding]:
    return [finding for rule in METRIC_RULES for finding in rule(run, _limits(rule))] if len(run.metrics) else []


def _sorted(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: finding.severity != "critical")
