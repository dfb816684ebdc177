"""The state of each key that the user set: what becomes of it in the run at hand."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quintet.config.checks.unread_keys import unread_reasons
from quintet.config.composed import ComposedConfig, Setting
from quintet.config.dotted import is_inside
from quintet.config.problems import ConfigProblem


class State(StrEnum):
    """State of a key in a run."""

    HONOURED = "honoured"
    SUBSTITUTE = "honoured by a substitute"
    NO_EFFECT = "no effect here"
    WAITS = "waits for a capability"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class KeyState:
    """A key that the user set, with its state in the run."""

    setting: Setting
    state: State
    reason: str = ""
    """Why the key is not simply honoured."""

    def to_json(self) -> dict[str, Any]:
        """Return the state with what the user set, for JSON."""
        setting = self.setting
        return {
            "key": setting.name,
            "value": setting.value,
            "source": setting.source,
            "native": list(setting.native),
            "state": self.state.value,
            "reason": self.reason,
        }


def key_states(composed: ComposedConfig, problems: Iterable[ConfigProblem] = ()) -> tuple[KeyState, ...]:
    """Return the state of each key that the user set; `problems` are those of the run, if it has not been refused."""
    listed, reason_of = [*problems], unread_reasons(composed.experiment)
    return tuple(_key_state(setting, listed, reason_of) for setting in composed.settings)


def count_states(states: Sequence[KeyState]) -> Mapping[State, int]:
    """Return the number of keys in each state that a key has, in the order of `State`."""
    counts = Counter(each.state for each in states)
    return {state: counts[state] for state in State if counts[state]}


def describe_counts(states: Sequence[KeyState]) -> str:
    """Return the numbers of keys by state, for a line of output."""
    return ", ".join(f"{count} {state}" for state, count in count_states(states).items())


def _key_state(setting: Setting, problems: Sequence[ConfigProblem], reason_of: Callable[[str], str | None]) -> KeyState:
    if (problem := next((each for each in problems if _concerns(each, setting)), None)) is not None:
        waits = problem.capability is not None and problem.capability.is_missing
        return KeyState(setting, State.WAITS if waits else State.REFUSED, problem.message)
    if setting.no_effect is not None:
        return KeyState(setting, State.NO_EFFECT, setting.no_effect)
    reasons = [reason_of(key) for key in setting.native]
    if reasons and all(reasons):
        return KeyState(setting, State.NO_EFFECT, "; ".join(dict.fromkeys(filter(None, reasons))))
    if setting.substitute is not None:
        return KeyState(setting, State.SUBSTITUTE, setting.substitute)
    return KeyState(setting, State.HONOURED)


def _concerns(problem: ConfigProblem, setting: Setting) -> bool:
    """Return whether a problem is about a setting, by its key, a native key that follows from it, or its section."""
    if is_inside(setting.key, problem.key):
        return True
    return any(is_inside(key, problem.key) or is_inside(problem.key, key) for key in setting.native)
