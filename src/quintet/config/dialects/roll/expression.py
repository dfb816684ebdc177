"""A native run in ROLL's words, as far as it has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quintet.config.dialects.conversion import foreign_word
from quintet.config.dialects.engine_choice import express_arguments
from quintet.config.dialects.free_sections import OPTIONS
from quintet.config.dialects.one_world import refuse_mixtures
from quintet.config.dialects.roll.algorithm import express_algorithm
from quintet.config.dialects.roll.sampling_keys import DRAWN, VALIDATION
from quintet.config.dialects.roll.worker_keys import BACKENDS, MODEL_DTYPES, SHARD_DTYPES
from quintet.config.dialects.roll.workers import CRITIC, LEARNERS, alike, counts
from quintet.config.keys import keys
from quintet.config.native import Experiment
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from quintet.config.translate import Foreign

__all__ = ["express", "frame"]

_DATA = "actor_train.data_args."
_NAME = "strategy_args.strategy_name"
_PER_DEVICE = "training_args.per_device_train_batch_size"
_ACCUMULATED = "training_args.gradient_accumulation_steps"


def frame(experiment: Experiment) -> dict[str, Any]:
    """The sections whose being there says something: prompts from files, a critic, a reference.

    Raises:
        ConfigError: ROLL's reference knows no such run.
    """
    refuse_mixtures(experiment, "ROLL")
    world = experiment.world.name
    if world not in ("prompts", "frozenlake"):
        raise ConfigError(f"ROLL's reference has no world {world}", key="world.name")
    for key in ("sft", "evaluation"):
        if getattr(experiment, key) is not None:
            raise ConfigError(f"ROLL's reference has nothing like {key}", key=key)
    tree: dict[str, Any] = {}
    if experiment.validation.sampling.do_sample:
        tree["validation"] = {"generating_args": {"do_sample": True}}
    if world == "prompts":
        tree["actor_train"] = {"data_args": {"file_name": _files(experiment) or "xxx/train.json"}}
    if experiment.needs_critic:
        tree["critic"] = {"strategy_args": {"strategy_name": _trainer(experiment.critic.backend)}}
    if experiment.algorithm.kl is not None:
        tree["reference"] = {"strategy_args": {"strategy_name": _scorer(experiment)}}
    return tree


def express(foreign: Foreign) -> None:
    """A native run in ROLL's words."""
    run = foreign.experiment
    foreign.put("pretrain", run.policy.path)
    absent = ["reference."] if run.algorithm.kl is None else []
    absent += [] if run.needs_critic else ["critic."]
    for key in [key for key in foreign.values if key.startswith(tuple(absent))]:
        del foreign.values[key]
    _data(foreign)
    express_algorithm(foreign)
    _devices(foreign)
    _batches(foreign)
    foreign.put("response_length", run.rollout.max_response_tokens)
    foreign.put("actor_infer.num_gpus_per_worker", run.placement.rollout.devices_per_worker)
    if run.rollout.engine_options.load_format and run.rollout.engine != "hf":
        foreign.put("actor_infer.strategy_args.strategy_config.load_format", run.rollout.engine_options.load_format)
    express_arguments(foreign, dict.fromkeys(("vllm", "sglang"), f"actor_infer.{OPTIONS}"))
    _drawing(foreign)
    foreign.put("actor_infer.model_args.dtype", _model_dtype(run.rollout.engine_options.dtype or run.policy.dtype))
    foreign.put(f"actor_train.{_NAME}", _trainer(run.actor.backend))
    _learner(foreign, "actor_train")
    if run.algorithm.kl is not None:
        foreign.put(f"reference.{_NAME}", _scorer(run))
        foreign.put("reference.model_args.dtype", _model_dtype(run.reference.dtype or run.policy.dtype))
        _learner(foreign, "reference")
    if run.needs_critic:
        foreign.put(f"critic.{_NAME}", _trainer(run.critic.backend))
        if run.critic.dtype:
            foreign.put("critic.model_args.dtype", _model_dtype(run.critic.dtype))
        _learner(foreign, "critic")


def _drawing(foreign: Foreign) -> None:
    """How far generation runs ahead, and how validation draws."""
    run = foreign.experiment
    foreign.put("async_generation_ratio", run.rollout.async_ratio)
    sampling, files = run.validation.sampling, run.data.validation_files if run.data else ()
    if sampling.do_sample:
        for name in DRAWN:
            foreign.put(f"{VALIDATION}{name}", getattr(sampling, name))
    elif sampling.samples > 1 or files:
        foreign.put(f"{VALIDATION}do_sample", False)
    if files:
        foreign.put("validation.data_args.file_name", files[0] if len(files) == 1 else list(files))


def _data(foreign: Foreign) -> None:
    data = foreign.experiment.data
    foreign.put(f"{_DATA}file_name", None)
    if foreign.experiment.world.name != "prompts":
        return
    foreign.put(f"{_DATA}file_name", _files(foreign.experiment) or "xxx/train.json")
    if data is not None:
        foreign.put(f"{_DATA}template", data.template or "native")
        foreign.put(f"{_DATA}messages", data.messages_key)
        if data.messages_key is None:
            foreign.put(f"{_DATA}prompt", data.prompt_key)


