"""Configuration of the simulator of a run."""

from __future__ import annotations

from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.experiment import Experiment


def simulator_of(config: Experiment, *, is_validation: bool) -> SimulatorConfig:
    """Return the configuration of the simulator of training or of validations.

    Raises:
        TypeError: the run has no simulator.
    """
    env = (config.validation.simulator if is_validation else None) or config.env
    if not isinstance(env, SimulatorConfig):
        raise TypeError("the run has no simulator")
    return env
