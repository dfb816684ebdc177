"""The environments of a standalone worker, called by the controller."""

from __future__ import annotations

from collections.abc import Sequence

from quintet.config.native.experiment import Experiment
from quintet.envs.hosted_envs import EnvRequest
from quintet.envs.mixed_env import build_run_envs
from quintet.envs.vector_env import EnvEvent, VectorEnv


class LocalStandaloneEnvs:
    """See `StandaloneEnvWorker`."""

    def __init__(self) -> None:
        self._envs: VectorEnv | None = None

    def build(self, config: Experiment) -> None:
        self.close()
        self._envs = build_run_envs(config)

    def exchange(self, requests: Sequence[EnvRequest], wait_seconds: float) -> Sequence[EnvEvent]:
        """See `StandaloneEnvWorker.exchange`.

        Raises:
            ValueError: `build` has not been called.
        """
        if self._envs is None:
            raise ValueError("the environments were called before they were built")
        for request in requests:
            if request.seed is not None:
                self._envs.start(request.episode, request.seed)
            elif request.actions is not None:
                self._envs.step(request.episode, request.actions)
            else:
                self._envs.drop(request.episode)
        return self._envs.poll(wait=wait_seconds > 0, seconds=wait_seconds)

    def close(self) -> None:
        """End all episodes and their processes."""
        if self._envs is not None:
            self._envs.close()
            self._envs = None
