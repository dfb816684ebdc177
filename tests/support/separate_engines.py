"""Engines with weights of their own in the controller's process, in place of engines on other devices."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from quintet.rollout.engines.engine import ENGINES, Engine
from quintet.rollout.engines.restarting_engine import RestartingEngine
from quintet.rollout.sampling_params import max_concurrent_requests, max_model_len
from quintet.runtime import components
from quintet.runtime.engines.engine_builders import engine_setup
from quintet.runtime.engines.engine_group import RoutedEngines
from quintet.runtime.engines.free_running_engines import FreeRunningEngines
from quintet.runtime.engines.weight_sources import WeightSync

Wrap = Callable[[Engine], Engine]


def use_separate_engines(
    monkeypatch: pytest.MonkeyPatch, *, overlap: bool, count: int = 2, wrap: Wrap = lambda engine: engine
) -> None:
    """Let runs use `count` engines that do not share the learner's weights; the rollout overlaps with training if
    `overlap` is set. `wrap` replaces each engine."""

    def build_engines(config: Any, policy: Any, tokenizer: Any, learners: Any, controller: Any) -> Any:
        context, requests = max_model_len(config), max_concurrent_requests(config)
        create = ENGINES.get(config.rollout.engine).load()

        def build() -> Engine:
            model = copy.deepcopy(learners.actor.model)
            setup = engine_setup(
                config, policy, model, tokenizer, context, max_concurrent=requests, is_learner_model=False
            )
            return wrap(create(setup))

        remote = controller.build_remote_engines(config, policy, learners)
        remote.engines()
        weights = None if overlap else remote.weights
        engines = [RestartingEngine(build, weights) for _ in range(count)]
        group = FreeRunningEngines(engines) if overlap else RoutedEngines(engines)
        return group, WeightSync(remote.weights, group, config)

    monkeypatch.setattr(components, "build_engines", build_engines)
    monkeypatch.setattr(components, "overlaps_training", lambda config: overlap)
