"""Number of devices that a configuration asks for, compared with the processes that run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.config.plan.placement import LOGPROBS_DEVICES, idle_log_prob_workers, place_components
from quintet.config.plan.process_layout import STANDALONE_LEARNERS, process_layout
from quintet.config.problems import ConfigProblem
from quintet.config.torchrun import RankInfo, current_rank

COUNTS = ("placement.nodes", "placement.devices_per_node")
"""Keys that set the number of devices."""
SFT_DEVICES = "sft.devices"
PLACEABLE = ("actor", "rollout", "envs", *STANDALONE_LEARNERS)
"""Components that may have devices without the actor."""


@dataclass(frozen=True, slots=True)
class DeviceDemand:
    """Number of devices that a stage of the run asks for, and the keys that set it."""

    keys: tuple[str, ...]
    devices: int


def device_demands(config: Experiment) -> list[DeviceDemand]:
    """Return the demands of supervised fine-tuning and of reinforcement learning, if the run has them."""
    demands = []
    if config.sft is not None:
        keys = (SFT_DEVICES,) if "devices" in config.sft.model_fields_set else COUNTS
        demands.append(DeviceDemand(keys, _fine_tuning_processes(config)))
    if config.sft_only is None and config.evaluation is None:
        demands.append(DeviceDemand((*COUNTS, "placement.actor.devices"), process_layout(config).size))
    return demands


def _fine_tuning_processes(config: Experiment) -> int:
    """Return the number of processes of a run that fine-tunes, those without a learner included."""
    if config.sft_only is not None:
        return config.sft_devices
    if config.sft is not None and "devices" in config.sft.model_fields_set:
        return config.sft.devices + _processes_without_learner(config)
    return process_layout(config).size


def _processes_without_learner(config: Experiment) -> int:
    """Return the number of processes that take no part in fine-tuning."""
    if config.sft_only is not None:
        return 0
    layout = process_layout(config)
    return layout.size - len(layout.learner_ranks)


def placement_keys_satisfied_by_processes(config: Experiment, rank: RankInfo) -> frozenset[str]:
    """Return the placement keys that are met by one process per device."""
    if rank.size == 1 or any(demand.devices != rank.size for demand in device_demands(config)):
        return frozenset()
    layout = process_layout(config)
    placed = (
        f"placement.{component.name}.devices"
        for component in place_components(config).components
        if component.name in PLACEABLE or not layout.has_standalone(component.name)
    )
    beside_actor = (f"placement.{name}.devices" for name in STANDALONE_LEARNERS if _is_beside_actor(config, name))
    keys = (*COUNTS, "placement.colocated", "placement.rollout.devices_per_worker", LOGPROBS_DEVICES)
    return frozenset((*keys, *placed, *beside_actor))


def _is_beside_actor(config: Experiment, name: str) -> bool:
    """Return whether a component, if the run has it, is on devices of the actor, which have processes anyway."""
    actor, devices = place_components(config).of("actor"), getattr(config.placement, name).devices
    return actor is not None and set(devices or ()) <= set(actor.devices)


def planned_rank(config: Experiment) -> RankInfo:
    """Return rank 0 of the processes that the configuration asks for, for plans.

    It is the rank of this process if torchrun started it, or if the stages of the run ask for different numbers.
    """
    rank, counts = current_rank(), {demand.devices for demand in device_demands(config)}
    if rank.size > 1 or len(counts) != 1:
        return rank
    devices = counts.pop()
    nodes = config.placement.nodes if config.sft_only else process_layout(config).num_nodes
    return RankInfo(0, devices, 0, devices if devices % nodes else devices // nodes)


def devices_to_set(config: Experiment, rank: RankInfo, is_set: Callable[[str], bool]) -> Iterator[tuple[str, int]]:
    """Yield the device keys that nobody set and the values with which devices equal processes."""
    if config.sft is not None and not is_set(SFT_DEVICES):
        num_learners = rank.size - _processes_without_learner(config)
        if config.sft.devices != num_learners:
            yield SFT_DEVICES, num_learners
    if config.sft_only or rank.size == 1:
        return
    for demand in device_demands(config):
        if demand.keys[0] in COUNTS and demand.devices != rank.size and not is_set(demand.keys[-1]):
            counts = zip(COUNTS, (rank.size // rank.local_size, rank.local_size), strict=True)
            yield from ((key, count) for key, count in counts if not is_set(key))


def process_problems(composed: ComposedConfig, rank: RankInfo) -> Iterator[ConfigProblem]:
    """Yield demands that differ from the number of processes, and components that cannot have the devices they have.

    For a single process, `COUNTS` are left to `unsupported_value_problems`.
    """
    config = composed.experiment
    yield from _divergence_problems(composed)
    yield from idle_log_prob_workers(composed)
    for demand in device_demands(config):
        if demand.devices == rank.size or (rank.size == 1 and demand.keys[0] in COUNTS):
            continue
        key = next((key for key in reversed(demand.keys) if composed.source(key) != "default"), demand.keys[0])
        running = "this is one process" if rank.size == 1 else f"torchrun started {rank.size} processes"
        unit = "devices" if demand.devices <= len(place_components(config).devices) else "processes"
        message = f"{composed.describe(key)}: the run needs {demand.devices} {unit}, and {running}"
        start = "no torchrun, as `quintet …`" if demand.devices == 1 else launch_command(config, demand.devices)
        start += f" or `{ray_command(config)}`" if rank.size == 1 else ""
        yield ConfigProblem(key, demand.devices, composed.source(key), message, f"start it with {start}")


def _divergence_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield a full divergence from a reference on other devices: its logits are not sent."""
    config, key = composed.experiment, "placement.reference.devices"
    kl, actor = config.algorithm.kl, place_components(config).of("actor")
    if kl is None or kl.estimator != "full" or actor is None or not process_layout(config).has_standalone("reference"):
        return
    estimator = composed.describe("algorithm.kl.estimator")
    why = f"a divergence over the whole vocabulary needs the reference on the devices of the actor: {estimator}"
    yield composed.problem(key, why, f"{key}={list(actor.devices)}, or algorithm.kl.estimator=k3")


def launch_command(config: Experiment, devices: int) -> str:
    """Return the torchrun command for that many devices, in backquotes."""
    nodes = config.placement.nodes
    nodes_option = f"--nnodes {nodes} " if nodes > 1 and devices % nodes == 0 else ""
    per_node = devices // nodes if nodes_option else devices
    return f"`torchrun {nodes_option}--nproc-per-node {per_node} -m quintet {_command(config)} …`"


def ray_command(config: Experiment) -> str:
    """Return the command that starts the processes through Ray."""
    return f"quintet {_command(config)} … --ray {'HOST:PORT' if config.placement.nodes > 1 else 'local'}"


def _command(config: Experiment) -> str:
    return "sft" if config.sft_only else "generate" if config.generation else "train"


def torchrun_command(config: Experiment) -> str | None:
    """Return the torchrun command of a run that needs several processes and no cluster, None for any other."""
    rank = planned_rank(config)
    is_placed = config.sft_only is not None or placement_keys_satisfied_by_processes(config, rank).issuperset(COUNTS)
    return launch_command(config, rank.size).strip("`") if rank.size > 1 and is_placed else None
