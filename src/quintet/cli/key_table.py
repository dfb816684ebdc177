"""Output of `quintet plan --keys`: every key that the user set, by its state."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from quintet.cli.tables import clean, page, section
from quintet.config.key_states import KeyState, State, count_states
from quintet.config.problems import describe_setting


def print_keys(states: Sequence[KeyState]) -> None:
    """Print the keys in each state, with value, source, native keys and reason."""
    with page() as out:
        out.print(Text(f"{len(states)} keys are set", style="bold"))
        for state, count in count_states(states).items():
            section(out, f"{state.value} ({count})")
            for each in (each for each in states if each.state is state):
                _print_key(out, each)


def _print_key(out: Console, each: KeyState) -> None:
    setting = each.setting
    _print_line(out, f"  {describe_setting(setting.name, setting.value, setting.source)}")
    if setting.native and setting.native != (setting.name,):
        _print_line(out, f"      native: {', '.join(setting.native)}", style="dim")
    if each.reason and each.state is not State.HONOURED:
        _print_line(out, f"      {each.reason}", style="dim")


def _print_line(out: Console, text: str, style: str = "") -> None:
    out.print(Text(clean(text), style=style), soft_wrap=True)
