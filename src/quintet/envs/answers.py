"""What worlds answer, looked at before it is believed, and as JSON between processes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from quintet.records import Observation, Step

__all__ = [
    "Rubbish",
    "checked_actions",
    "checked_instruction",
    "checked_observation",
    "checked_step",
    "observation_from",
    "observation_message",
    "step_from",
    "step_message",
]


NUMPY_BOOLS = ("bool_", "bool")


class Rubbish(TypeError):
    """A world answered what isn't what it promised."""


def checked_instruction(given: Any) -> str:
    """What `World.instruction` gave.

    Raises:
        Rubbish: it isn't text.
    """
    return _text(given, "instruction()")


def checked_actions(given: Any) -> tuple[str, ...]:
    """What `World.actions` holds.

    Raises:
        Rubbish: it isn't a sequence of words.
    """
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise Rubbish(f"`actions` is {_kind(given)}, not a tuple of words")
    return tuple(_text(word, "`actions`") for word in given)


def checked_observation(given: Any, where: str = "reset()") -> Observation:
    """What `World.reset` gave, or what stands in a step.

    Raises:
        Rubbish: it isn't an `Observation` of text and RGB pictures.
    """
    if not isinstance(given, Observation):
        raise Rubbish(f"{where} gave {_kind(given)}, not an Observation")
    _text(given.text, f"the observation of {where}")
    if not all(map(_is_picture, given.images)):
        raise Rubbish(f"a picture of {where} isn't a uint8 array [height, width, 3]")
    return given


def _is_picture(image: Any) -> bool:
    import numpy as np

    return isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3


def checked_step(given: Any) -> Step:
    """What `World.step` gave, its numbers as Python's own.

    Raises:
        Rubbish: it isn't a `Step`, or a part of it has the wrong type, or the reward isn't finite.
    """
    if not isinstance(given, Step):
        raise Rubbish(f"step() gave {_kind(given)}, not a Step")
    reward = given.reward
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise Rubbish(f"the reward of step() is {reward!r:.100}, not a finite number")
    if not isinstance(given.info, Mapping):
        raise Rubbish(f"the info of step() is {_kind(given.info)}, not a mapping")
    observation = checked_observation(given.observation, "step()")
    ends = (_flag(given.terminated, "terminated"), _flag(given.truncated, "truncated"))
    return Step(observation, float(reward), *ends, dict(given.info))


def _text(given: Any, where: str) -> str:
    if not isinstance(given, str):
        raise Rubbish(f"{where} gave {_kind(given)}, not text")
    return given


def _flag(given: Any, name: str) -> bool:
    if not isinstance(given, bool) and type(given).__name__ not in NUMPY_BOOLS:
        raise Rubbish(f"{name} of step() is {_kind(given)}, not a bool")
    return bool(given)


def _kind(given: Any) -> str:
    name = type(given).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def observation_message(observation: Observation) -> dict[str, Any]:
    """An observation as JSON; bytes are for `quintet.processes.wire`."""
    images = [{"shape": list(image.shape), "pixels": image.tobytes()} for image in observation.images]
    return {"text": observation.text, "images": images}


def observation_from(message: Any) -> Observation:
    """What `observation_message` made.

    Raises:
        Rubbish: nothing that it makes.
    """
    import numpy as np

    try:
        images = tuple(np.frombuffer(image["pixels"], np.uint8).reshape(image["shape"]) for image in message["images"])
        found = Observation(message["text"], images)
    except (KeyError, TypeError, ValueError) as error:
        raise Rubbish(f"its process sent what isn't an observation: {message!r:.100}") from error
    return checked_observation(found)


def step_message(step: Step) -> dict[str, Any]:
    """A step as JSON; what JSON doesn't know in `info` becomes text."""
    return {
        "observation": observation_message(step.observation),
        "reward": step.reward,
        "terminated": step.terminated,
        "truncated": step.truncated,
        "info": step.info,
    }


def step_from(message: Any) -> Step:
    """What `step_message` made.

    Raises:
        Rubbish: nothing that it makes.
    """
    if not isinstance(message, Mapping) or message.keys() != {
        "observation",
        "reward",
        "terminated",
        "truncated",
        "info",
    }:
        raise Rubbish(f"its process sent what isn't a step: {message!r:.100}")
    return checked_step(Step(**{**message, "observation": observation_from(message["observation"])}))
