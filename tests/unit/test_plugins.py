"""If these fail, a component of another package cannot be used, or its arguments are not validated and documented."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from quintet.cli.choices import check_choices
from quintet.config.compose import load_experiment
from quintet.config.native.advantages import ADVANTAGES
from quintet.config.native.envs import ENVS, CustomEnvConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.config.native.losses import LOSSES
from quintet.config.schema import keys
from quintet.envs.factory import build_env, build_vector_env
from quintet.envs.vector_env import EpisodeStarted
from quintet.errors import ConfigError
from quintet.records import Batch
from quintet.registry import Registry
from quintet.runtime.learners.learner_backends import LEARNER_BACKENDS, load_backend
from quintet.training.parallel.process_group import RankGroup

MODULE = '''
import torch
from quintet.algorithms.losses.targets import PolicyLoss
from quintet.config.native.advantages import AdvantageSection
from quintet.config.native.envs import InteractiveEnvSection
from quintet.config.native.losses import LossSection
from quintet.config.native.section import Section
from quintet.records import Observation, Step
from quintet.registry import Entry
from quintet.rewards.score import Score


class CenteredConfig(AdvantageSection):
    """Reward minus a constant."""

    uses_values = True
    center: float = 0.5
    """Constant."""


def centered(batch, config):
    advantages = batch.rewards - config.center
    return advantages, batch.rewards


CENTERED = Entry("", "plugin_of_a_test:centered", "reward minus a constant", config=CenteredConfig)


class ScaledConfig(LossSection):
    """Scaled policy gradient."""

    scale: float = 2.0
    """Scale."""


def scaled(logprobs, targets, config):
    """Scaled policy gradient."""
    loss = -config.scale * targets.advantages * logprobs
    nothing = torch.zeros_like(loss, dtype=torch.bool)
    return PolicyLoss(loss, nothing, nothing, loss)


scaled.config_class = ScaledConfig


class CounterConfig(InteractiveEnvSection):
    """Count to a number."""

    goal: int = 3
    """Number to reach."""


class Counter:
    """Count to a number."""

    config_class = CounterConfig
    actions = ("more",)

    def __init__(self, config):
        self.goal = config.goal

    def instruction(self):
        return f"Count to {self.goal}."

    def reset(self, seed):
        return Observation("0")

    def step(self, action):
        return Step(Observation("1"), 1.0, True, False, {"success": True})

    def close(self):
        pass


class ContainsConfig(Section):
    """Word search."""

    word: str
    """Word."""
    score: float = 1.0
    """Score."""


def contains(text, truth, extra, options):
    """Score a word."""
    return Score(options.score if options.word in text else 0.0)


contains.config_class = ContainsConfig


class Replicated:
    """Learner backend."""

    def build_actor(self, config, policy, optimizer, ranks):
        return f"actor from {policy}"
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Register entry points of a module in a registry: `plugin(ENVS, "quintet.envs", counter="Counter")`."""
    (tmp_path / "plugin_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    touched: list[Registry[object]] = []
    real = importlib.metadata.entry_points

    def register(registry: Registry[object], group: str, **targets: str) -> None:
        points = [EntryPoint(name, f"plugin_of_a_test:{target}", group) for name, target in targets.items()]

        class Installed:
            def select(self, **select: str) -> object:
                return points if select.get("group") == group else real(**select)

        monkeypatch.setattr(importlib.metadata, "entry_points", lambda: Installed())
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        monkeypatch.setattr(registry, "_plugins", None)
        registry.version += 1
        keys.cache_clear()
        touched.append(registry)

    yield register
    monkeypatch.undo()
    for registry in touched:
        registry.version += 1
    keys.cache_clear()
    sys.modules.pop("plugin_of_a_test", None)


def experiment(directory: Path, text: str) -> Experiment:
    file = directory / "run.yaml"
    file.write_text(text)
    return load_experiment(str(file)).experiment


def test_an_estimator_has_typed_arguments(
    plugin: Callable[..., None], tmp_path: Path, make_batch: Callable[..., Batch]
) -> None:
    from quintet.algorithms.advantages.custom import estimate

    plugin(ADVANTAGES, "quintet.advantages", centered="CENTERED")
    config = experiment(tmp_path, "algorithm: {advantage: {name: centered, center: 0.25}}")
    assert config.needs_critic
    advantages, _ = estimate(make_batch([[0, 1]], [[0, 1.0]]), config.algorithm.advantage)
    assert advantages.tolist() == [0.0, 0.75]
    with pytest.raises(ConfigError, match=r"(?s)centre.*algorithm\.advantage\.center"):
        experiment(tmp_path, "algorithm: {advantage: {name: centered, centre: 0.25}}")
    assert "a number" in [key.value_type for key in keys() if key.name == "algorithm.advantage.center"]


def test_a_loss_has_typed_arguments(plugin: Callable[..., None], tmp_path: Path) -> None:
    from quintet.algorithms.losses.custom import loss_from_config

    plugin(LOSSES, "quintet.losses", scaled="scaled")
    loss = experiment(tmp_path, "algorithm: {loss: {name: scaled, scale: 3.0}}").algorithm.loss
    function, config = loss_from_config(loss)
    assert config.scale == 3.0
    assert function.mask is None
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.scale"):
        experiment(tmp_path, "algorithm: {loss: {name: scaled, scale: much}}")


@pytest.mark.parametrize("group", ["quintet.envs", "quintet.worlds"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_env_has_typed_arguments(plugin: Callable[..., None], tmp_path: Path, group: str) -> None:
    plugin(ENVS, group, counter="Counter")
    config = experiment(tmp_path, "env: {name: counter, goal: 5, max_actions: 2}").env
    assert build_env(config).instruction() == "Count to 5."
    assert "counter" in [entry.name for entry in ENVS]
    envs = build_vector_env(config)
    envs.start(1, 0)
    (event,) = envs.poll()
    assert isinstance(event, EpisodeStarted)
    with pytest.raises(ConfigError, match=r"env\.goal"):
        experiment(tmp_path, "env: {name: counter, goal: five}")


def test_the_former_entry_point_group_is_deprecated(plugin: Callable[..., None]) -> None:
    plugin(ENVS, "quintet.worlds", counter="Counter")
    with pytest.warns(DeprecationWarning, match=r"quintet\.worlds.*quintet\.envs"):
        assert "counter" in ENVS


def test_a_class_by_path_validates_its_arguments(plugin: Callable[..., None]) -> None:
    plugin(ENVS, "quintet.envs")
    config = CustomEnvConfig(path="plugin_of_a_test:Counter", arguments={"goal": 7})
    assert build_env(config).instruction() == "Count to 7."
    with pytest.raises(ConfigError, match=r"env\.arguments\.goal = 'x'"):
        build_env(CustomEnvConfig(path="plugin_of_a_test:Counter", arguments={"goal": "x"}))


def test_a_broken_plugin_only_fails_where_it_is_used(plugin: Callable[..., None], tmp_path: Path) -> None:
    plugin(ENVS, "quintet.envs", counter="Missing")
    with pytest.warns(UserWarning, match="counter"):
        assert experiment(tmp_path, "env: {name: sokoban}").env.name == "sokoban"
    with pytest.raises(ConfigError, match="counter"):
        experiment(tmp_path, "env: {name: counter}")


def test_a_learner_backend_can_be_chosen(plugin: Callable[..., None], tmp_path: Path) -> None:
    plugin(LEARNER_BACKENDS, "quintet.learner_backends", replicated="Replicated")
    check_choices(load_experiment(None, ["actor.backend=replicated"]))
    actor: object = load_backend("replicated").build_actor(Experiment(), tmp_path, OptimizerConfig(), RankGroup())
    assert actor == f"actor from {tmp_path}"
    with pytest.raises(
        ConfigError, match=r"actor.backend = 'replicate' \(command line\).*(?s:.*)did you mean 'replicated'"
    ):
        check_choices(load_experiment(None, ["actor.backend=replicate"]))


def test_a_verifier_has_typed_arguments(plugin: Callable[..., None], tmp_path: Path) -> None:
    from quintet.rewards import verifier_worker
    from quintet.rewards.factory import build_verifier_scorer
    from quintet.rewards.verifiers.registry import VERIFIERS

    plugin(VERIFIERS, "quintet.verifiers", contains="contains")
    text = "env: {name: prompts}\nwarm_start: null\ndata: {train_files: a.parquet}\n"
    reward = experiment(tmp_path, text + "reward: {kind: contains, function_arguments: {word: yes, score: 0.5}}").reward
    assert reward is not None
    with pytest.raises(ConfigError, match=r"reward\.function_arguments\.word"):
        build_verifier_scorer(reward, 10)
    message = {
        "verifier": "contains",
        "text": "yes",
        "ground_truth": "",
        "extra": {},
        "options": {"word": "yes", "score": 0.5},
    }
    assert verifier_worker._verify(message)["score"] == 0.5
