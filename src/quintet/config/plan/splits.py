"""How one model is split over devices, and which splits can't work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from quintet.config.native.learners import ParallelConfig
from quintet.config.plan.shapes import Shape
from quintet.config.plan.values import divisors, nearest_number

__all__ = ["Split", "engine_split", "learner_split", "nearest_size", "problems"]

Problem = tuple[str, str]
"""The part of the split that is to blame, and why."""
WORDS = {
    "tensor": "tensor",
    "pipeline": "pipeline",
    "context": "context",
    "ulysses": "Ulysses",
    "expert": "expert",
}
FOREIGN = {
    "megatron": {"ulysses": "fsdp and fsdp2"},
    "fsdp": dict.fromkeys(("tensor", "pipeline", "expert"), "fsdp2 and megatron"),
}
"""Ways to split that a backend doesn't have, and who has them."""


@dataclass(frozen=True, slots=True)
class Split:
    """How many devices share one model, and what each has of it."""

    backend: str
    """`fsdp`, `fsdp2`, `megatron` or `engine`."""
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    ulysses: int = 1
    expert: int = 1
    group: int | None = None
    """Devices that share one copy under FSDP; None for all."""
    sequence: bool = False
    """Whether devices that share layers share tokens between them too."""

    @property
    def devices_per_copy(self) -> int:
        """Devices that work on the same sequences."""
        return self.tensor * self.pipeline * self.context * self.ulysses

    @property
    def words(self) -> Mapping[str, int]:
        """The sizes that aren't 1, as people call them."""
        sizes = {word: getattr(self, name) for name, word in WORDS.items()}
        return {word: size for word, size in sizes.items() if size > 1}


def learner_split(backend: str, parallel: ParallelConfig, group: int | None) -> Split:
    """As a learner's section has it."""
    return Split(
        backend,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        context=parallel.context,
        ulysses=parallel.ulysses,
        expert=parallel.expert,
        group=None if backend == "megatron" else group,
        sequence=parallel.sequence,
    )


def engine_split(tensor: int, pipeline: int) -> Split:
    """As the engine's section has it."""
    return Split("engine", tensor=tensor, pipeline=pipeline)


def problems(split: Split, devices: int, shape: Shape | None) -> Iterator[Problem]:
    """Everything about a split that can't work on so many devices; of a model that isn't known, what can be said."""
    yield from _backend(split)
    yield from _devices(split, devices)
    if shape is None:
        return
    yield from _layers(split, shape)
    yield from _heads(split, shape)
    yield from _experts(split, shape)


def nearest_size(split: Split, part: str, devices: int, shape: Shape | None) -> int | None:
    """The size nearest to the one that is to blame with which everything works, else with which this part does."""
    wanted = getattr(split, part)
    sizes = {*divisors(devices), *(divisors(shape.layers) if shape else ())}
    found = {size: list(problems(replace(split, **{part: size}), devices, shape)) for size in sizes}
    whole = [size for size, left in found.items() if not left]
    own = [size for size, left in found.items() if all(blamed != part for blamed, _ in left)]
    return nearest_number(wanted, whole or own)


def _backend(split: Split) -> Iterator[Problem]:
    for part, able in FOREIGN.get(split.backend, {}).items():
        if getattr(split, part) > 1:
            what = "sequences by heads" if part == "ulysses" else "a model"
            yield part, f"only {able} can split {what} so, and the backend is {split.backend}"
    if split.virtual_pipeline > 1 and split.pipeline == 1:
        yield "virtual_pipeline", "without a pipeline there are no stages to cut"


def _devices(split: Split, devices: int) -> Iterator[Problem]:
    """Copies of the model must fill the devices, copies of the experts too, and so must sharding groups."""
    for names in (("tensor", "pipeline", "context", "ulysses"), ("tensor", "pipeline", "expert")):
        sizes = {name: getattr(split, name) for name in names}
        needed = math.prod(sizes.values())
        there = f"the {devices} devices" if devices > 1 else "one device"
        if devices % needed and ("expert" not in names or split.expert > 1):
            told = " × ".join(f"{WORDS[name]} {size}" for name, size in sizes.items() if size > 1)
            yield _to_blame(sizes, devices), f"{told} doesn't divide {there}"
            break
    yield from _groups(split, devices)


def _groups(split: Split, devices: int) -> Iterator[Problem]:
    """Sharding groups are cut out of the devices that compute with the same weights; a larger one takes them all."""
    sharing, within = devices // (split.tensor * split.pipeline), split.context * split.ulysses
    if split.group is None or split.group >= sharing:
        return
    if sharing % split.group:
        told = "" if sharing == devices else " that compute with the same weights"
        yield "group", f"groups of {split.group} don't fill the {sharing} devices{told}"
    elif split.group % within:
        yield "group", f"groups of {split.group} cut through the {within} devices that share a sequence"


def _to_blame(sizes: Mapping[str, int], devices: int) -> str:
    """The one without which the others fit; where there is none, the largest."""
    needed = math.prod(sizes.values())
    alone = [name for name, size in sizes.items() if size > 1 and devices % (needed // size) == 0]
    return max(alone or sizes, key=sizes.__getitem__)


def _layers(split: Split, shape: Shape) -> Iterator[Problem]:
    stages = split.pipeline * split.virtual_pipeline
    if split.backend == "fsdp2":
        if shape.layers < stages:
            part = "pipeline" if shape.layers < split.pipeline else "virtual_pipeline"
            yield part, f"{stages} parts are more than the {shape.layers} layers of the model"
        return
    if shape.layers % split.pipeline and split.backend != "engine":
        yield "pipeline", f"it doesn't divide the {shape.layers} layers of the model"
    elif shape.layers % stages and split.backend != "engine":
        yield "virtual_pipeline", f"{stages} parts of stages don't divide the {shape.layers} layers of the model"


def _heads(split: Split, shape: Shape) -> Iterator[Problem]:
    """Learners need key-value heads to be split like the others; engines and Ulysses repeat those that are too few.
    What Ulysses shares out are the heads that splitting layers leaves to a device."""
    heads, kv_heads = (max(1, count // split.tensor) for count in (shape.heads, shape.kv_heads))
    fits: dict[str, Callable[[int], bool]] = {
        "tensor": lambda size: shape.kv_heads % size == 0 or (split.backend == "engine" and size % shape.kv_heads == 0),
        "ulysses": lambda size: kv_heads % size == 0 or size % kv_heads == 0,
    }
    for part, fit in fits.items():
        size, there, keys = getattr(split, part), shape.heads, shape.kv_heads
        whose = "of the model"
        if part == "ulysses" and split.tensor > 1:
            there, keys, whose = heads, kv_heads, f"that tensor {split.tensor} leaves to a device"
        if there % size:
            yield part, f"it doesn't divide the {there} attention heads {whose}"
        elif not fit(size) and shape.latent is None:
            yield part, f"it doesn't divide the {keys} key-value heads {whose}"


def _experts(split: Split, shape: Shape) -> Iterator[Problem]:
    if split.backend == "megatron" and shape.experts and split.tensor > 1 and not split.sequence:
        yield "tensor", "Megatron splits layers of a mixture of experts only with parallel.sequence=true"
    if split.expert == 1:
        return
    if shape.experts is None:
        yield "expert", "the model has no experts"
    elif shape.experts.count % split.expert:
        yield "expert", f"it doesn't divide the {shape.experts.count} experts of the model"
