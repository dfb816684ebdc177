"""Trajectory files: JSON lines, one trajectory per line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError

from quintet.contained_files import lines_of, open_contained
from quintet.errors import MachineError
from quintet.records import Trajectory, Turn
from quintet.tracking.atomic_files import translate_os_errors, write_atomic
from quintet.tracking.image_files import write_image

FORMER_KEYS = {"world": "env", "kind": "env_type", "parts": "reward_components", "predicted": "extracted_answer"}
"""Keys of trajectories in files of earlier versions, and their names now."""
FORMER_TURN_KEYS = {"stop": "finish_reason"}
"""The same for turns."""
IMAGE_FILES = ("image_files", "image_files_after")
"""Keys of a turn with the names of image files: of `Turn.images` and `Turn.images_after`."""
CHANGED_HINT = "the file was changed or cut: remove it"


class _StoredTurn(BaseModel, extra="allow", strict=True):
    """Keys of a turn that the readers of trajectory files use."""

    observation: str
    text: str
    actions: list[Any]
    valid_format: bool
    reward: float
    finish_reason: str
    frames: list[str]
    response_tokens: int = 0
    tokens: list[int] = []
    image_files: list[str] = []
    image_files_after: list[str] = []


class _StoredFailure(BaseModel, extra="allow", strict=True):
    where: str
    error_type: str
    message: str


class StoredEpisode(BaseModel, extra="allow", strict=True):
    """Keys of a trajectory besides its turns that the readers of trajectory files use."""

    env: str
    seed: int
    group: int
    sample: int
    outcome: str
    success: bool
    reward: float
    env_type: str = ""
    failure: _StoredFailure | None = None


class _StoredTrajectory(StoredEpisode):
    turns: list[_StoredTurn]


class EpisodeTokens(NamedTuple):
    """Statistics of the response tokens of one episode, which its group and sample identify."""

    group: int
    sample: int
    turns: Mapping[int, Mapping[str, list[float]]]
    """For each turn `learner_logprobs` and `entropies` in nats, and `advantages`; one value per token."""


def write_trajectories(
    path: Path,
    step: int,
    split: Literal["train", "validation"],
    trajectories: Iterable[Trajectory],
    *,
    tokens: Iterable[EpisodeTokens] | None = None,
    image_episodes: int = 0,
) -> None:
    """Write the trajectories of one step atomically.

    `tokens` adds token ids, log-probs of the engine (nats), the weight version and the given statistics to each turn,
    which makes the file several times larger. The images of the first `image_episodes` trajectories are written as PNG
    files next to it, which turns refer to by `image_files` and `image_files_after`.

    Raises:
        MachineError: The file cannot be written.
    """
    with translate_os_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    statistics = None if tokens is None else {(episode.group, episode.sample): episode.turns for episode in tokens}
    lines = (
        json.dumps({"step": step, "split": split} | _trajectory(item, statistics, images), ensure_ascii=False)
        for number, item in enumerate(trajectories)
        for images in [path.parent if number < image_episodes else None]
    )
    # Sampled bytes may decode to lone surrogates, which UTF-8 cannot encode: write them as JSON's \uXXXX.
    write_atomic(path, "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))


class StoredTrajectories(NamedTuple):
    """Contents of a trajectory file, or of its first lines."""

    by_line: Mapping[int, dict[str, Any]]
    """Trajectories by the number of their line, from 1."""
    damage: Sequence[str]
    """Why lines are left out; each text names its line."""


def read_trajectories(path: Path, count: int | None = None, *, directory: Path | None = None) -> StoredTrajectories:
    """Read the trajectories that `write_trajectories` wrote, or the first `count` lines of them, as dicts. The file may
    be a link within the run's `directory`, by default its own.

    Raises:
        MachineError: The file cannot be read, is a link out of the directory, or no file.
    """
    episodes: dict[int, dict[str, Any]] = {}
    damage: list[str] = []
    with translate_os_errors(path), open_contained(directory or path.parent, path.absolute()) as file:
        for number, line in enumerate(islice(lines_of(file), count), 1):
            if text := line.decode(errors="replace").removesuffix("\n"):
                try:
                    episodes[number] = parse_trajectory(path, number, text)
                except MachineError as error:
                    damage.append(error.message)
    return StoredTrajectories(episodes, damage)


def parse_trajectory(path: Path, number: int, line: str) -> dict[str, Any]:
    """Return the trajectory in line `number` of a file.

    Raises:
        MachineError: The line is not a trajectory; the message names it.
    """
    try:
        episode: dict[str, Any] = json.loads(line)
        _rename_former_keys(episode)
        _StoredTrajectory.model_validate(episode)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise MachineError(f"{path}:{number} is not a trajectory: {key}: {first['msg']}", CHANGED_HINT) from None
    except (ValueError, RecursionError) as error:
        raise MachineError(f"{path}:{number} is not JSON: {error}", CHANGED_HINT) from None
    except (TypeError, AttributeError, KeyError):
        raise MachineError(f"{path}:{number} is not a trajectory", CHANGED_HINT) from None
    return episode


def _rename_former_keys(episode: dict[str, Any]) -> None:
    """Replace keys of files of earlier versions, in place."""
    for record, names in ((episode, FORMER_KEYS), *((turn, FORMER_TURN_KEYS) for turn in episode["turns"])):
        for former, name in names.items():
            if former in record:
                record[name] = record.pop(former)
    if episode.get("failure") and "kind" in episode["failure"]:
        episode["failure"]["error_type"] = episode["failure"].pop("kind")


def _trajectory(
    item: Trajectory,
    statistics: Mapping[tuple[int, int], Mapping[int, Mapping[str, list[float]]]] | None,
    image_directory: Path | None,
) -> dict[str, Any]:
    """Return a trajectory as a JSON object; with the tokens of its turns if there are statistics."""
    turn_statistics = None if statistics is None else statistics.get((item.group, item.sample), {})
    return {
        "env": item.env,
        **({} if item.env_type is None else {"env_type": item.env_type}),
        "seed": item.seed,
        "group": item.group,
        "sample": item.sample,
        "outcome": item.outcome.value,
        "success": item.success,
        **({"truncated": True} if item.truncated else {}),
        "reward": item.reward,
        "failure": None if item.failure is None else asdict(item.failure),
        **(
            {"reward_components": dict(item.reward_components), "extracted_answer": item.extracted_answer}
            if item.reward_components
            else {}
        ),
        "turns": [
            _turn(turn)
            | ({} if turn_statistics is None else _tokens(turn, turn_statistics.get(number, {})))
            | _image_files(turn, image_directory)
            for number, turn in enumerate(item.turns)
        ],
    }


def _turn(turn: Turn) -> dict[str, Any]:
    # text actions unchanged, arrays of continuous actions as nested lists
    record: dict[str, Any] = {
        "observation": turn.observation,
        "text": turn.text,
        "actions": [action.tolist() if hasattr(action, "tolist") else action for action in turn.actions],
        "valid_format": turn.valid_format,
        "reward": turn.reward,
        "finish_reason": turn.finish_reason.value,
        "prompt_tokens": len(turn.prompt),
        "response_tokens": len(turn.tokens),
        "images": len(turn.image_inputs or turn.images),
        "frames": list(turn.frames),
    }
    if turn.state_scores:
        record["state_scores"] = [asdict(score) for score in turn.state_scores]
    return record


def _tokens(turn: Turn, statistics: Mapping[str, list[float]]) -> dict[str, Any]:
    return {
        "prompt": list(turn.prompt),
        "tokens": list(turn.tokens),
        "logprobs": list(turn.logprobs),
        "continues": turn.continues,
        "weight_version": turn.weight_version,
        **statistics,
    }


def _image_files(turn: Turn, directory: Path | None) -> dict[str, list[str]]:
    """Write the images of a turn and return their paths relative to `directory`; nothing if it is None."""
    if directory is None:
        return {}
    images = zip(IMAGE_FILES, (turn.images, turn.images_after), strict=True)
    return {
        name: [write_image(directory, image) for image in turn_images] for name, turn_images in images if turn_images
    }
