"""If these fail, a run does not find its simulator, or the message does not say what to install or to correct."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest
from pydantic import BaseModel
from scripted_simulator import REFERENCE, ScriptedSimulator

from quintet.config.native.envs import SimulatorConfig
from quintet.envs.simulators import registry
from quintet.envs.simulators.registry import build_simulator, simulator_module, simulator_options
from quintet.errors import ConfigError
from quintet.registry import Registry


@pytest.fixture
def simulators(monkeypatch: pytest.MonkeyPatch) -> Registry:
    replaced: Registry = Registry("simulator", entry_points="quintet.simulators")
    monkeypatch.setattr(registry, "SIMULATORS", replaced)
    return replaced


def test_a_registered_simulator_is_imported_when_it_is_built(simulators: Registry) -> None:
    simulators.add("scripted", "scripted_simulator:ScriptedSimulator", help="for tests")
    simulator = build_simulator(SimulatorConfig(simulator="scripted"), 3, 7)
    assert isinstance(simulator, ScriptedSimulator)
    assert (simulator.num_robots, simulator.seed) == (3, 7)
    assert simulator_module("scripted") == "scripted_simulator"


def test_an_unknown_simulator_names_the_nearest(simulators: Registry) -> None:
    simulators.add("maniskill", "nowhere:Nothing", help="for tests")
    with pytest.raises(ConfigError, match=r"unknown simulator 'maniskil'\n  did you mean 'maniskill'\? known"):
        build_simulator(SimulatorConfig(simulator="maniskil"), 1, 0)


def test_a_missing_package_is_named_with_its_installation(simulators: Registry) -> None:
    simulators.add("robots", "nowhere:Nothing", help="for tests", requires=("no_such_robots",))
    with pytest.raises(ConfigError, match=r"requires no_such_robots, .* not installed\n  .*install.* no_such_robots"):
        build_simulator(SimulatorConfig(simulator="robots"), 1, 0)


def test_another_package_can_register_a_simulator(simulators: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", "scripted_simulator:ScriptedSimulator", "quintet.simulators")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda: EntryPoints([point]))
    assert isinstance(build_simulator(SimulatorConfig(simulator="theirs"), 1, 0), ScriptedSimulator)


def test_a_simulator_of_a_file_is_used_and_its_errors_name_the_line(tmp_path: Path) -> None:
    simulator = build_simulator(SimulatorConfig(simulator=REFERENCE), 2, 0)
    simulator.reset(np.arange(2), np.arange(2))
    assert simulator.observe(np.arange(2)).state.shape == (2, 3)
    file = tmp_path / "mine.py"
    file.write_text("class Empty:\n    def __init__(self, *_): pass\n\ndef broken(*_):\n    raise ValueError('no')\n")
    with pytest.raises(ConfigError, match=r"lacks task\(\), reset\(\), step\(\), observe\(\), render\(\), close\(\)"):
        build_simulator(SimulatorConfig(simulator=f"{file}:Empty"), 1, 0)
    with pytest.raises(ConfigError, match=r"raised ValueError: no\n  correct the code: .*mine.py:5"):
        build_simulator(SimulatorConfig(simulator=f"{file}:broken"), 1, 0)


class Options(BaseModel, extra="forbid"):
    friction: float = 1.0


def test_an_invalid_option_of_a_simulator_is_named() -> None:
    assert simulator_options(SimulatorConfig(options={"friction": 0.5}), Options) == Options(friction=0.5)
    with pytest.raises(ConfigError, match=r"env.options.fricton = 0.5: Extra inputs"):
        simulator_options(SimulatorConfig(options={"fricton": 0.5}), Options)
