"""`quintet plan`: check a configuration and print what a run would do, without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence

from quintet.cli.choices import check_action_policy, missing_packages, unknown_choices
from quintet.cli.config_source import NATIVE
from quintet.cli.configuration import InspectedConfig, inspect_config
from quintet.cli.cpu_rate import measure_cpu
from quintet.cli.key_table import print_keys
from quintet.cli.plan_table import print_plan
from quintet.cli.row_checks import check_graded_rows
from quintet.config.checks.processes import torchrun_command
from quintet.config.checks.unsupported import unsupported_values
from quintet.config.key_states import KeyState, count_states, describe_counts, key_states
from quintet.config.model_locations.locations import is_hub_name
from quintet.config.plan.format_sizes import GIB
from quintet.config.plan.run_plan import plan_run
from quintet.config.problems import ConfigProblem, raise_problems
from quintet.errors import UnsupportedRunError


def run(
    config: str | None,
    overrides: list[str],
    dialect: str | None,
    unknown_keys: str,
    *,
    as_json: bool = False,
    only_keys: bool = False,
    device_memory: float | None = None,
) -> None:
    """Check the configuration and print the plan of the run, or only the state of each key that is set.

    Values that this version or this machine does not support are listed, not refused.

    Raises:
        ConfigError: something cannot work anywhere, does not fit into `device_memory` GiB, or rows cannot be graded.
    """
    try:
        inspected = inspect_config(config, overrides, dialect, unknown_keys)
    except UnsupportedRunError as error:
        _print_unsupported_run(error, as_json=as_json)
        return
    unsupported = [problem for problem in inspected.unsupported if not problem.elsewhere]
    check_action_policy(inspected.composed)
    missing = (*(problem for problem in inspected.unsupported if problem.elsewhere), *_missing(inspected))
    states = key_states(inspected.runnable, (*inspected.unsupported, *missing))
    if only_keys:
        _print_keys(states, as_json=as_json)
        return
    plan = plan_run(inspected.composed, None if device_memory is None else int(device_memory * GIB))
    if plan.data is not None and plan.data.rows is not None and not missing:
        check_graded_rows(inspected.composed)
    remarks = (*inspected.composed.remarks, *inspected.remarks)
    shape = plan.timed_shape
    step_seconds = None if shape is None else plan.step_seconds(measure_cpu(shape))
    start, release = torchrun_command(inspected.composed.experiment), inspected.composed.release
    if as_json:
        lists = {"not_yet": _to_json(unsupported), "not_here": _to_json(missing), "remarks": list(remarks)}
        content = plan.to_json() | {"start": start, "step_seconds": step_seconds}
        content |= {"release": release or None, "keys": count_states(states)}
        print(json.dumps(content | lists, indent=1))
    else:
        keys = describe_counts(states)
        print_plan(
            plan,
            start=start,
            release=release,
            unsupported=unsupported,
            missing=missing,
            remarks=remarks,
            keys=keys,
            step_seconds=step_seconds,
        )


def _print_keys(states: Sequence[KeyState], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([each.to_json() for each in states], indent=1, default=str))
    else:
        print_keys(states)


def _print_unsupported_run(error: UnsupportedRunError, *, as_json: bool) -> None:
    """Print that this version lacks a kind of run, whose numbers are therefore not known."""
    if as_json:
        problem = ConfigProblem("", None, error.source or "", error.message)
        print(json.dumps({"run": None, "not_yet": _to_json([problem]), "not_here": [], "remarks": []}, indent=1))
    else:
        print(f"Not yet: {error.message}")


def _to_json(problems: Sequence[ConfigProblem]) -> list[dict[str, object]]:
    return [{name: getattr(problem, name) for name in ("key", "value", "source", "message")} for problem in problems]


def _missing(inspected: InspectedConfig) -> tuple[ConfigProblem, ...]:
    """Return names, models and packages that are missing on this machine.

    Unknown names in a native configuration are refused. Names of other frameworks, models of the hub and unsupported
    values are not looked up.
    """
    pending = {unsupported.key for unsupported in unsupported_values(inspected.composed.experiment)}
    unknown = [
        problem
        for problem in unknown_choices(inspected.composed)
        if pending.isdisjoint((problem.key, problem.key.removesuffix(".name"))) and not _is_on_hub(problem)
    ]
    if inspected.dialect == NATIVE:
        raise_problems(unknown)
        unknown = []
    return (*unknown, *missing_packages(inspected.composed))


def _is_on_hub(problem: ConfigProblem) -> bool:
    return (
        problem.key.endswith(("policy.path", "judge.server.path"))
        and isinstance(problem.value, str)
        and is_hub_name(problem.value)
    )
