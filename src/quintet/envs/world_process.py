"""A process that holds one game's world at a time: reads what to do from its connection, a line of JSON each, and
answers in lines.

It is forked by `quintet.processes.keeper`. What a world prints goes to standard error. It is told `{"open": seed}`,
`{"move": [action, …]}` and `{"close": true}`, and says `{"ready": true}` or `{"broken": fault}` once, then
`{"opened": {…}}`, a `{"step": {…}, "last": …}` for each action that was executed, `{"closed": true}`, or
`{"failure": {…}}`.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from quintet.config.native import WorldConfig
from quintet.envs.answers import (
    checked_actions,
    checked_instruction,
    checked_observation,
    observation_message,
    step_message,
)
from quintet.envs.catalogue import world_maker
from quintet.envs.world import WORLDS, World
from quintet.envs.worlds import close_world, failure_of, moves
from quintet.processes import confinement
from quintet.processes.kept import told
from quintet.processes.wire import Lines, decoded, encoded
from quintet.records import Failure

__all__ = ["warm", "work"]

Message = Mapping[str, Any]


@cache
def _reader() -> TypeAdapter[WorldConfig]:
    return TypeAdapter(WorldConfig)


def warm() -> None:
    """Do once, before processes are forked, what takes longer than to play a game."""
    _reader()
    # looks through all installed packages for theirs
    list(WORLDS)


def work(connection: socket.socket, setup: Message) -> None:
    """Play until the connection ends; `setup` holds the world's configuration and the limit of its memory."""
    try:
        make_world = _prepared(setup)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - handed on, whatever a user's file raises
        connection.sendall(encoded({"broken": told(error)}))
        return
    connection.sendall(encoded({"ready": True}))
    table = _Table(make_world)
    for line in Lines().read(connection):
        for answer in table.answers(decoded(line)):
            connection.sendall(encoded(answer))


def _prepared(setup: Message) -> Callable[[], World]:
    if setup["memory_bytes"] is not None:
        confinement.limit(setup["memory_bytes"])
    config: WorldConfig = _reader().validate_json(json.dumps(setup["world"]))
    return world_maker(config)


class _Table:
    """Where one game is played after another."""

    def __init__(self, make_world: Callable[[], World]) -> None:
        self._make_world = make_world
        self._world: World | None = None
        self._at = "start"

    def answers(self, message: Message) -> Iterator[Message]:
        """What comes of a message."""
        try:
            if "open" in message:
                yield self._opened(message["open"])
            elif "move" in message:
                yield from self._moved(message["move"])
            else:
                self._close()
                yield {"closed": True}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a world raises is kept as data
            yield {"failure": _fields(failure_of(self._at, error))}
            return

    def _opened(self, seed: int) -> Message:
        # forked from one process, they would all draw alike from the generators that belong to nobody
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._at = "start"
        world = self._world = self._make_world()
        instruction, actions = checked_instruction(world.instruction()), checked_actions(world.actions)
        self._at = "reset"
        observation = observation_message(checked_observation(world.reset(seed)))
        self._at = "step"
        return {"opened": {"instruction": instruction, "actions": actions, "observation": observation}}

    def _moved(self, actions: Sequence[Any]) -> Iterator[Message]:
        if self._world is None:
            raise AssertionError("a move before a start")
        for count, step in enumerate(moves(self._world, actions), 1):
            last = count == len(actions) or step.terminated or step.truncated
            yield {"step": step_message(step), "last": last}

    def _close(self) -> None:
        if self._world is not None:
            close_world(self._world)
            self._world = None


def _fields(failure: Failure) -> Message:
    return {"where": failure.where, "kind": failure.kind, "message": failure.message}
