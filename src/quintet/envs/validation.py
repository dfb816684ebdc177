"""Validation of the return values of env implementations, and their JSON form between processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

from quintet.records import Observation, Step
from quintet.relations import Relation

if TYPE_CHECKING:
    import numpy as np

INVALID_OUTPUT = "InvalidOutput"
"""`Failure.error_type` of an `InvalidEnvOutputError`, part of a metric's name."""
NUMPY_BOOLS = ("bool_", "bool")
VERTICAL, HORIZONTAL = ("above", "below", "same", None), ("left", "right", "same", None)
DIRECTIONS = tuple(dict.fromkeys(filter(None, VERTICAL + HORIZONTAL)))
STEP_FIELDS = frozenset({"observation", "reward", "terminated", "truncated", "info"})


class InvalidEnvOutputError(TypeError):
    """An env returned something that its protocol does not allow."""


def validate_instruction(value: Any) -> str:
    """Return the result of `Env.instruction`.

    Raises:
        InvalidEnvOutputError: it is not text.
    """
    return _text(value, "instruction()")


def validate_actions(value: Any) -> tuple[str, ...]:
    """Return `Env.actions` as a tuple.

    Raises:
        InvalidEnvOutputError: it is not a sequence of words.
    """
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InvalidEnvOutputError(f"`actions` is {_type_name(value)}, not a tuple of words")
    return tuple(_text(word, "`actions`") for word in value)


def validate_observation(value: Any, where: str = "reset()") -> Observation:
    """Return an observation from `Env.reset` or from a step.

    Raises:
        InvalidEnvOutputError: it is not an `Observation` of text and RGB images.
    """
    if not isinstance(value, Observation):
        raise InvalidEnvOutputError(f"{where} returned {_type_name(value)}, not an Observation")
    _text(value.text, f"the observation of {where}")
    if not all(map(_is_image, value.images)):
        raise InvalidEnvOutputError(f"an image of {where} is not a uint8 array [height, width, 3]")
    if value.relations is not None and not all(map(_is_relation, value.relations)):
        raise InvalidEnvOutputError(f"a relation of {where} is no Relation with {', '.join(DIRECTIONS)} or None")
    return value


def _is_relation(relation: Any) -> bool:
    if not isinstance(relation, Relation) or not isinstance(relation.name, str):
        return False
    return relation.vertical in VERTICAL and relation.horizontal in HORIZONTAL


def _is_image(image: Any) -> bool:
    import numpy as np

    return isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3


def validate_step(value: Any) -> Step:
    """Return the result of `Env.step` with Python numbers.

    Raises:
        InvalidEnvOutputError: it is not a `Step`, a field has the wrong type, or the reward is not finite.
    """
    if not isinstance(value, Step):
        raise InvalidEnvOutputError(f"step() returned {_type_name(value)}, not a Step")
    reward = value.reward
    if not isinstance(reward, Real) or not _is_finite(reward):
        raise InvalidEnvOutputError(f"the reward of step() is {reward!r:.100}, not a finite number")
    if not isinstance(value.info, Mapping):
        raise InvalidEnvOutputError(f"the info of step() is {_type_name(value.info)}, not a mapping")
    observation = validate_observation(value.observation, "step()")
    terminated, truncated = _flag(value.terminated, "terminated"), _flag(value.truncated, "truncated")
    return Step(observation, float(reward), terminated, truncated, dict(value.info))


def _is_finite(number: Real) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer larger than any float
        return False


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidEnvOutputError(f"{where} returned {_type_name(value)}, not text")
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool) and type(value).__name__ not in NUMPY_BOOLS:
        raise InvalidEnvOutputError(f"{name} of step() is {_type_name(value)}, not a bool")
    return bool(value)


def _type_name(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


ImageEncoder = Callable[["np.ndarray"], Any]
"""Function from an RGB image to its form in a message."""
ImageDecoder = Callable[[Any], "np.ndarray"]
"""Inverse of an `ImageEncoder`; raises KeyError, TypeError or ValueError for another form."""


def raw_image(image: np.ndarray) -> dict[str, Any]:
    """Return shape and pixels; `quintet.sandbox.json_lines` encodes the bytes."""
    return {"shape": list(image.shape), "pixels": image.tobytes()}


def from_raw_image(message: Any) -> np.ndarray:
    """Return the image of `raw_image`."""
    import numpy as np

    return np.frombuffer(message["pixels"], np.uint8).reshape(message["shape"])


def observation_message(observation: Observation, encode_image: ImageEncoder = raw_image) -> dict[str, Any]:
    """Return an observation as a JSON object."""
    message = {"text": observation.text, "images": [encode_image(image) for image in observation.images]}
    if observation.relations is None:
        return message
    return message | {"relations": relations_message(observation.relations)}


def relations_message(relations: Sequence[Relation]) -> list[list[str | None]]:
    """Return relations as JSON arrays of name, vertical and horizontal."""
    return [[relation.name, relation.vertical, relation.horizontal] for relation in relations]


def relations_from_message(message: Any) -> tuple[Relation, ...] | None:
    """Return the relations of `relations_message`; None stays None.

    Raises:
        TypeError: the message has another form.
    """
    return None if message is None else tuple(Relation(*relation) for relation in message)


def observation_from_message(message: Any, decode_image: ImageDecoder = from_raw_image) -> Observation:
    """Return the observation of `observation_message`.

    Raises:
        InvalidEnvOutputError: the message has another form.
    """
    return validate_observation(_observation_from_message(message, decode_image))


def _observation_from_message(message: Any, decode_image: ImageDecoder) -> Observation:
    """Return an observation that has not been validated."""
    try:
        images = message["images"]
        relations = relations_from_message(message.get("relations"))
        return Observation(message["text"], tuple(map(decode_image, images)) if images else (), relations)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidEnvOutputError(f"the worker process sent no valid observation: {message!r:.100}") from error


def step_message(step: Step, encode_image: ImageEncoder = raw_image) -> dict[str, Any]:
    """Return a step as a JSON object; values in `info` that JSON cannot express become text."""
    return {
        "observation": observation_message(step.observation, encode_image),
        "reward": step.reward,
        "terminated": step.terminated,
        "truncated": step.truncated,
        "info": step.info,
    }


def step_from_message(message: Any, decode_image: ImageDecoder = from_raw_image) -> Step:
    """Return the step of `step_message`.

    Raises:
        InvalidEnvOutputError: the message has another form.
    """
    if not isinstance(message, Mapping) or message.keys() != STEP_FIELDS:
        raise InvalidEnvOutputError(f"the worker process sent no valid step: {message!r:.100}")
    observation = _observation_from_message(message["observation"], decode_image)
    return validate_step(Step(**{**message, "observation": observation}))
