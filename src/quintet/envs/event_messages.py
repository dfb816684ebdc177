"""Events of a vector env as text, for other processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quintet.envs.validation import (
    ImageDecoder,
    ImageEncoder,
    from_raw_image,
    observation_from_message,
    observation_message,
    raw_image,
    step_from_message,
    step_message,
    validate_actions,
    validate_instruction,
)
from quintet.envs.vector_env import ActionsExecuted, EnvEvent, EpisodeFailed, EpisodeStarted
from quintet.records import Failure, Observation
from quintet.sandbox.json_lines import decode, encode


def event_text(event: EnvEvent) -> str:
    """Return an event as JSON; values in the `info` of a step that JSON cannot express become text."""
    return encode({"episode": event.episode} | event_message(event)).decode()


def event_from_text(text: str) -> EnvEvent:
    """Return the event of `event_text`.

    Raises:
        InvalidEnvOutputError: an observation or a step is invalid.
        ValueError: it is no event.
    """
    message = decode(text.encode())
    if not isinstance(message, Mapping) or not isinstance(message.get("episode"), int):
        raise ValueError(f"no event of an env: {text!r:.100}")
    return event_from_message(message["episode"], message)


def event_message(event: EnvEvent, encode_image: ImageEncoder = raw_image) -> dict[str, Any]:
    """Return an event without the number of its episode."""
    if isinstance(event, EpisodeStarted):
        observation = observation_message(event.observation, encode_image)
        return {"instruction": event.instruction, "actions": event.actions, "observation": observation}
    if isinstance(event, ActionsExecuted):
        return {"steps": [step_message(step, encode_image) for step in event.steps]}
    failure = event.failure
    return {"failure": [failure.where, failure.error_type, failure.message]}


def event_from_message(
    episode: int, message: Mapping[str, Any], decode_image: ImageDecoder = from_raw_image
) -> EnvEvent:
    """Return the event of `event_message`.

    Raises:
        InvalidEnvOutputError: an observation or a step is invalid.
        KeyError, TypeError: it is no event.
    """
    if "steps" in message:
        return ActionsExecuted(episode, tuple(step_from_message(step, decode_image) for step in message["steps"]))
    if "failure" in message:
        return EpisodeFailed(episode, Failure(*map(str, message["failure"])))
    instruction, actions = validate_instruction(message["instruction"]), validate_actions(message["actions"])
    return EpisodeStarted(episode, instruction, actions, observation_from_message(message["observation"], decode_image))


def event_digest(event: EnvEvent) -> int:
    """Return a hash of the observation and the rewards of an event; `info` may differ between two runs. Only digests of
    the same process can be compared."""
    if isinstance(event, EpisodeStarted):
        return hash((event.instruction, event.actions, _observation_digest(event.observation)))
    if isinstance(event, ActionsExecuted):
        steps = event.steps
        return hash(
            tuple(
                (_observation_digest(step.observation), step.reward, step.terminated, step.truncated) for step in steps
            )
        )
    return hash((event.failure.where, event.failure.error_type, event.failure.message))


def _observation_digest(observation: Observation) -> tuple[Any, ...]:
    return (observation.text, *((image.shape, image.tobytes()) for image in observation.images))
