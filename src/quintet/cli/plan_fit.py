"""`quintet plan --fit`: propose settings with which a run fits into given devices, without torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Column
from rich.text import Text

from quintet import hardware
from quintet.cli.config_source import with_further
from quintet.cli.configuration import inspect_config, reread_config
from quintet.cli.options import PlanOptions
from quintet.cli.plan_table import describe_parallelism, format_time
from quintet.cli.tables import page, plain_table, section
from quintet.cli.translate import check_new_file, write_text
from quintet.config.composed import ComposedConfig
from quintet.config.divisors import divisors
from quintet.config.fit.proposals import EQUAL_TIMES, FitResult, Proposal, find_fits
from quintet.config.fit.variants import Cluster
from quintet.config.native.experiment import Experiment
from quintet.config.plan.devices import REFERENCE_DEVICE, DeviceFigures, device_of_machine, find_device
from quintet.config.plan.format_sizes import GIB, format_bytes
from quintet.config.plan.placement import Component
from quintet.config.yaml_writer import dump_config
from quintet.errors import ConfigError

DEVICES_PER_NODE = 8
"""Devices of a node if neither the options nor the configuration say it, as in the vendors' reference systems."""


def run(
    config: str | None,
    overrides: list[str],
    dialect: str | None,
    unknown_keys: str,
    options: PlanOptions,
    *,
    as_json: bool = False,
) -> None:
    """Print the proposals, and write one of them as a native configuration.

    Raises:
        ConfigError: nothing fits, or an option is missing or invalid.
        MachineError: a file cannot be read or written.
    """
    if options.write is not None and options.output is None:
        raise ConfigError("--write needs a file", key="--write", hint=f"--write {options.write} -o FILE")
    check_new_file(options.output)
    composed = inspect_config(config, overrides, dialect, unknown_keys).composed
    cluster = _cluster(composed.experiment, options)

    def reload(changes: Sequence[str]) -> ComposedConfig:
        return reread_config(config, with_further(overrides, changes), dialect, unknown_keys)

    result = find_fits(composed, cluster, reload, progress=_ProgressLines())
    chosen = _chosen(result, options.write or 1)
    if as_json:
        print(json.dumps(_to_json(result, cluster), indent=1))
    else:
        _print(result, cluster, composed.experiment.name)
    if options.output is not None:
        write_text(dump_config(chosen.composed), options.output)


