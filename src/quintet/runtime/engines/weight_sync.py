"""Weight sync: the learner's new weights replace the engines' after every step."""

from __future__ import annotations

from quintet import trace
from quintet.config.native.experiment import Experiment
from quintet.runtime.engines.weight_sources import PolicyWeights
from quintet.runtime.groups import EngineGroup


class WeightSync:
    """Puts engines to sleep while the policy is trained, and wakes them up with its new weights."""

    def __init__(self, weights: PolicyWeights, engines: EngineGroup, config: Experiment) -> None:
        self._weights = weights
        self._engines = engines
        options = config.rollout.engine_options
        self._should_sleep = options.sleep_between_steps or options.offload
        self._is_asleep = False

    def sleep(self) -> None:
        """If configured, free the engines' caches and weights until the next `sync`."""
        if self._should_sleep:
            self._engines.sleep()
            self._is_asleep = True

    def sync(self, version: int) -> None:
        """Load the learner's weights into the engines, as `version`: the number of the step that trained them."""
        with trace.span("stage_weights"):
            self._weights.stage()
        if self._is_asleep:
            with trace.span("wake_up"):
                self._engines.wake_up()
            self._is_asleep = False
        self._engines.load_weights(version, self._weights)
