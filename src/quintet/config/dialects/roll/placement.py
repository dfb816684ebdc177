"""Conversion of ROLL's `device_mapping` of each worker."""

from __future__ import annotations

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.roll.workers import LEARNERS, workers

GPUS_PER_NODE = 8
"""GPUs of one node; ROLL's reference has no key for it."""


def placement_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set nodes of 8 GPUs, as many as the highest device number needs, and the devices of each component."""
    devices_by_worker = {worker.name: worker.devices for worker in workers(values)}
    total = 1 + max((max(devices) for devices in devices_by_worker.values() if devices), default=0)
    nodes = -(-total // GPUS_PER_NODE)
    per_node = total if nodes == 1 else GPUS_PER_NODE
    # a worker on the first device alone does not ask for more of them
    names = [name for name, devices in devices_by_worker.items() if devices and max(devices) > 0]
    origins = [f"{name}.device_mapping" for name in names or devices_by_worker]
    native.set("placement.nodes", nodes, *origins)
    native.set("placement.devices_per_node", per_node, *origins)
    on_cpu = not any(devices_by_worker.values())
    for name, devices in devices_by_worker.items():
        on_all = on_cpu or devices == tuple(range(nodes * per_node))
        component = f"placement.{LEARNERS.get(name, 'rollout')}"
        native.set(f"{component}.devices", None if on_all else devices or (), f"{name}.device_mapping")
    learner, engine = (set(devices_by_worker[name] or ()) for name in ("actor_train", "actor_infer"))
    separate = bool(learner and engine and not learner & engine)
    native.set("placement.colocated", not separate, "actor_train.device_mapping", "actor_infer.device_mapping")


def placement_from_native(foreign: ForeignBuilder) -> None:
    """Set the `device_mapping` of each worker."""
    run, placement = foreign.experiment, foreign.experiment.placement
    components = {"actor_train": placement.actor, "actor_infer": placement.rollout}
    components |= {"reference": placement.reference} if run.algorithm.kl else {}
    components |= {"critic": placement.critic} if run.needs_critic else {}
    all_devices = range(placement.nodes * placement.devices_per_node)
    for name, component in components.items():
        devices = all_devices if component.devices is None else component.devices
        foreign.set(f"{name}.device_mapping", _format_devices(tuple(devices)))


def _format_devices(devices: tuple[int, ...]) -> str | None:
    if not devices:
        return None
    is_range = devices == tuple(range(devices[0], devices[-1] + 1))
    return f"list(range({devices[0]},{devices[-1] + 1}))" if is_range else str(list(devices))
