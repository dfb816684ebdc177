"""Conversion of settings of all kinds of runs: trackers, checkpoints, profiles, adapters and images of the model."""

from collections.abc import Iterator
from typing import Any

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.problems import ConfigProblem

NAME = "exp_name"
TRACKER, RESUME = "track_with", "resume_from_checkpoint"
UPLOAD, UPLOAD_KIND = "checkpoint_config.output_dir", "checkpoint_config.type"
TIMELINE, MEMORY, PROFILES = "profiler_timeline", "profiler_memory", "profiler_output_dir"
LOGGERS = {"stdout": "console"}
ALWAYS = ("console", "jsonl")
_MODEL = "actor_train.model_args."
RANK = "actor_train.model_args.lora_rank"
ALPHA = "actor_train.model_args.lora_alpha"
TARGETS = "actor_train.model_args.lora_target"
ADAPTERS = "actor_train.model_args.adapter_name_or_path"
FROZEN = "actor_train.model_args.freeze_module_prefix"
PIXELS = {f"policy.vision.{bound}_pixels": f"actor_train.data_args.image_{bound}_pixels" for bound in ("min", "max")}
VISION_ENCODERS = ("vision_model", "model.visual", "visual")
ALL_LINEAR = ("all", "all-linear")


def run_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set tracker, resumption, copies of checkpoints and profiles."""
    tracker = values[TRACKER]
    if values.is_set(TRACKER) and tracker != "ml_tracker":
        names = dict.fromkeys([*ALWAYS, *([LOGGERS.get(tracker, tracker)] if tracker else [])])
        native.set("tracking.loggers", list(names), TRACKER)
    if values.is_set(RESUME):
        resume = {True: "auto", False: "never"}.get(values[RESUME], values[RESUME])
        native.set("resume", resume, RESUME)
    if values[UPLOAD_KIND] is not None and values[UPLOAD] is not None:
        native.set("checkpoint.remote_dir", values[UPLOAD], UPLOAD, UPLOAD_KIND)
    _profile_to_native(values, native)


def _profile_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set profiles of all steps: a timeline or snapshots of GPU memory, of rank 0."""
    key = TIMELINE if values[TIMELINE] else MEMORY
    if not values[key]:
        return
    native.set("tracking.profile.steps", None, key)
    native.set("tracking.profile.ranks", [0], key)
    option = "torch.with_stack" if values[TIMELINE] else "memory_snapshot"
    native.set(f"tracking.profile.{option}", True, key)
    if values.is_set(PROFILES):
        native.set("tracking.profile.directory", f"{values[PROFILES].rstrip('/')}/{values[NAME]}", PROFILES, NAME)


def profile_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield two kinds of profiles at once, which ROLL refuses, too."""
    if values[TIMELINE] and values[MEMORY]:
        yield values.problem(MEMORY, f"excludes {values.describe(TIMELINE)}", f"{MEMORY}=false, or {TIMELINE}=false")


def model_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set adapters, frozen modules and sizes of images."""
    if values[TARGETS] is not None:
        native.set("policy.lora.rank", values[RANK], RANK, TARGETS)
        alpha = values[ALPHA] if values[ALPHA] is not None else 2 * values[RANK]
        native.set("policy.lora.alpha", float(alpha), ALPHA, RANK)
        native.set("policy.lora.target_modules", _targets(values[TARGETS]), TARGETS)
        native.set("policy.lora.path", values[ADAPTERS], ADAPTERS)
    if values[FROZEN] in VISION_ENCODERS:
        native.set("policy.vision.freeze", True, FROZEN)
    for target, key in PIXELS.items():
        if values.is_set(key):
            native.set(target, values[key], key)


def paths_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the models of policy and reference: their own if policy, engine and reference have one."""
    keys = [f"{worker}.model_args.model_name_or_path" for worker in ("actor_train", "actor_infer", "reference")]
    paths = [values[key] for key in keys]
    origins = tuple(keys) if all(paths) else ("pretrain",)
    path = paths[0] if all(paths) else values["pretrain"]
    if path is not None:
        for key, value in {"policy.preset": None, "policy.path": path, "warm_start": None}.items():
            native.set(key, value, *origins)
    if all(paths) and paths[2] != path:
        native.set("reference.path", paths[2], keys[2])


def _targets(text: str) -> list[str]:
    return ["all-linear"] if text in ALL_LINEAR else [name.strip() for name in text.split(",")]


def settings_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of trackers, checkpoints, profiles, adapters and images."""
    run = foreign.experiment
    others = [name for name in run.tracking.loggers if name not in ALWAYS]
    foreign.set(TRACKER, others[0] if others else "stdout")
    if run.resume != "auto":
        foreign.set(RESUME, False if run.resume == "never" else run.resume)
    if run.checkpoint.remote_dir is not None:
        foreign.set(UPLOAD_KIND, "file_system")
        foreign.set(UPLOAD, run.checkpoint.remote_dir)
    profile = run.tracking.profile
    if profile is not None and profile.steps is None:
        foreign.set(TIMELINE, profile.torch is not None)
        foreign.set(MEMORY, profile.memory_snapshot)
    foreign.set(FROZEN, "vision_model" if run.policy.vision.freeze else None)
    for target, key in PIXELS.items():
        foreign.set(key, foreign.native_value(target))
    _adapters_from_native(foreign, run.policy.lora)


def _adapters_from_native(foreign: ForeignBuilder, lora: Any) -> None:
    if lora is None:
        return
    foreign.set(TARGETS, ",".join(lora.target_modules))
    foreign.set(RANK, lora.rank)
    foreign.set(ALPHA, int(lora.alpha))
    foreign.set(ADAPTERS, lora.path)
