"""Problems of reasoning-gym's generators (Open-Thought 2025), with what its own rules need to judge them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from quintet.data.tasks import GYM, Problem, TaskOptions, answered, options_of
from quintet.errors import ConfigError, nearest

__all__ = ["GymTask"]

SERIES: Final = 1000
"""Problems that a generator is told to have: some do work for all of them at the start."""
OUR_OWN: Final = ("size", "seed")
"""Options of every generator that are set here."""


class GymTask:
    """A generator by its name; options that aren't ours are its own.

    The truth of a row is the whole entry as JSON: `question`, `answer` and `metadata`, whose `source_dataset` names
    the generator, as `reasoning_gym.get_score_answer_fn(name)(answer, entry)` takes it.
    """

    ability = "reasoning"

    def __init__(self, options: Mapping[str, Any]) -> None:
        own = {name: value for name, value in options.items() if name in TaskOptions.model_fields}
        theirs = {name: value for name, value in options.items() if name not in own and name != "generator"}
        self._options = options_of(TaskOptions, own, GYM)
        self._name = _known(options.get("generator"))
        self._theirs = theirs
        self._made: tuple[tuple[int, int], Any] | None = None
        self.source = f"{GYM}/{self._name}"
        self._dataset(0, 0)

    def problem(self, seed: int, number: int) -> Problem | None:
        """See `Task.problem`."""
        series, place = divmod(number, SERIES)
        entry = self._dataset(seed, series)[place]
        truth = json.dumps(entry, default=_as_json)
        if number == 0:
            self._check(entry, truth)
        answer = entry["answer"]
        working = entry["metadata"].get("answer_cot") if self._options.style == "worked" else None
        return Problem(
            question=f"{entry['question'].rstrip()}\n{self._options.instruction}".rstrip(),
            truth=truth,
            key=entry["question"],
            response=None if answer is None else answered(str(answer), working),
            about={"generator": self._name},
        )

    def _dataset(self, seed: int, series: int) -> Any:
        """The generator under a seed of its own: it draws a problem from the sum of seed and number, so that
        neighbouring seeds would share all problems but one."""
        if self._made is None or self._made[0] != (seed, series):
            import reasoning_gym

            spread = zlib.crc32(f"{self._name}/{seed}/{series}".encode())
            try:
                made = reasoning_gym.create_dataset(self._name, seed=spread, size=SERIES, **self._theirs)
            except (TypeError, ValueError, AssertionError) as error:
                raise self._refused(error) from error
            self._made = (seed, series), made
        return self._made[1]

    def _refused(self, error: Exception) -> ConfigError:
        from reasoning_gym.factory import DATASETS

        legal = [field.name for field in fields(DATASETS[self._name][1]) if field.name not in OUR_OWN]
        unknown = next((name for name in self._theirs if name not in legal), None)
        close = None if unknown is None else nearest(unknown, legal)
        hint = (f"did you mean {close}? " if close else "") + f"it takes {', '.join(legal)}"
        told = str(error) if unknown is None else f"unknown option {unknown}"
        return ConfigError(f"{GYM}:{self._name}: {told}", key=unknown, hint=hint)

    def _check(self, entry: Mapping[str, Any], truth: str) -> None:
        """Refuse a generator whose rules judge otherwise once the entry was stored."""
        import reasoning_gym

        judge = reasoning_gym.get_score_answer_fn(self._name)
        before, after = (judge(entry["answer"], one) for one in (entry, json.loads(truth)))
        if before != after:
            told = f"{GYM}:{self._name}: what its rules need can't be stored in a file"
            raise ConfigError(told, value=self._name, hint="choose another generator")


def _known(name: str | None) -> str:
    from reasoning_gym.factory import DATASETS

    if name in DATASETS:
        return str(name)
    close = nearest(name, DATASETS) if name else None
    hint = f"did you mean {GYM}:{close}?" if close else f"there are {', '.join(sorted(DATASETS))}"
    told = f"{GYM} has no generator {name}" if name else f"{GYM} needs a generator, as {GYM}:chain_sum"
    raise ConfigError(told, value=name, hint=hint)


def _as_json(value: Any) -> Any:
    """What JSON doesn't know: numpy's numbers and arrays, sets, and others as their text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
