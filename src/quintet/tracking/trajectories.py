"""Trajectory files: JSON lines, one trajectory per line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from quintet.errors import MachineError
from quintet.records import Failure, Trajectory, Turn
from quintet.tracking.atomic_files import translate_os_errors, write_atomic


def write_trajectories(
    path: Path,
    step: int,
    split: Literal["train", "validation"],
    trajectories: Iterable[Trajectory],
    *,
    tokens: bool = False,
) -> None:
    """Write the trajectories of one step atomically.

    `tokens` adds token ids, log-probs (nats) and the weight version of each turn, which makes the file several times
    larger. Images are counted, not stored.

    Raises:
        MachineError: The file cannot be written.
    """
    with translate_os_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        json.dumps({"step": step, "split": split} | _trajectory(item, tokens), ensure_ascii=False)
        for item in trajectories
    )
    # Sampled bytes may decode to lone surrogates, which UTF-8 cannot encode: write them as JSON's \uXXXX.
    write_atomic(path, "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))


def read_trajectories(path: Path) -> list[dict[str, Any]]:
    """Read the trajectories that `write_trajectories` wrote, as dicts.

    Raises:
        MachineError: The file is missing or a line is not a trajectory; the message names the line.
    """
    with translate_os_errors(path):
        lines = path.read_text(encoding="utf-8").split("\n")
    return [_parse(path, number, line) for number, line in enumerate(lines, 1) if line]


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        episode = json.loads(line)
    except ValueError as error:
        raise MachineError(f"{path}:{number} is not JSON: {error}", hint="the file was changed or cut") from None
    if not isinstance(episode, dict) or not isinstance(episode.get("turns"), list):
        raise MachineError(f"{path}:{number} is not a trajectory", hint="the file was changed or cut")
    if "world" in episode:  # written before environments were called `env`
        episode["env"] = episode.pop("world")
    return episode


def _trajectory(item: Trajectory, tokens: bool) -> dict[str, Any]:
    return {
        "env": item.env,
        **({} if item.kind is None else {"kind": item.kind}),
        "seed": item.seed,
        "group": item.group,
        "sample": item.sample,
        "outcome": item.outcome.value,
        "success": item.success,
        "reward": item.reward,
        "failure": None if item.failure is None else _failure(item.failure),
        **({"parts": dict(item.parts), "predicted": item.predicted} if item.parts else {}),
        "turns": [_turn(turn, tokens) for turn in item.turns],
    }


def _failure(failure: Failure) -> dict[str, str]:
    return {"where": failure.where, "kind": failure.kind, "message": failure.message}


def _turn(turn: Turn, tokens: bool) -> dict[str, Any]:
    record: dict[str, Any] = {
        "observation": turn.observation,
        "text": turn.text,
        "actions": [_action(action) for action in turn.actions],
        "valid_format": turn.valid_format,
        "reward": turn.reward,
        "stop": turn.stop.value,
        "prompt_tokens": len(turn.prompt),
        "response_tokens": len(turn.tokens),
        "images": len(turn.images),
        "frames": list(turn.frames),
    }
    if tokens:
        record |= {
            "prompt": list(turn.prompt),
            "tokens": list(turn.tokens),
            "logprobs": list(turn.logprobs),
            "continues": turn.continues,
            "weight_version": turn.weight_version,
        }
    return record


def _action(action: Any) -> Any:
    """Return text actions unchanged and arrays of continuous actions as nested lists."""
    return action.tolist() if hasattr(action, "tolist") else action