class _ProgressLines:
    """Prints how far a search is after a second, and then whenever it has taken twice as long."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._next = 1.0

    def __call__(self, considered: int) -> None:
        seconds = time.monotonic() - self._started
        if seconds >= self._next:
            print(f"{considered:,} parallel sizes considered in {seconds:.0f} s", file=sys.stderr)
            self._next = 2 * seconds


def _chosen(result: FitResult, number: int) -> Proposal:
    count = len(result.proposals)
    if number > count:
        hint = f"valid: 1 to {count}" if count > 1 else "valid: 1"
        raise ConfigError(f"--write {number}: there is no such proposal", key="--write", value=number, hint=hint)
    return result.proposals[number - 1]


def _cluster(config: Experiment, options: PlanOptions) -> Cluster:
    """Return the devices of the options, otherwise those of the configuration or of this machine."""
    placed = config.placement
    per_node = placed.devices_per_node if placed.devices_per_node > 1 else hardware.num_gpus()
    devices = options.devices or (options.nodes or placed.nodes) * max(1, per_node)
    nodes = options.nodes or _nodes(config, devices)
    if devices % nodes:
        hint = f"--devices is the number of devices of all nodes: --devices {-(-devices // nodes) * nodes}"
        message = f"--devices {devices}: {nodes} nodes cannot have equally many"
        raise ConfigError(message, key="--devices", value=devices, hint=hint)
    figures, memory = _device(options)
    return Cluster(nodes, devices // nodes, memory, figures)


def _nodes(config: Experiment, devices: int) -> int:
    """Return the number of nodes: the configured one, otherwise as few as the size of a node allows."""
    placed = config.placement
    if placed.nodes * placed.devices_per_node == devices:
        return placed.nodes
    largest = max(DEVICES_PER_NODE, placed.devices_per_node)
    return next(nodes for nodes in divisors(devices) if devices // nodes <= largest)


def _device(options: PlanOptions) -> tuple[DeviceFigures, int]:
    """Return figures and memory in bytes of a device.

    Raises:
        ConfigError: it is unknown, or neither an option nor this machine tells its memory.
    """
    memory = None if options.device_memory is None else int(options.device_memory * GIB)
    if options.device is not None:
        figures = find_device(options.device)
        return figures, memory or int(figures.memory)
    present = device_of_machine()
    if present is None and memory is None:
        message = "--fit needs the memory of a device, and this machine has no GPU that nvidia-smi shows"
        raise ConfigError(message, key="--device", hint="--device h100, or --device-memory 80")
    present_device, size = present or (None, 0)
    return present_device or find_device(REFERENCE_DEVICE), memory or size


def _to_json(result: FitResult, cluster: Cluster) -> dict[str, Any]:
    """Return proposals and devices as a JSON object; times in seconds, memory in bytes of one device."""
    return {
        "cluster": {
            "nodes": cluster.nodes,
            "devices": cluster.devices,
            "device_bytes": cluster.device_bytes,
            "usable_bytes": cluster.usable_bytes,
            "figures": cluster.figures.name,
        },
        "proposals": [
            {
                "overrides": list(proposal.overrides),
                "step_seconds": proposal.step_seconds,
                "phases": dict(proposal.seconds),
                "peak_bytes": proposal.peak.total,
                "peak_phase": proposal.peak.phase,
                "reason": proposal.reason,
            }
            for proposal in result.proposals
        ],
        "considered": result.considered,
        "rejected": dict(result.rejected.most_common()),
    }


def _print(result: FitResult, cluster: Cluster, name: str) -> None:
    nodes = f"{cluster.nodes} nodes × " if cluster.nodes > 1 else ""
    devices = f"{nodes}{cluster.devices_per_node} × {format_bytes(cluster.device_bytes)}"
    with page() as out:
        heading = Text(f"{name}  ", style="bold")
        out.print(heading.append(f"{devices}, {format_bytes(cluster.usable_bytes)} usable", style="not bold"))
        section(out, f"Proposals, step times estimated with the figures of {cluster.figures.name}")
        _print_table(out, result)
        section(out, "Overrides")
        for number, proposal in enumerate(result.proposals, start=1):
            text = " ".join(proposal.overrides) or "the configuration as it is"
            out.print(Text(f"  {number}  {text}"), soft_wrap=True)
            out.print(Text(f"     {proposal.reason}", style="dim"), soft_wrap=True)
        section(out, "Rejected")
        common = "".join(f", most often: {reason}" for reason, _ in result.rejected.most_common(1))
        counts = f"{result.rejected.total():,} of {result.considered:,} combinations"
        out.print(Text(f"  {counts}{common}"), soft_wrap=True)


def _print_table(out: Console, result: FitResult) -> None:
    numbers = (Column(title, justify="right", no_wrap=True) for title in ("", "step", "peak"))
    table = plain_table(*numbers, "actor", "engines")
    for number, proposal in enumerate(result.proposals, start=1):
        cells = map(_describe, filter(None, map(proposal.placement.of, ("actor", "rollout"))))
        table.add_row(str(number), format_time(proposal.step_seconds), format_bytes(proposal.peak.total), *cells)
    out.print(Padding(table, (0, 0, 0, 2)))
    percent = f"{EQUAL_TIMES - 1:.0%}"
    out.print(f"  Times within {percent} count as equal; of those, the one that changes less comes first.", style="dim")


def _describe(component: Component) -> str:
    is_single_device = component.parallelism.devices_per_copy == component.copies == component.num_processes
    is_alone = component.name == "rollout" and component.parallelism.devices_per_copy == 1
    return f"{component.copies} × {'1 device' if is_single_device or is_alone else describe_parallelism(component)}"
