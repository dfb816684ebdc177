"""Parallelism of a model over devices, and which degrees cannot work."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from quintet.config.divisors import divisors, nearest_number
from quintet.config.native.learners import ParallelConfig
from quintet.config.plan.model_shapes import ModelShape

Problem = tuple[str, str]
"""Field of `Parallelism` that is invalid, and why."""
LABELS = {"tensor": "tensor", "pipeline": "pipeline", "context": "context", "ulysses": "Ulysses", "expert": "expert"}
"""Display names of degrees."""
UNSUPPORTED = {
    "megatron": {"ulysses": "fsdp and fsdp2"},
    "fsdp": dict.fromkeys(("tensor", "pipeline", "expert"), "fsdp2 and megatron"),
}
"""Degrees that a backend does not support, and the backends that do."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Parallel degrees of one model."""

    backend: str
    """`fsdp`, `fsdp2`, `megatron` or `engine`."""
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    ulysses: int = 1
    expert: int = 1
    group: int | None = None
    """Devices in one FSDP sharding group; None for all."""
    sequence: bool = False
    """Sequence parallelism: tensor-parallel devices split norms and dropout along the sequence."""

    @property
    def devices_per_copy(self) -> int:
        """Devices per data-parallel rank."""
        return self.tensor * self.pipeline * self.context * self.ulysses

    @property
    def weight_split(self) -> int:
        """Devices with different weights of one copy, apart from experts."""
        return self.tensor * self.pipeline

    @property
    def degrees(self) -> Mapping[str, int]:
        """Degrees greater than 1 by their display names."""
        sizes = {label: getattr(self, name) for name, label in LABELS.items()}
        return {label: size for label, size in sizes.items() if size > 1}


def learner_parallelism(backend: str, parallel: ParallelConfig, group: int | None) -> Parallelism:
    """Return the parallelism that a learner's section sets."""
    return Parallelism(backend, group=None if backend == "megatron" else group, **parallel.model_dump())


def parallelism_problems(parallelism: Parallelism, devices: int, shape: ModelShape | None) -> Iterator[Problem]:
    """Yield what cannot work on that many devices; checks of the model are skipped if its shape is None."""
    yield from _check_backend(parallelism)
    yield from _check_devices(parallelism, devices)
    if shape is None:
        return
    yield from _check_layers(parallelism, shape)
    yield from _check_heads(parallelism, shape)
    yield from _check_experts(parallelism, shape)


def nearest_size(parallelism: Parallelism, part: str, devices: int, shape: ModelShape | None) -> int | None:
    """Return the degree nearest to the present one with which all checks pass, otherwise with which its own do."""
    present = getattr(parallelism, part)
    sizes = {*divisors(devices), *(divisors(shape.layers) if shape else ())}
    changed = {size: replace(parallelism, **{part: size}) for size in sizes}
    invalid = {size: dict(parallelism_problems(split, devices, shape)) for size, split in changed.items()}
    valid = [size for size, parts in invalid.items() if not parts]
    return nearest_number(present, valid or [size for size, parts in invalid.items() if part not in parts])


def _check_backend(parallelism: Parallelism) -> Iterator[Problem]:
    for part, backends in UNSUPPORTED.get(parallelism.backend, {}).items():
        if getattr(parallelism, part) > 1:
            target = "sequences by heads" if part == "ulysses" else "a model"
            yield part, f"only {backends} can split {target} so, and the backend is {parallelism.backend}"
    if parallelism.virtual_pipeline > 1 and parallelism.pipeline == 1:
        yield "virtual_pipeline", "without a pipeline there are no stages to cut"


