"""If these fail, a user's fault ends with the wrong exit status or without saying what to do."""

from __future__ import annotations

from quintet.errors import ConfigError, InterruptedRun, MachineError, UserError, nearest


def test_the_message_ends_with_what_to_do() -> None:
    assert str(UserError("no room", "free 3 GB")) == "no room\n  free 3 GB"
    assert str(UserError("no room")) == "no room"


def test_exit_statuses_are_those_of_the_command_line() -> None:
    assert ConfigError("x").exit_status == MachineError("x").exit_status == 2
    assert InterruptedRun("x").exit_status == 130
    assert issubclass(InterruptedRun, UserError)


def test_a_configuration_error_keeps_what_programs_need() -> None:
    error = ConfigError("seed = -1", key="seed", value=-1, source="a.yaml:3", hint="give 0")
    assert (error.key, error.value, error.source, error.hint) == ("seed", -1, "a.yaml:3", "give 0")


def test_the_nearest_word_is_near_or_none() -> None:
    assert nearest("stesp", ["seed", "steps"]) == "steps"
    assert nearest("zzzz", ["seed", "steps"]) is None
    assert nearest("x", []) is None
