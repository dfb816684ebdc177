"""How weights reach engines in processes without the actor."""

from collections.abc import Iterator
from dataclasses import dataclass

from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.config.plan.process_layout import process_layout
from quintet.config.problems import ConfigProblem

KEY = "placement.weight_transfer"


@dataclass(frozen=True, slots=True)
class WeightTransfer:
    """Transfer of weights to the engines of some ranks."""

    transfer: str
    """`shared_memory`, `process_group` or `tcp`."""
    ranks: tuple[int, ...]
    reason: str


def choose_weight_transfer(config: Experiment, *, same_node: bool) -> str:
    """Return the transfer to an engine; `same_node` says whether it shares memory with the controller."""
    setting = config.placement.weight_transfer
    if setting != "auto":
        return setting
    return "shared_memory" if same_node else "process_group"


def weight_transfers(config: Experiment) -> tuple[WeightTransfer, ...]:
    """Return the transfers of a run; empty if all engines are in the processes of learners."""
    is_auto = config.placement.weight_transfer == "auto"
    transfers = []
    for same_node, ranks in _engine_ranks(config).items():
        location = "on the controller's node" if same_node else "on other nodes"
        reason = location if is_auto else f"{location}; {KEY}"
        transfers += [WeightTransfer(choose_weight_transfer(config, same_node=same_node), ranks, reason)] * bool(ranks)
    return tuple(transfers)


def weight_transfer_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield a transfer that no engine uses or that cannot reach one."""
    config = composed.experiment
    if config.placement.weight_transfer == "auto" or config.sft_only or config.generation:
        return
    ranks = _engine_ranks(config)
    hint = f"set {KEY}=auto"
    if not any(ranks.values()):
        problem = "every engine is in the process of a learner, from which it takes its weights"
        yield composed.problem(KEY, problem, hint)
    elif ranks[False] and config.placement.weight_transfer == "shared_memory":
        names = ", ".join(map(str, ranks[False]))
        yield composed.problem(KEY, f"the engines of ranks {names} are not on the controller's node", hint)


def _engine_ranks(config: Experiment) -> dict[bool, tuple[int, ...]]:
    """Return the ranks with engines but no learner: those on the controller's node (True), and the others."""
    layout, options = process_layout(config), config.rollout.engine_options
    per_engine = options.tensor_parallel * options.pipeline_parallel
    ranks = layout.standalone.get("rollout", ())[::per_engine]
    nodes = {rank: layout.devices[rank] // layout.devices_per_node for rank in (0, *ranks)}
    return {same: tuple(rank for rank in ranks if (nodes[rank] == nodes[0]) is same) for same in (True, False)}
