"""`--ray` of `quintet train`, `sft` and `generate`: start the ranks of a run through Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Literal

from quintet.cli import generate
from quintet.cli.config_source import with_further
from quintet.cli.configuration import inspect_config
from quintet.cli.ranks import hide_other_gpus
from quintet.cli.sft import check_sft
from quintet.config.checks.processes import planned_rank
from quintet.config.composed import ComposedConfig
from quintet.config.plan.placement import check_placement
from quintet.config.plan.process_layout import process_layout
from quintet.config.torchrun import current_rank
from quintet.errors import ConfigError

JOB_ENDPOINTS = ("http://", "https://")
"""Beginnings of addresses to which the run is submitted as a job."""


def run(
    command: Literal["train", "sft", "generate"],
    address: str,
    config: str | None,
    overrides: Sequence[str],
    dialect: str | None,
    unknown_keys: str,
    max_restarts: int,
) -> int:
    """Start the command once per device of the configuration, or submit it as a job; return the exit status.

    Raises:
        ConfigError: the configuration is invalid, or the cluster does not have the devices.
        MachineError: the cluster cannot be reached, or ranks failed more than `max_restarts` times.
    """
    if current_rank().size > 1:
        raise ConfigError(
            "--ray starts the processes itself, and torchrun has started this one", key="--ray", hint="omit torchrun"
        )
    composed = inspect_config(config, list(overrides), dialect, unknown_keys).composed
    if command == "sft":
        check_sft(composed)
    if command == "generate" or composed.experiment.generation is not None:
        composed = generate.prepared(composed)
    check_placement(composed)
    options = ["--unknown-keys", unknown_keys, *(["--dialect", dialect] if dialect else [])]
    arguments = [command, *with_further([word for word in (config, *overrides) if word is not None], options)]
    if address.startswith(JOB_ENDPOINTS):
        from quintet.runtime.ray_cluster.job import submit_job

        further = ["--ray", "auto", "--max-restarts", str(max_restarts)]
        job = [sys.executable, "-m", "quintet", *with_further(arguments, further)]
        return submit_job(address, job, os.getcwd(), _show)
    return _launch(address, composed, arguments, max_restarts)


def _launch(address: str, composed: ComposedConfig, arguments: Sequence[str], max_restarts: int) -> int:
    """Start the ranks from this process."""
    from quintet.runtime.ray_cluster.launcher import RankCommand, run_on_ray
    from quintet.runtime.run_registration import registered_launcher
    from quintet.tracking.run_directory import RunDirectory

    hide_other_gpus(composed.experiment)
    layout, placement = process_layout(composed.experiment), composed.experiment.placement
    directory = RunDirectory.create_for(composed)
    rank_command = RankCommand(
        [sys.executable, "-m", "quintet.cli.launched_rank", *arguments],
        os.getcwd(),
        planned_rank(composed.experiment),
        placement.join_timeout_seconds,
        placement.lost_after_seconds,
        directory.processes.process_of,
        layout.restartable_ranks,
        layout.cpu_ranks,
        layout.used_devices_per_node,
        [layout.components_of(rank) for rank in range(layout.size)],
    )
    with registered_launcher(directory, rank_command.ranks):
        return run_on_ray(address, rank_command, max_restarts, _show)


def _show(text: str) -> None:
    print(text, end="", flush=True)
