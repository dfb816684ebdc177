"""Python programs in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from quintet.rewards.verifiers.code_extraction import extract_program
from quintet.sandbox.program_runner import program_runner
from quintet.tools.tool import StatelessTool

SECONDS: Final = 4.0
"""Wall-clock time limit of a program."""


class PythonProgram(StatelessTool):
    """Runs a Python program confined: without network, files or other processes, and with a limit of memory."""

    description: ClassVar[str] = "Runs a Python program and returns what it prints."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the program; it prints its results"}},
        "required": ["code"],
    }

    def execute(self, arguments: Mapping[str, Any]) -> str:
        """Return the output with errors.

        Raises:
            ConfinementError: programs cannot be confined on this machine.
        """
        program = extract_program(str(arguments.get("code", "")))
        result = program_runner().run_script(program, "", SECONDS, with_errors=True)
        ending = f"\nno end after {SECONDS:g} s: the program was stopped" if result.status is None else ""
        return f"{result.output.strip()}{ending}".strip()
