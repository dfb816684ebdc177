"""Which engine honours which of `rollout.engine_options`, and which engines this machine can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quintet.config.compose import Composed
from quintet.config.faults import Fault, source_of
from quintet.config.keys import show
from quintet.config.native import EngineConfig, Experiment

__all__ = ["ABILITIES", "OPTIONS", "Abilities", "Unmet", "accelerators", "runnable", "unmet", "unmet_faults"]

OPTIONS = "rollout.engine_options"
DEVICES = Path("/dev")


@dataclass(frozen=True, slots=True)
class Abilities:
    """What one engine can be told."""

    takes: frozenset[str]
    """Options that it honours."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """Why it has none of an option, where that needs words."""
    only: Mapping[str, Callable[[Any], str | None]] = field(default_factory=dict)
    """Of an option that it honours in part: what is wrong with a value; None where nothing is."""
    package: str | None = None
    """The package that it needs, by the name under which it is imported; None needs nothing more."""


@dataclass(frozen=True, slots=True)
class Unmet:
    """An option that is set and that the engine doesn't take."""

    key: str
    value: Any
    engine: str
    why: str
    others: tuple[str, ...]
    """Engines that take it."""
    instead: Any
    """The value that asks for nothing."""

    @property
    def hint(self) -> str:
        """What to do."""
        other = f", or rollout.engine={' or '.join(self.others)}" if self.others else ""
        return f"leave it out{other}"


def _by_float_only(dtype: str) -> str | None:
    return "it computes in float32 and bfloat16" if dtype == "float16" else None


def _from_the_learner(form: str) -> str | None:
    """The embedded engine has the learner's own weights from the start, whatever files could give it others."""
    plain = form in ("auto", "hf", "pt", "safetensors") or form == "dummy"
    return None if plain else "its weights are the learner's from the start, in no other form"


_EVERYWHERE = (
    *("memory_share", "dtype", "eager", "cuda_graph_max_batch", "torch_compile", "prompts_per_device"),
    *("sleep_between_steps", "offload", "load_format", "max_batched_tokens", "max_model_tokens", "chunked_prefill"),
    *("image_cache", "log_statistics", "detokenize", "print_replies", "validate_weights", "validate_weights_dir"),
)
"""What every engine here honours."""
_OF_SERVERS = ("tensor_parallel", "pipeline_parallel", "block_size", "attention_backend", "arguments")
"""What those that are packages of their own honour besides."""
_OF_SGLANG = ("deterministic", "image_cache", "server_url", "server_python", "server_weights_dir")

_SGLANG = frozenset((*_EVERYWHERE, *_OF_SERVERS, "torch_compile_max_batch", "log_every_steps", *_OF_SGLANG))
_NOT_SGLANG = {"swap_space_gib": ": SGLang recomputes what it sets aside"}

ABILITIES: Mapping[str, Abilities] = {
    "hf": Abilities(
        frozenset((*_EVERYWHERE, "torch_compile_max_batch", "log_every_steps")),
        {
            **dict.fromkeys(("tensor_parallel", "pipeline_parallel"), ": it runs on one device"),
            "block_size": ": its cache has no blocks to be sized",
            "swap_space_gib": ": what runs is never set aside",
            "attention_backend": ": it runs the model as transformers has it",
            "arguments": ": all that it can be told is in the options",
        },
        {"dtype": _by_float_only, "load_format": _from_the_learner},
    ),
    "vllm": Abilities(
        frozenset((*_EVERYWHERE, *_OF_SERVERS, "swap_space_gib", "own_process")),
        {
            "log_every_steps": ": vLLM logs by the clock; log_statistics=true switches that on",
            "torch_compile_max_batch": ": vLLM compiles for every batch",
        },
        package="vllm",
    ),
    "sglang": Abilities(_SGLANG, _NOT_SGLANG, package="sglang"),
    "sglang-server": Abilities(_SGLANG, _NOT_SGLANG),
}
"""Engines that other packages add aren't here: they are handed every option."""


def unmet(experiment: Experiment) -> Iterator[Unmet]:
    """Options that are set, each to a value that the run's engine doesn't honour, in the order of the schema."""
    rollout = experiment.rollout
    able = ABILITIES.get(rollout.engine)
    if able is None:
        return
    for name, info in EngineConfig.model_fields.items():
        value, default = getattr(rollout.engine_options, name), info.get_default(call_default_factory=True)
        if name == "executor" or value == default:
            continue
        why = _problem(rollout.engine, able, name, value)
        if why is not None:
            others = [other for other, its in ABILITIES.items() if _problem(other, its, name, value) is None]
            yield Unmet(f"{OPTIONS}.{name}", value, rollout.engine, why, tuple(others), default)


def _problem(engine: str, able: Abilities, option: str, value: Any) -> str | None:
    if option not in able.takes:
        return f"the engine {engine} has no such option{able.lacks.get(option, '')}"
    wrong = able.only.get(option, lambda _: None)(value)
    return None if wrong is None else f"not with the engine {engine}: {wrong}"


def unmet_faults(composed: Composed) -> Iterator[Fault]:
    """The same as they are told to people."""
    engine = f"rollout.engine = {show(composed.experiment.rollout.engine)}"
    at = composed.provenance.get("rollout.engine", "default")
    for each in unmet(composed.experiment):
        source = source_of(each.key, composed.provenance)
        message = f"{each.key} = {show(each.value)} ({source}): {each.why}; {engine} ({at})"
        yield Fault(each.key, each.value, source, message, each.hint)


def runnable(engine: str) -> bool:
    """Whether an engine runs well here without being asked for: it needs nothing, or its package and an accelerator
    are there."""
    package = ABILITIES[engine].package if engine in ABILITIES else engine
    return package is None or (find_spec(package) is not None and accelerators() > 0)


def accelerators() -> int:
    """GPUs of this machine, counted by their device files, so that nothing heavy is imported; at least one where
    Windows lends its own to Linux, which shows no files of them."""
    nvidia = sum(path.name.removeprefix("nvidia").isdigit() for path in DEVICES.glob("nvidia*"))
    nvidia = nvidia or int((DEVICES / "dxg").exists())
    return nvidia or (len(list(DEVICES.glob("dri/renderD*"))) if (DEVICES / "kfd").exists() else 0)
