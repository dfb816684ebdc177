"""Conversion of verl's trainers whose engines have devices of their own, `one_step_off_policy` and
`fully_async_policy`."""

from collections.abc import Iterator

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import ForeignValues, NativeBuilder
from quintet.config.problems import ConfigProblem

TRAINER_NODES, TRAINER_GPUS = "trainer.nnodes", "trainer.n_gpus_per_node"
ENGINE_NODES, ENGINE_GPUS = "rollout.nnodes", "rollout.n_gpus_per_node"
REQUIRED, TRIGGER, CONCURRENT = (
    f"async_training.{key}"
    for key in ("require_batches", "trigger_parameter_sync_step", "concurrent_samples_per_replica")
)
PROMPTS, TOTAL_PROMPTS = "data.train_batch_size", "rollout.total_rollout_steps"
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
EPOCHS = "actor_rollout_ref.actor.ppo_epochs"
STEPS = "actor_rollout_ref.actor.optim.total_training_steps"
SAMPLES, TENSOR = (f"actor_rollout_ref.rollout.{key}" for key in ("n", "tensor_model_parallel_size"))
DEVICES_OF_A_NODE, DEVICES_OF_LARGER_NODES = 8, 16
"""Devices up to which those of learners and engines are taken for devices of the same nodes; larger nodes have NPUs."""


def has_separate_engines(values: ForeignValues) -> bool:
    """Return whether the run is one of these trainers."""
    return ENGINE_GPUS in values.dialect.specs()


def is_fully_async(values: ForeignValues) -> bool:
    """Return whether the run is that of `fully_async_policy`."""
    return REQUIRED in values.dialect.specs()


def prompts_per_step(values: ForeignValues) -> int:
    """Return the number of prompts of a step, which ends with a weight sync."""
    if not is_fully_async(values):
        return int(values[PROMPTS])
    return int(values[MINI_BATCH] * values[REQUIRED] * values[TRIGGER])


def num_engine_gpus(values: ForeignValues) -> int:
    """Return the number of GPUs of engines on all nodes."""
    nodes, gpus = (ENGINE_NODES, ENGINE_GPUS) if has_separate_engines(values) else (TRAINER_NODES, TRAINER_GPUS)
    return int(values[nodes] * values[gpus])


def placement_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of the devices and the steps of these trainers: nodes have the same number of devices here."""
    if has_separate_engines(values) and not _shares_nodes(values) and values[TRAINER_GPUS] != values[ENGINE_GPUS]:
        problem = f"nodes have the same number of devices here, and {values.describe(TRAINER_NODES, TRAINER_GPUS)}"
        yield values.problem(ENGINE_GPUS, problem, f"for example {ENGINE_GPUS}={values[TRAINER_GPUS]}")


def separate_engines_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the devices of learners and engines, and how far the rollout runs ahead: by one step."""
    if not has_separate_engines(values):
        return
    keys = (TRAINER_NODES, TRAINER_GPUS, ENGINE_NODES, ENGINE_GPUS)
    nodes, devices, learner_devices = _placement(values)
    native.set("placement.nodes", nodes, TRAINER_NODES, ENGINE_NODES)
    native.set("placement.devices_per_node", devices, TRAINER_GPUS, ENGINE_GPUS)
    engine_devices = [device for device in range(nodes * devices) if device not in learner_devices]
    native.set("placement.rollout.devices", engine_devices, *keys)
    for component in ("actor", "critic", "reference"):
        native.set(f"placement.{component}.devices", learner_devices, *keys)
    # they need not free their memory for the learners
    native.set("rollout.engine_options.sleep_between_steps", False, ENGINE_GPUS)
    if is_fully_async(values):
        _step_to_native(values, native)
    else:
        native.set("rollout.async_ratio", 1.0, ENGINE_GPUS)
        native.set("rollout.partial", False, ENGINE_GPUS)


def _step_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the size of a step of `fully_async_policy` and the number of steps."""
    mini_batches, prompts = values[REQUIRED] * values[TRIGGER], prompts_per_step(values)
    if values[PROMPTS]:
        step = f"{MINI_BATCH} × {REQUIRED} × {TRIGGER}"
        native.remarks.append(f"{values.describe(PROMPTS)} has no effect: a step has {step} prompts")
    native.set("training.groups_per_step", prompts, MINI_BATCH, REQUIRED, TRIGGER)
    native.set("training.mini_batches", mini_batches, REQUIRED, TRIGGER)
    engines = max(1, num_engine_gpus(values) // values[TENSOR])
    native.set("rollout.max_concurrent", values[CONCURRENT] * values[SAMPLES] * engines, CONCURRENT, SAMPLES)
    if values[TOTAL_PROMPTS] is not None:
        limits = [values[TOTAL_PROMPTS] // prompts, *([values[STEPS]] if (values[STEPS] or -1) > 0 else [])]
        native.set("data.max_steps", max(1, min(limits)), TOTAL_PROMPTS, STEPS)
    if values[EPOCHS] > 1 and mini_batches > 1:
        native.require(EPOCHS, Capability.ASYNC_TRAINERS)


def _shares_nodes(values: ForeignValues) -> bool:
    # nodes of learners and of engines would have the same number of devices
    largest = DEVICES_OF_A_NODE if values[TRAINER_GPUS] == values[ENGINE_GPUS] else DEVICES_OF_LARGER_NODES
    fits = values[TRAINER_GPUS] + values[ENGINE_GPUS] <= largest
    return bool(values[TRAINER_NODES] == values[ENGINE_NODES] and fits)


def _placement(values: ForeignValues) -> tuple[int, int, list[int]]:
    """Return the number of nodes, the devices of each, and the devices of learners."""
    learners, engines = values[TRAINER_GPUS], values[ENGINE_GPUS]
    if not _shares_nodes(values):
        return values[TRAINER_NODES] + values[ENGINE_NODES], learners, list(range(values[TRAINER_NODES] * learners))
    devices = learners + engines
    first = [node * devices for node in range(values[TRAINER_NODES])]
    return values[TRAINER_NODES], devices, [start + index for start in first for index in range(learners)]
