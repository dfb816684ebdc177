"""Engine of a converted configuration: the fallback on machines without the framework's own, and its arguments."""

import math
from collections.abc import Iterator, Mapping

from quintet import hardware
from quintet.config.checks.engines import (
    ENGINE_OPTIONS,
    OPTIONS,
    UnsupportedOption,
    runs_by_default,
    unsupported_options,
)
from quintet.config.composed import with_value
from quintet.config.dialects.conversion import Adjustments, ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.foreign_hints import translate_hint
from quintet.config.dialects.passthrough import unlisted_arguments, unused_arguments
from quintet.config.native.experiment import Experiment
from quintet.config.problems import ConfigProblem

ENGINE, VALIDATION_PROMPTS = "rollout.engine", "validation.prompts_per_device"
PARALLEL_SIZES = (f"{OPTIONS}.tensor_parallel", f"{OPTIONS}.pipeline_parallel")


def adjust_engine(experiment: Experiment, native: NativeBuilder, adjustments: Adjustments, num_planned: int) -> None:
    """Use the engine `hf` if this machine cannot run the one of the framework's reference.

    `num_planned` are the devices of a node that a plan has, whatever this machine has; 0 for a run on this machine.

    Settings of the user are never replaced; unsupported ones become problems.
    """
    engine = experiment.rollout.engine
    if engine in ENGINE_OPTIONS and not runs_by_default(engine) and not _is_engine_set(native):
        default = native.describe_origins(ENGINE)
        adjustments.replace(ENGINE, "hf", f"no engine is set and {_unavailable(engine)} (default: {default}): using hf")
        adapted = with_value(experiment, ENGINE, "hf")
    else:
        adapted = experiment
    for option in unsupported_options(adapted):
        _drop_option(option, adapted, native, adjustments, requested_engine=engine)
    _drop_validation_prompts(experiment, native, adjustments)
    for key in _oversized_parallelism(adapted, native, num_planned or hardware.num_gpus()):
        remark = f"the default {native.describe_origins(key)} needs more GPUs than this machine has: using 1"
        adjustments.replace(key, 1, remark)


def _is_engine_set(native: NativeBuilder) -> bool:
    specs = native.values.dialect.specs()
    keys = [key for key in native.origins_of(ENGINE) if native.values.is_set(key) and key in specs]
    return any(specs[key].native[:1] == (ENGINE,) for key in keys)


def _unavailable(engine: str) -> str:
    package = ENGINE_OPTIONS[engine].package
    missing = package is not None and not hardware.is_installed(package)
    return f"{engine} is not installed here" if missing else f"{engine} needs an accelerator, and this machine has none"


def _drop_option(
    option: UnsupportedOption,
    experiment: Experiment,
    native: NativeBuilder,
    adjustments: Adjustments,
    *,
    requested_engine: str,
) -> None:
    """Note a problem if the user set the option, otherwise reset it."""
    values, is_fallback = native.values, option.engine != requested_engine
    keys = [key for key in native.origins_of(option.key) if values.is_set(key)]
    if not keys:
        adjustments.replaced[option.key] = option.default
        if not is_fallback:
            default = native.describe_origins(option.key)
            adjustments.remarks.append(f"the reference's {default} is left out: {option.reason}")
        return
    settings = ", ".join(map(values.describe, keys))
    reason = f"{option.reason}, and {_unavailable(requested_engine)}" if is_fallback else option.reason
    engines = (requested_engine,) if is_fallback else option.other_engines
    changes = [f"leave {option.key} out", *(f"{ENGINE}={name}" for name in engines)]
    hint, key = translate_hint(experiment, native, ", or ".join(changes)), keys[0]
    adjustments.problems[key] = ConfigProblem(key, values[key], values.source(key), f"{settings}: {reason}", hint)


def _drop_validation_prompts(experiment: Experiment, native: NativeBuilder, adjustments: Adjustments) -> None:
    """Reset the reference's small number of concurrent validation prompts, which changes no result."""
    if experiment.validation.prompts_per_device is not None and not native.is_set_by_user(VALIDATION_PROMPTS):
        default = native.describe_origins(VALIDATION_PROMPTS)
        remark = f"the reference's {default} is left out: as many prompts as fit run concurrently"
        adjustments.replace(VALIDATION_PROMPTS, None, remark)


def _oversized_parallelism(experiment: Experiment, native: NativeBuilder, num_gpus: int) -> Iterator[str]:
    """Yield parallel sizes that the user did not set and that need more GPUs than there are."""
    options, supported = experiment.rollout.engine_options, ENGINE_OPTIONS.get(experiment.rollout.engine)
    sizes = dict(zip(PARALLEL_SIZES, (options.tensor_parallel, options.pipeline_parallel), strict=True))
    is_set = any(map(native.is_set_by_user, PARALLEL_SIZES))
    is_parallel = supported is not None and "tensor_parallel" in supported.names
    if is_parallel and not is_set and math.prod(sizes.values()) > max(1, num_gpus):
        yield from (key for key, size in sizes.items() if size > 1)


def arguments_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Pass on engine arguments that no reference lists; note those of engines that do not run."""
    engine = native.get(ENGINE)
    for argument in unlisted_arguments(values, engine):
        native.set(f"{OPTIONS}.arguments.{argument.name}", values[argument.key], argument.source_key)
    native.remarks += unused_arguments(values, engine)


def arguments_from_native(foreign: ForeignBuilder, sections: Mapping[str, str]) -> None:
    """Set the engine's arguments in its section; `sections` are foreign sections by engine."""
    rollout = foreign.experiment.rollout
    if rollout.engine in sections:
        for name, value in rollout.engine_options.arguments.items():
            foreign.set(f"{sections[rollout.engine]}.{name}", value)
