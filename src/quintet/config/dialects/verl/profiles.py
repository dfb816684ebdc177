"""Conversion of verl's profiler keys.

verl records each role, in chosen steps, on chosen ranks. Natively a profile of a rank has all components on it, so the
ranks and contents of all enabled roles are joined, as `ProfilerConfig.union` in verl does.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.verl.dialect import TABLES
from quintet.config.dotted import flatten, get_value
from quintet.config.native.tracking import ProfileConfig, TorchProfilerConfig

STEPS = "global_profiler.steps"
TOOL = "global_profiler.tool"
DIRECTORY = "global_profiler.save_path"
INTERVAL = "trainer.profile_interval"
ROLES = (*(f"actor_rollout_ref.{role}.profiler" for role in ("actor", "ref", "rollout")), "profiler")
"""Sections of the roles, and that of fine-tuning."""
ENGINE = ROLES[2]
TOOLS = ("torch", "torch_memory")
FIELDS = {"shapes": "record_shapes", "memory": "profile_memory", "stack": "with_stack"}
"""Native options of `torch.profiler` by verl's contents."""
WITHOUT_EFFECT: Mapping[str, Sequence[Any]] = TABLES["unchanged_profiles"]
"""Values that change nothing, by the option of a tool; null changes nothing either."""
IGNORED = ("contents", "name", "_target_", "manual_save", "context", "stacks", "devices", "record_context")


def profiles_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the profile that the enabled roles ask for together."""
    key, steps = _steps(values)
    roles = [role for role in ROLES if values[f"{role}.enable"]]
    if not steps or not roles:
        if steps and values.is_set(key):
            native.remarks.append(f"{values.describe(key)} has no effect: no `profiler.enable` is true")
        return
    tools = {values[f"{role}.tool"] for role in roles}
    if tools == {None}:
        native.remarks.append(f"{values.describe(key)} has no effect: no tool records profiles")
        return
    for role in roles:
        _require_missing(values, native, role)
    origins = partial(_written, values, roles)
    native.set("tracking.profile.steps", steps, key, *origins("enable"))
    native.set("tracking.profile.ranks", _ranks(values, roles), *origins("ranks", "all_ranks"))
    _torch_to_native(values, native, roles)
    if any(values[f"{role}.tool"] == "torch_memory" for role in roles):
        native.set("tracking.profile.memory_snapshot", True, *(origins("tool") or [TOOL]))
    _directory_to_native(values, native, roles)


def _written(values: ForeignValues, roles: list[str], *names: str) -> list[str]:
    """Return the keys of roles that the user set."""
    return [key for role in roles for name in names if values.is_set(key := f"{role}.{name}")]


def _steps(values: ForeignValues) -> tuple[str, list[int]]:
    """Return the profiled steps and the key that lists them."""
    interval = values[INTERVAL]
    if interval and interval[0] >= 0:
        return INTERVAL, list(range(interval[0], interval[-1] + 1))
    return STEPS, values[STEPS] or []


def _ranks(values: ForeignValues, roles: list[str]) -> list[int] | None:
    if any(values[f"{role}.all_ranks"] for role in roles):
        return None
    return sorted({rank for role in roles for rank in values[f"{role}.ranks"] or [0]})


def _torch_to_native(values: ForeignValues, native: NativeBuilder, roles: list[str]) -> None:
    """Set what `torch.profiler` records, if it is the tool of a role."""
    sections = [role for role in roles if values[f"{role}.tool"] == "torch"]
    if not sections:
        return
    keys = [f"{role}.tool_config" for role in sections]
    contents = [_contents_of(values, role) for role in sections]
    has_kernels = any(not listed or "cuda" in listed for listed in contents)
    native.set("tracking.profile.torch.activities", ["cpu", "cuda"] if has_kernels else ["cpu"], *keys)
    for name, field in FIELDS.items():
        native.set(f"tracking.profile.torch.{field}", any(name in listed for listed in contents), *keys)


def _contents_of(values: ForeignValues, role: str) -> list[str]:
    """Return what a role records; the engine follows the policy."""
    listed = get_value(values[f"{role}.tool_config"] or {}, "torch.contents")
    follows = listed is None and role == ENGINE
    return _contents_of(values, ROLES[0]) if follows else listed or []


def _directory_to_native(values: ForeignValues, native: NativeBuilder, roles: list[str]) -> None:
    """Set the directory, if the user did."""
    keys = [key for key in (*(f"{role}.save_path" for role in roles), DIRECTORY) if values.is_set(key)]
    if not keys or values[keys[0]] is None:
        return
    native.set("tracking.profile.directory", values[keys[0]], keys[0])
    for key in keys[1:]:
        if key != DIRECTORY and values[key] != values[keys[0]]:
            native.require(key, Capability.PROFILING)


def _require_missing(values: ForeignValues, native: NativeBuilder, role: str) -> None:
    """Note tools, and options of the tool of a role, that are missing."""
    key = f"{role}.tool"
    tool = values[key]
    if tool not in (*TOOLS, None):
        native.require(key if values.is_set(key) else TOOL, Capability.PROFILING)
        return
    for section in (f"{role}.tool_config.{tool}", f"global_profiler.global_tool_config.{tool}"):
        for option in _missing_options(values[section] or {}):
            if (role, option) == (ENGINE, "discrete"):
                # the only mode in which verl records an engine
                remark = (
                    "an engine is recorded in the profile of its rank, and one in a process of its own only as spans"
                )
                native.remarks.append(f"{values.describe(f'{section}.discrete')}: {remark}")
            else:
                native.require(f"{section}.{option}", Capability.PROFILING)


def _missing_options(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of a tool that change what it records, other than the contents."""
    is_scheduled = bool(get_value(options, "schedule.active"))
    for name, value in flatten(dict(options)).items():
        last = name.rpartition(".")[2]
        if last in IGNORED or value in (None, *WITHOUT_EFFECT.get(name, ())):
            continue
        if name.startswith("schedule.") and not is_scheduled:
            continue
        yield name


def profiles_from_native(foreign: ForeignBuilder) -> None:
    """Set verl's keys of a profile that a tool of verl can record."""
    profile = foreign.experiment.tracking.profile
    if profile is None or not profile.steps or (profile.torch is None) == (not profile.memory_snapshot):
        return
    is_tuning = foreign.experiment.sft is not None
    role, tool = ROLES[-1 if is_tuning else 0], "torch_memory" if profile.torch is None else "torch"
    if is_tuning:
        foreign.set(INTERVAL, [min(profile.steps), max(profile.steps)])
        foreign.set(f"{role}.tool", tool)
    else:
        foreign.set(STEPS, list(profile.steps))
        foreign.set(TOOL, tool)
    foreign.set(f"{role}.enable", True)
    _options_from_native(foreign, role, profile)


def _options_from_native(foreign: ForeignBuilder, role: str, profile: ProfileConfig) -> None:
    foreign.set(f"{role}.all_ranks", profile.ranks is None)
    foreign.set(f"{role}.ranks", list(profile.ranks or ()))
    if profile.directory is not None:
        foreign.set(f"{role}.save_path" if role == ROLES[-1] else DIRECTORY, profile.directory)
    if profile.torch is not None:
        foreign.set(f"{role}.tool_config", {"torch": {"contents": _contents(profile.torch)}})


def _contents(torch: TorchProfilerConfig) -> list[str]:
    return [*torch.activities, *(name for name, field in FIELDS.items() if getattr(torch, field))]
