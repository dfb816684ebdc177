"""Several worlds in one run: which is next, and where each is played."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from typing import Any

from quintet.config.native import Experiment, PlayedWorld
from quintet.envs.catalogue import open_worlds, under_key
from quintet.envs.seeds import Starts, WorldStarts, seed_of, start_in, world_of
from quintet.envs.worlds import Answered, Worlds
from quintet.errors import ConfigError

__all__ = ["MixedStarts", "MixedWorlds", "Turns", "open_starts", "worlds_of"]

LOOK_SECONDS = 0.005
"""How long one world is waited for before the next is asked, where several are at work."""


class Turns:
    """Whose turn it is, by shares: always that of the one which is furthest behind its share. So none is ever more
    than one turn ahead, and where shares come out whole, they are met to the turn."""

    def __init__(self, shares: Sequence[float]) -> None:
        whole = sum(map(Fraction, shares))
        self._shares = [Fraction(share) / whole for share in shares]
        self.taken = [0] * len(shares)
        """How many turns each has had."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        number = sum(self.taken) + 1
        behind = [share * number - taken for share, taken in zip(self._shares, self.taken, strict=True)]
        chosen = behind.index(max(behind))
        self.taken[chosen] += 1
        return chosen


class MixedStarts:
    """Seeds of several worlds, by share: see `Starts`. What decides is how many each has had, which a checkpoint
    keeps."""

    def __init__(self, worlds: Sequence[PlayedWorld], seed: int) -> None:
        self._worlds = worlds
        self._starts = [WorldStarts(one.start_states, seed, one.validation_games) for one in worlds]
        self._names = [one.name for one in worlds]
        self._turns = self._fresh()

    def _fresh(self) -> Turns:
        return Turns([one.share for one in self._worlds])

    def take(self, count: int) -> list[int]:
        """See `Starts.take`."""
        return [start_in(world, self._starts[world].take(1)[0]) for world in islice(self._turns, count)]

    def held_out(self) -> list[int]:
        """See `Starts.held_out`; one world after another."""
        return [start_in(world, seed) for world, starts in enumerate(self._starts) for seed in starts.held_out()]

    def trials(self, count: int) -> list[int]:
        """See `Starts.trials`; by share, too."""
        order = list(islice(self._fresh(), count))
        seeds = [iter(starts.trials(order.count(world))) for world, starts in enumerate(self._starts)]
        return [start_in(world, next(seeds[world])) for world in order]

    def state(self) -> dict[str, Any]:
        """See `Starts.state`."""
        return {"worlds": self._names, "drawn": list(self._turns.taken)}

    def load(self, state: Mapping[str, Any]) -> None:
        """See `Starts.load`.

        Raises:
            ConfigError: the worlds were written in another order: their starts are numbered by it.
        """
        if state["worlds"] != self._names:
            then, now = ", ".join(state["worlds"]), ", ".join(self._names)
            message = f"worlds: the checkpoint knows them in the order {then}, and now it is {now}"
            raise ConfigError(message, key="worlds", value=self._names, hint="write them in the order of before")
        self._turns.taken = [int(number) for number in state["drawn"]]
        for starts, number in zip(self._starts, self._turns.taken, strict=True):
            starts.load({"drawn": number})


class MixedWorlds:
    """Several worlds behind one: each game is played in the world that its start says. See `Worlds`."""

    def __init__(self, worlds: Sequence[Worlds]) -> None:
        self._worlds = worlds
        self._playing: dict[int, Worlds] = {}

    @property
    def seconds(self) -> float:
        """See `Worlds.seconds`."""
        return sum(one.seconds for one in self._worlds)

    def open(self, game: int, seed: int) -> None:
        """See `Worlds.open`; `seed` says the world, too."""
        self._playing[game] = self._worlds[world_of(seed)]
        self._playing[game].open(game, seed_of(seed))

    def move(self, game: int, actions: Sequence[Any]) -> None:
        """See `Worlds.move`."""
        self._playing[game].move(game, actions)

    def drop(self, game: int) -> None:
        """See `Worlds.drop`."""
        world = self._playing.pop(game, None)
        if world is not None:
            world.drop(game)

    def answers(self, *, wait: bool = False, seconds: float | None = None) -> list[Answered]:
        """See `Worlds.answers`."""
        found = [answer for one in self._worlds for answer in one.answers()]
        while wait and not found and (asked := [one for one in self._worlds if one.asked]):
            most = seconds if len(asked) == 1 else LOOK_SECONDS
            found = [answer for one in asked for answer in one.answers(wait=True, seconds=most)]
            wait = seconds is None
        return found

    @property
    def asked(self) -> bool:
        """See `Worlds.asked`."""
        return any(one.asked for one in self._worlds)

    def close(self) -> None:
        """See `Worlds.close`."""
        self._playing.clear()
        for one in self._worlds:
            one.close()


def open_starts(config: Experiment) -> Starts:
    """Where the games of a run begin that plays worlds."""
    played = config.played
    if len(played) > 1:
        return MixedStarts(played, config.seed)
    return WorldStarts(played[0].start_states, config.seed, played[0].validation_games)


def worlds_of(config: Experiment) -> Worlds:
    """Where the games of a run are played, in one world or several.

    Raises:
        ConfigError: a user's own world can't be loaded; the message names its key.
        MachineError: no process can be started.
    """
    opened: list[Worlds] = []
    try:
        for one in config.played:
            with under_key(one.key):
                opened.append(open_worlds(one.config))
    except BaseException:
        for worlds in opened:
            worlds.close()
        raise
    return opened[0] if len(opened) == 1 else MixedWorlds(opened)
