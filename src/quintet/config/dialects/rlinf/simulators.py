"""Conversion of the sections `env.train` and `env.eval` of RLinf's runs, and of a simulator's own file."""

from collections.abc import Iterator, Mapping

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Derived, OptionalSection, Same, first_of
from quintet.config.dialects.rlinf.key_values import TABLES
from quintet.config.dotted import unflatten
from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.robot_simulators import option_errors
from quintet.config.native.training import TrainingConfig
from quintet.config.problems import ConfigProblem

SIDES = {"env.train.": "env", "env.eval.": "validation.simulator"}
"""Native sections by the prefixes of a run's keys."""
VIDEOS = {"env.train.": "tracking.video", "env.eval.": "tracking.validation_video", "": "tracking.video"}
OPTIONS: Mapping[str, str] = TABLES["simulator_options"]
"""Foreign keys of `env.options` by the options' names."""
ORDERED = ("use_ordered_reset_state_ids", "is_eval")
CAMERA = {"camera_width": "init_params.sensor_configs.width", "camera_height": "init_params.sensor_configs.height"}


def _video(native: str, section: str) -> OptionalSection:
    switch = f"{section}.save_video"
    rules = (
        first_of(f"{native}.overlay", f"{section}.info_on_video", switch),
        first_of(f"{native}.directory", f"{section}.video_base_dir", switch, export_none=False),
    )
    return OptionalSection(native, switch, rules, on_value=True)


def _rules(prefix: str, env: str) -> tuple[Same | Derived | OptionalSection, ...]:
    return (
        Same(f"{env}.max_steps", f"{prefix}max_episode_steps"),
        Same(f"{env}.environments", f"{prefix}total_num_envs"),
        Derived(
            f"{env}.start_state_order",
            tuple(f"{prefix}{name}" for name in ORDERED),
            lambda *ordered: "ordered" if any(ordered) else "random",
            lambda order: (order == "ordered",),
            export_none=False,
        ),
        _video(VIDEOS[prefix], f"{prefix}video_cfg"),
    )


def simulator_to_native(values: ForeignValues, native: NativeBuilder, prefix: str, env: str) -> None:
    """Set a native section from the keys of a simulator."""
    native.apply(_rules(prefix, env))
    steps = f"{prefix}max_episode_steps"
    if values[steps] is None:
        native.require(steps, Capability.SIMULATORS)
        native.set(f"{env}.max_steps", episode_steps(values, prefix), steps)
    for option, key in _set_options(values, prefix).items():
        native.set(f"{env}.options.{option}", values.native(key), key)
    for field, name in CAMERA.items():
        key = f"{prefix}{name}"
        if values[key] is not None:
            native.set(f"{env}.{field}", values[key], key)


def episode_steps(values: ForeignValues, prefix: str) -> int:
    """Return the maximum number of actions of an episode; that of the reference if it has none, as on real robots."""
    key = f"{prefix}max_episode_steps"
    return int(values[key] or values.dialect.specs()[key].default)


def _set_options(values: ForeignValues, prefix: str) -> dict[str, str]:
    """Return the keys of options that are set, and need nothing that this version lacks, by the options' names."""
    keys = {option: f"{prefix}{name}" for option, name in OPTIONS.items()}
    specs = values.dialect.specs()
    return {
        option: key
        for option, key in keys.items()
        if values.is_set(key) and values[key] is not None and values[key] in (specs[key].noop or (values[key],))
    }


def option_problems(values: ForeignValues, prefix: str) -> Iterator[ConfigProblem]:
    """Yield a problem of each option that the simulator lacks, or whose value it does not take."""
    keys, simulator = _set_options(values, prefix), values[f"{prefix}env_type"]
    options = unflatten({option: values.native(key) for option, key in keys.items()})
    for option, reason in option_errors(simulator, options):
        yield values.problem(
            keys[option], f"{values.describe(f'{prefix}env_type')}: {reason}", f"leave {keys[option]} out"
        )


def simulator_from_native(foreign: ForeignBuilder, prefix: str, env: str) -> None:
    """Set the keys of a simulator."""
    foreign.apply(_rules(prefix, env))
    for option, name in OPTIONS.items():
        value = foreign.native_value(f"{env}.options.{option}")
        if value is not None:
            foreign.set_native(f"{prefix}{name}", value)


def env_file_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert a simulator's own file to a run on that simulator with native defaults."""
    native.set_from_keys(values.dialect.specs().values())
    native.set("env.name", "simulator", "env_type")
    # as in a run, which RLinf trains and evaluates on the same start states
    native.set("env.hold_out", False)
    simulator_to_native(values, native, "", "env")
    native.set("env.epochs", values["rollout_epoch"], "rollout_epoch")
    native.set("placement.offload_envs", values["enable_offload"], "enable_offload")
    num_envs, group = "total_num_envs", "group_size"
    # 1 leaves the group size to the run
    if values[group] > 1:
        native.set("training.samples_per_group", values[group], group)
    if values[num_envs]:
        groups = max(1, values[num_envs] * values["rollout_epoch"] // values[group])
        native.set("training.groups_per_step", groups, num_envs, group, "rollout_epoch")


def env_file_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of a simulator's own file."""
    simulator_from_native(foreign, "", "env")
    foreign.set("enable_offload", foreign.experiment.placement.offload_envs)
    env, samples = foreign.experiment.env, foreign.experiment.training.samples_per_group
    foreign.set("rollout_epoch", env.epochs if isinstance(env, SimulatorConfig) else 1)
    foreign.set("group_size", 1 if samples == TrainingConfig().samples_per_group else samples)
