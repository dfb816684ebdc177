"""Weight sync: the learner's new weights replace the engines' after every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from quintet import trace
from quintet.config.native.experiment import Experiment
from quintet.runtime.groups import EngineGroup

if TYPE_CHECKING:
    from torch import Tensor


class WeightSync:
    """Puts engines to sleep while the policy is trained, and wakes them up with its new weights."""

    def __init__(
        self,
        weights: Callable[[int], Iterable[tuple[str, Tensor]]],
        engines: EngineGroup,
        config: Experiment,
        stage: Callable[[], None] = lambda: None,
    ) -> None:
        """`weights` yields the learner's weights for a version; `stage` copies them to where standalone engines load
        them from."""
        self._weights = weights
        self._stage = stage
        self._engines = engines
        options = config.rollout.engine_options
        self._should_sleep = options.sleep_between_steps or options.offload
        self._is_asleep = False
        self._version = 0

    def sleep(self) -> None:
        """If configured, free the engines' caches and weights until the next `sync`."""
        if self._should_sleep:
            self._engines.sleep()
            self._is_asleep = True

    def sync(self, version: int) -> None:
        """Load the learner's weights into the engines, as `version`: the number of the step that trained them."""
        with trace.span("stage_weights"):
            self._stage()
        if self._is_asleep:
            with trace.span("wake_up"):
                self._engines.wake_up()
            self._is_asleep = False
        self._version = version
        self._engines.sync_weights(version, lambda: self._weights(version))

    def load_missing(self) -> None:
        """Load the weights of the last sync into engines that have none since they were rebuilt. The learner must not
        have been updated since."""
        self._engines.load_missing_weights(lambda: self._weights(self._version))