def _files(experiment: Experiment) -> str | list[str] | None:
    files = experiment.data.train_files if experiment.data else ()
    return files[0] if len(files) == 1 else list(files) or None


def _devices(foreign: Foreign) -> None:
    run = foreign.experiment
    places = {"actor_train": run.placement.actor, "actor_infer": run.placement.rollout}
    places |= {"reference": run.placement.reference} if run.algorithm.kl else {}
    places |= {"critic": run.placement.critic} if run.needs_critic else {}
    for name, component in places.items():
        devices = range(_total(run)) if component.devices is None else component.devices
        foreign.put(f"{name}.device_mapping", _mapping(tuple(devices)))


def _mapping(devices: tuple[int, ...]) -> str | None:
    if not devices:
        return None
    whole = devices == tuple(range(devices[0], devices[-1] + 1))
    return f"list(range({devices[0]},{devices[-1] + 1}))" if whole else str(list(devices))


def _total(run: Experiment) -> int:
    return run.placement.nodes * run.placement.devices_per_node


def _batches(foreign: Foreign) -> None:
    """One optimizer step is passes × sequences of a pass × ranks, of the policy and of the critic."""
    run = foreign.experiment
    sequences = run.training.groups_per_step * run.training.samples_per_group // run.training.mini_batches
    ranks = _ranks(run, "actor")
    if sequences % ranks:
        problem = f"training.mini_batches = {run.training.mini_batches}: {sequences} sequences can't be shared out "
        raise ConfigError(f"{problem}among the {ranks} ranks of a ROLL run", key="training.mini_batches")
    each = _divisor(sequences // ranks, run.actor.budget.sequences or 1)
    foreign.put(f"actor_train.{_PER_DEVICE}", each)
    foreign.put(f"actor_train.{_ACCUMULATED}", sequences // ranks // each)
    ranks, wanted = _ranks(run, "critic"), run.critic.budget.sequences
    if run.needs_critic and wanted and sequences % (ranks * wanted) == 0:
        foreign.put(f"critic.{_PER_DEVICE}", wanted)
        foreign.put(f"critic.{_ACCUMULATED}", sequences // ranks // wanted)


def _ranks(run: Experiment, ours: str) -> int:
    """Devices of a learner that learn from different sequences."""
    learner = run.critic if ours == "critic" else run.actor
    devices = (run.placement.critic if ours == "critic" else run.placement.actor).devices
    parallel = learner.parallel
    megatron = learner.backend == "megatron"
    split = parallel.tensor * parallel.pipeline * parallel.context if megatron else parallel.ulysses
    return max(1, (_total(run) if devices is None else len(devices)) // split)


MOST = 10**6
"""Sequences of one pass that are believed."""


def _divisor(number: int, most: int) -> int:
    return max(size for size in range(1, min(most, MOST) + 1) if number % size == 0)


def _learner(foreign: Foreign, name: str) -> None:
    """Options of its strategy; those that a reference or critic takes from `actor_train`, where they say something."""
    ours = LEARNERS[name]
    option = f"{name}.strategy_args.strategy_config."
    strategy = str(foreign.values[f"{name}.{_NAME}"]).partition("_")[0]
    if name != "actor_train":
        _shared(foreign, name, strategy)
    if strategy == "fsdp2":
        group = foreign.native(f"{ours}.sharding.group_size")
        foreign.put(f"{option}fsdp_size", 1 if group is None and name == "actor_train" else group)
        dtype = foreign.native(f"{ours}.sharding.parameter_dtype")
        own = foreign.native(f"{ours}.dtype") or foreign.experiment.policy.dtype
        dtype = dtype or (own if own != "auto" and name == "actor_train" else None)
        foreign.put(f"{option}param_dtype", next((word for word, ours in SHARD_DTYPES.items() if ours == dtype), None))
    if strategy == "megatron":
        granularity = foreign.native(f"{ours}.megatron.recompute_granularity")
        whole = foreign.native(f"{ours}.gradient_checkpointing") and "full"
        foreign.put(f"{option}recompute_granularity", granularity or whole or None)


def _shared(foreign: Foreign, name: str, strategy: str) -> None:
    ours, unsaid = LEARNERS[name], {key.name: key.default for key in keys()} | CRITIC
    for row in alike(name):
        native = ours + row.native[0].removeprefix("actor")
        value = foreign.native(native)
        if counts(row, strategy) and value != unsaid.get(native):
            word = foreign_word(row, value)
            if row.takes.accepts(word):
                foreign.put(name + row.key.removeprefix("actor_train"), word)


def _trainer(backend: str) -> str:
    return next((name for name, ours in BACKENDS.items() if ours == backend), "fsdp2_train")


def _scorer(experiment: Experiment) -> str:
    reference = experiment.reference
    if reference.backend == "megatron":
        return "megatron_infer"
    return "hf_infer" if reference.sharding.policy == "no_shard" else "fsdp2_infer"


def _model_dtype(native: str) -> str | None:
    return next(word for word, ours in MODEL_DTYPES.items() if ours == native)
