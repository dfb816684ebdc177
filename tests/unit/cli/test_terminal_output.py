"""If these fail, text of models, records or files from others controls the user's terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.cli.messages import describe_long_name
from quintet.cli.terminal_output import visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;cm0gLXJm\x07", "\\x1b]52;c;cm0gLXJm\\x07"),  # writes to the clipboard
        ("\x1b]0;title\x1b\\", "\\x1b]0;title\\x1b\\"),
        ("\x1bP$q m\x1b\\", "\\x1bP$q m\\x1b\\"),  # answers as if typed
        ("\x1b[6n", "\\x1b[6n"),
        ("\x1b[?1049h", "\\x1b[?1049h"),
        ("\x9b6n \x9d0;title", "\\x9b6n \\x9d0;title"),
        ("a\bb\x00", "a\\x08b\\x00"),
        ("ends with \x1b", "ends with \\x1b"),
    ],
)
def test_sequences_that_control_a_terminal_are_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize("text", ["\x1b[1;31mred\x1b[0m", "\x1b[2K\x1b[1A\r", "\x1b[?25l\x1b[?25h", "é 漢 🙂\t\n"])
def test_styles_progress_bars_and_other_text_pass(text: str) -> None:
    assert visible(text) == text


def test_a_message_of_the_command_shows_a_sequence_instead_of_obeying_it(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "quintet", "plan", "missing\x1b]0;title\x07.yaml"]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=tmp_path)
    os.close(terminal)
    output = b""
    while chunk := _read(controller):
        output += chunk
    assert process.wait(60) == 2
    assert b"\\x1b]0;title\\x07" in output
    assert b"\x1b]" not in output


def test_a_name_that_is_too_long_for_a_file_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "overrides.txt").write_text(f"rollout_manager.max_turns=3\ndata.train_files={'a' * 5000}\n")
    command = [sys.executable, "-m", "quintet", "plan", "overrides.txt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    assert f"quintet: data.train_files = {'a' * 60}… (overrides.txt:2): the name of a file is too long" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_is_too_long_is_found_on_the_command_line_and_below_a_section(tmp_path: Path) -> None:
    name = "b" * 300
    (tmp_path / "run.yaml").write_text(f"data:\n  train_files: [{name}]\n")
    arguments = ["plan", str(tmp_path / "run.yaml"), f"policy.path=models/{'c' * 300}"]
    assert describe_long_name(f"/home/models/{'c' * 300}/config.json", arguments).startswith(
        "policy.path = /home/models"
    )
    assert "(command line)" in describe_long_name(f"models/{'c' * 300}", arguments)
    assert f"train_files = {'b' * 60}… ({tmp_path / 'run.yaml'}:2): the" in describe_long_name(name, arguments)
    assert describe_long_name("d" * 300, arguments).startswith("ddd")


def _read(descriptor: int) -> bytes:
    """Return what the terminal shows next; nothing after its last program has ended."""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""


@pytest.mark.parametrize("arguments", [["plan"], ["list"]])
def test_terminals_that_are_not_utf_8_show_other_characters_instead_of_an_error(arguments: list[str]) -> None:
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-m", "quintet", *arguments], env=env, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout
    assert done.stdout.isascii()