def _check_devices(parallelism: Parallelism, devices: int) -> Iterator[Problem]:
    """Check that copies of the model, copies of the experts and sharding groups fill the devices.

    Megatron never splits an expert: its copies also lie on the devices that split the other layers.
    """
    experts = ("pipeline", "expert") if parallelism.backend == "megatron" else ("tensor", "pipeline", "expert")
    for names in (("tensor", "pipeline", "context", "ulysses"), experts):
        sizes = {name: getattr(parallelism, name) for name in names}
        needed = math.prod(sizes.values())
        available = f"the {devices} devices" if devices > 1 else "one device"
        if devices % needed and ("expert" not in names or parallelism.expert > 1):
            product = " × ".join(f"{LABELS[name]} {size}" for name, size in sizes.items() if size > 1)
            yield _invalid_part(sizes, devices), f"{product} does not divide {available}"
            break
    yield from _check_groups(parallelism, devices)


def _check_groups(parallelism: Parallelism, devices: int) -> Iterator[Problem]:
    """Check that sharding groups divide the devices that share weights; a larger group takes all of them."""
    sharing, within = devices // (parallelism.tensor * parallelism.pipeline), parallelism.context * parallelism.ulysses
    if parallelism.group is None or parallelism.group >= sharing:
        return
    if sharing % parallelism.group:
        which = "" if sharing == devices else " that compute with the same weights"
        yield "group", f"groups of {parallelism.group} do not fill the {sharing} devices{which}"
    elif parallelism.group % within:
        yield "group", f"groups of {parallelism.group} cut through the {within} devices that share a sequence"


def _invalid_part(sizes: Mapping[str, int], devices: int) -> str:
    """Return the degree without which the others fit, otherwise the largest."""
    product = math.prod(sizes.values())
    alone = [name for name, size in sizes.items() if size > 1 and devices % (product // size) == 0]
    return max(alone or sizes, key=sizes.__getitem__)


def _check_layers(parallelism: Parallelism, shape: ModelShape) -> Iterator[Problem]:
    stages, layers = parallelism.pipeline * parallelism.virtual_pipeline, f"the {shape.layers} layers of the model"
    if parallelism.backend == "fsdp2" and shape.layers < stages:
        part = "pipeline" if shape.layers < parallelism.pipeline else "virtual_pipeline"
        yield part, f"{stages} parts are more than {layers}"
    if parallelism.backend in ("fsdp2", "engine"):
        return
    if shape.layers % parallelism.pipeline:
        yield "pipeline", f"it does not divide {layers}"
    elif shape.layers % stages:
        yield "virtual_pipeline", f"{stages} parts of stages do not divide {layers}"


def _check_heads(parallelism: Parallelism, shape: ModelShape) -> Iterator[Problem]:
    """Check attention heads and key-value heads.

    Learners split key-value heads like the others; engines and Ulysses replicate them if they are too few. Ulysses
    splits the heads that tensor parallelism leaves on each device.
    """
    tensor = parallelism.tensor
    for part, can_repeat in (("tensor", parallelism.backend == "engine"), ("ulysses", True)):
        size = getattr(parallelism, part)
        heads = shape.heads
        kv_heads = shape.kv_heads
        owner = "of the model"
        if part == "ulysses" and tensor > 1:
            heads, kv_heads = max(1, heads // tensor), max(1, kv_heads // tensor)
            owner = f"that tensor {tensor} leaves to a device"
        if heads % size:
            yield part, f"it does not divide the {heads} attention heads {owner}"
        elif kv_heads % size and not (can_repeat and size % kv_heads == 0) and shape.latent is None:
            yield part, f"it does not divide the {kv_heads} key-value heads {owner}"


def _check_experts(parallelism: Parallelism, shape: ModelShape) -> Iterator[Problem]:
    if parallelism.backend == "megatron" and shape.experts and parallelism.tensor > 1 and not parallelism.sequence:
        yield "tensor", "Megatron splits layers of a mixture of experts only with parallel.sequence=true"
    if parallelism.expert == 1:
        return
    if shape.experts is None:
        yield "expert", "the model has no experts"
    elif shape.experts.count % parallelism.expert:
        yield "expert", f"it does not divide the {shape.experts.count} experts of the model"
