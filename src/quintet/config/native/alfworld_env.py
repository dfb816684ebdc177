"""Configuration of ALFWorld's household tasks."""

import os
from typing import ClassVar, Literal

from quintet.config.native.env_section import (
    EnvProcessesConfig,
    InteractiveEnvSection,
    Processes,
    Rendered,
    register_env,
)
from quintet.config.native.section import NonNegative, NotEmpty


@register_env("alfworld_env:AlfWorld", "household tasks of ALFWorld by text commands", requires=("alfworld",))
class AlfWorldConfig(InteractiveEnvSection, name="alfworld"):
    """Household task of ALFWorld, by one of the commands that each observation lists."""

    runs_external_code: ClassVar[bool] = True

    config_path: NotEmpty = "alf-config.yaml"
    """YAML file of ALFWorld's own configuration, as its `configs/base_config.yaml`; variables such as `$HOME` are
    replaced. `env.type` in it has no effect: `render` selects the environment."""
    data_path: NotEmpty | None = None
    """Directory with ALFWorld's data, `json_2.1.1` and so on; null uses the variable ALFWORLD_DATA."""
    render: Rendered = "text"
    """`text` plays in TextWorld; `vision` shows AI2-THOR's picture instead of the text, and needs ALFWorld's extra
    `vis` and a display."""
    validation_games: Literal["eval_in_distribution", "eval_out_of_distribution"] = "eval_in_distribution"
    """Games of validation: in rooms of the training games, or in other rooms."""
    invalid_penalty: NonNegative = 1.0
    """Subtracted from the reward of a command that the observation does not list; it changes nothing."""
    processes: Processes = EnvProcessesConfig(reset_timeout_seconds=600.0, step_timeout_seconds=60.0)
    """Run envs in separate processes: a section, `true` for its defaults, or a number of processes. null runs them in
    the main process, where an env that hangs or dies stops the run."""

    def data_paths(self) -> dict[str, str]:
        """See `EnvSection.data_paths`."""
        values = {"config_path": self.config_path, "data_path": self.data_path}
        return {key: os.path.expandvars(value) for key, value in values.items() if value is not None}
