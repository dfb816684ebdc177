"""Client of VAGEN's environment servers."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quintet.config.dialects.vagen.service_env import env_to_vagen
from quintet.config.native.envs import ENVS, InteractiveEnvSection
from quintet.config.native.rollout import RolloutConfig
from quintet.envs.hosted_envs import EnvRequest, HostEvent, HostLostError
from quintet.envs.service.http_client import ServiceClient
from quintet.envs.service.payload import limited_image_decoder
from quintet.envs.validation import (
    ImageDecoder,
    InvalidEnvOutputError,
    relations_from_message,
    validate_observation,
    validate_step,
)
from quintet.envs.vector_env import ActionsExecuted, EpisodeStarted
from quintet.errors import MachineError
from quintet.records import Observation, Step


class VagenHost:
    """Environments on a server of VAGEN; see `HostConnection`. One step has the effect of all actions of a turn: the
    server returns one observation and one reward for them."""

    lost_reason: str | None = None

    def __init__(self, rank: int, client: ServiceClient, config: InteractiveEnvSection, rollout: RolloutConfig) -> None:
        """
        Raises:
            ConfigError: VAGEN's protocol does not have this env.
        """
        self.rank = rank
        self._client = client
        self._env_config = {"env_name": config.name, "env_config": env_to_vagen(config, rollout)}
        self._actions = tuple(ENVS.get(config.name).load()(config).actions)
        self._separator, self._thought = rollout.action_separator, "<think></think>" if rollout.think else ""
        # clients of a server share one namespace
        self._prefix = f"quintet-{secrets.token_hex(8)}-"
        self._requests: Sequence[EnvRequest] = ()
        self._episodes: set[int] = set()
        self._is_built = False

    def fileno(self) -> int:
        return self._client.fileno()

    def check_deadline(self) -> None:
        self._client.check_deadline()

    def start_build(self) -> None:
        """Start to ask for the server's health."""
        self._client.send("GET", "/health")

    def start_exchange(self, requests: Sequence[EnvRequest]) -> None:
        """Send the steps, or the first of the other requests; `finish` sends the rest."""
        self._requests = requests
        steps = {self._id(request): self._response(request) for request in requests if request.actions is not None}
        if steps:
            self._client.send("POST", "/batch/step", {"ids2actions": steps}, is_repeatable=False)
        else:
            self._client.send("GET", "/health")

    def finish(self) -> Sequence[HostEvent]:
        response = self._client.receive()
        if not self._is_built:
            self._is_built = True
            return ()
        try:
            results, decode_image = response.get("results", {}), limited_image_decoder()
            events: dict[int, HostEvent] = {
                request.episode: _stepped(request.episode, results[self._id(request)], decode_image)
                for request in self._requests
                if request.actions is not None
            }
            self._close(
                [request.episode for request in self._requests if request.seed is None and request.actions is None]
            )
            events |= dict(self._start([request for request in self._requests if request.seed is not None]))
        except (ArithmeticError, AttributeError, InvalidEnvOutputError, LookupError, TypeError, ValueError) as error:
            raise HostLostError(f"{self._client.url} sent an invalid response: {error!r}") from error
        return [events[request.episode] for request in self._requests if request.episode in events]

    def close(self) -> None:
        """Close the environments, if the server can be reached."""
        try:
            self._client.close()
            self._close(list(self._episodes))
        except (HostLostError, MachineError):
            pass
        finally:
            self._client.close()

    def _id(self, request: EnvRequest) -> str:
        return f"{self._prefix}{request.episode}"

    def _response(self, request: EnvRequest) -> str:
        """Return a response of the policy with these actions and without its thoughts."""
        return f"{self._thought}<answer>{self._separator.join(request.actions or ())}</answer>"

    def _start(self, requests: Sequence[EnvRequest]) -> Iterator[tuple[int, HostEvent]]:
        """Create environments, and yield the first event of each."""
        if not requests:
            return
        ids = [self._id(request) for request in requests]
        configs = {name: self._env_config | {"seed": request.seed} for name, request in zip(ids, requests, strict=True)}
        self._client.call("POST", "/environments", {"ids2configs": configs})
        self._episodes.update(request.episode for request in requests)
        seeds = {name: request.seed for name, request in zip(ids, requests, strict=True)}
        started = self._client.call("POST", "/batch/reset", {"ids2seeds": seeds})["results"]
        prompts = self._client.call("POST", "/batch/system_prompt", {"env_ids": ids})["system_prompts"]
        decode_image = limited_image_decoder()
        for name, request in zip(ids, requests, strict=True):
            observation = validate_observation(_observation(started[name][0], decode_image))
            yield request.episode, EpisodeStarted(request.episode, str(prompts[name]), self._actions, observation)

    def _close(self, episodes: Sequence[int]) -> None:
        running = self._episodes.intersection(episodes)
        self._episodes.difference_update(running)
        if running:
            self._client.call(
                "POST", "/batch/close", {"env_ids": [f"{self._prefix}{env_id}" for env_id in sorted(running)]}
            )


def _stepped(episode: int, result: Sequence[Any], decode_image: ImageDecoder) -> ActionsExecuted:
    observation, reward, done, info = result
    success = bool(info.get("metrics", {}).get("traj_metrics", {}).get("success", False))
    step = Step(_observation(observation, decode_image), float(reward), bool(done), False, {**info, "success": success})
    return ActionsExecuted(episode, (validate_step(step),))


def _observation(message: Mapping[str, Any], decode_image: ImageDecoder) -> Observation:
    images = itertools.chain.from_iterable(message.get("multi_modal_data", {}).values())
    pixels = tuple(decode_image({"png": image["__pil_image__"]}) for image in images)
    # only Quintet's servers send relations
    return Observation(message["obs_str"], pixels, relations_from_message(message.get("relations")))
