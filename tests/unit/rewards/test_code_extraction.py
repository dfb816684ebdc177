"""If these fail, a correct program scores 0 because of the text or fences around it."""

from __future__ import annotations

import time

import pytest

from quintet.rewards.verifiers.code_extraction import extract_program, python_blocks

PROGRAM = "def f(n):\n    return 2 * n\n"
FENCED = f"```python\n{PROGRAM}```"


def indented(text: str, prefix: str) -> str:
    return "\n".join(prefix + line for line in text.split("\n"))


@pytest.mark.parametrize(
    "info",
    [
        *("python", "python3", "Python 3", "PYTHON", "py", "py3", "{.python}", " {.python .numberLines}", "{python}"),
        *('python title="a.py"', "python:main.py", "python,linenos", "python {1,3}", "main.py"),
        *("ipython", "python3.11", "", "python_code", "python-exec", "lang=python", "language-python"),
        *("code", "text", "plaintext", "Solution"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("fence", ["```", "~~~", "`````"])
def test_every_spelling_of_the_language_is_python(fence: str, info: str) -> None:
    assert extract_program(f"Text\n{fence}{info}\n{PROGRAM}{fence}\nDone.") == PROGRAM


@pytest.mark.parametrize(
    "text",
    [
        f"```text\nhello\n```\n{FENCED}",
        f'{FENCED}\n```json\n{{"a": 1}}\n```',
        f"{FENCED}\n```bash\npython main.py\n```\n```output\n6\n```",
        f"{FENCED}\nOutput:\n```\n6\n8\n```",
        f"{FENCED}\n```python\n>>> f(2)\n4\n```",
        f"{FENCED}\n```pycon\n>>> f(2)\n4\n```",
        f"```\n{PROGRAM}```\nOutput:\n```\n[1, 2]\n```",
        f"```\n{PROGRAM}```\nOutput:\n```\nx = 3\n```",
        f"```\n{PROGRAM}```\nOutput:\n```\nhello\n```",
        f"```python\ndef f(n): return 0\n```\nBetter:\n{FENCED}",
        f"```python\ndef f(n:\nWait.\n{FENCED}",
        f"```python\n{PROGRAM}",
        f"~~~python\n{PROGRAM}",
        FENCED.replace("\n", "\r\n"),
        indented(FENCED, "   "),
        f"1. Program:\n\n{indented(FENCED, '   ')}",
        f"- Program:\n\n{indented(FENCED, '    ')}",
        f"Program:\n\n{indented(FENCED, '    ')}",
        indented(FENCED, "> "),
        f"<answer>\n{FENCED}\n</answer>",
        f"<answer>{FENCED}</answer>",
        f"{FENCED}<|im_end|>",
        *(f"<{tag}>\n{PROGRAM}\n</{tag}>" for tag in ("answer", "solution", "code", "python")),
        f"<answer>{PROGRAM}</answer>",
        f"<answer>\n{PROGRAM}",
        f"<think>def</think>\n<answer>\n{indented(PROGRAM, '    ')}\n</answer><|im_end|>",
        f"Draft:\n```python\ndef f(n): return 0\n```\n<answer>\n{PROGRAM}</answer>",
        f"<answer>{FENCED}</answer>\nUsage:\n```python\nprint(f(3))\n```",
        f"[BEGIN]\n{PROGRAM}[DONE]",
        f"[PYTHON]\n{PROGRAM}[/PYTHON]",
        f"<pre><code>{PROGRAM}</code></pre>",
        f"{PROGRAM}<|endoftext|>",
        f"Here it is:\n\n{PROGRAM}\nIt doubles n. Don't call it with text.\n\nDone.",
        f"```python\n{indented(PROGRAM, '    ')}\n```",
        f"```\npython\n{PROGRAM}```",
        "\ufeff" + FENCED,
        f"```python\n\ufeff{PROGRAM}```",
        FENCED.replace("    ", "\u00a0\u00a0\u00a0 "),
        f"Here it is: {FENCED}\nDone.",
        f"```python  \n{PROGRAM}`````   \n",
        f"<think>```python\nprint(0)\n```</think>{FENCED}",
        f"[THINK]```python\nprint(0)\n```[/THINK]{FENCED}",
        f"<think>{FENCED}</think>{FENCED}\n<think>Done?</think>{FENCED}",
        f"```python\nprint(0)\n```\n</think>\n\n{PROGRAM}",
        PROGRAM,
    ],
)
def test_the_program_is_extracted_whatever_is_around_it(text: str) -> None:
    assert extract_program(text).strip() == PROGRAM.strip()


@pytest.mark.parametrize("indent", ["    ", "  ", ""])
@pytest.mark.parametrize("info", ["", "python"])
def test_a_fence_inside_a_docstring_does_not_end_the_program(indent: str, info: str) -> None:
    quoted = f'"""Double.\n\n```{info}\nf(2)\n```\n"""\n'
    program = f"def f(n):\n{indented(quoted, indent)}\n{indent}return 2 * n\n" if indent else quoted + PROGRAM
    for text in (f"```python\n{program}```\nDone.", f"```\n{program}```", program, f"````python\n{program}````"):
        assert extract_program(text).strip() == program.strip()


@pytest.mark.parametrize(
    "text", ["```python print(6)```", "The program is ```print(6)```.", "Run `print(6)`.", "```py\n  print(6)\n```"]
)
def test_a_program_may_be_one_line_anywhere(text: str) -> None:
    assert extract_program(text).strip() == "print(6)"


def test_an_answer_that_is_no_program_does_not_replace_one() -> None:
    for answer in ("5", "f(2)", "It doubles n.", "x = f(2)"):
        assert extract_program(f"{FENCED}\n<answer>{answer}</answer>", ["f"]) == PROGRAM
    program = f'PROMPT = """\n<answer>\nx = f(2)\n</answer>"""\n{PROGRAM}'
    assert extract_program(program) == program


def test_the_program_that_defines_the_tested_function_comes_before_its_usage() -> None:
    text = f"{FENCED}\nUsage:\n```python\nprint(f(2))\n```"
    assert extract_program(text, ["f"]) == PROGRAM
    assert extract_program(text) == "print(f(2))\n"
    assert extract_program(text, ["g"]) == "print(f(2))\n"


@pytest.mark.parametrize(
    "text", [f"<think>{FENCED}</think> Nothing.", f"<think>\n{FENCED}", "```cpp\nint main() {}\n```", "```\n", ""]
)
def test_there_may_be_no_program(text: str) -> None:
    assert extract_program(text).strip() in ("", "Nothing.")


def test_a_program_may_contain_the_end_of_thoughts() -> None:
    program = 'print("</think>")\n'
    assert extract_program(f"<think>a</think>```python\n{program}```") == program
    assert extract_program(f"```python\n{program}```") == program


@pytest.mark.parametrize(
    "text",
    [
        "```python\n'''\n" + "```\n" * 20_000,
        "```python\nx y\n```\n" * 5_000,
        "a ```\n" * 20_000,
        "> " * 50_000 + "```",
        "`" * 100_000,
        "```python\n" + "-" * 100_000 + "1\n```",
        "```python\n" + "1+" * 100_000 + "1\n```",
        "</think>" * 20_000 + "```",
        "def f(n):\n" + "'\n" * 50_000,
        "<answer>x = 1\n" * 10_000,
    ],
    ids=["ends", "blocks", "inline", "quotations", "ticks", "unary", "sum", "thoughts", "errors", "answers"],
)  # fmt: skip
def test_a_hostile_text_is_read_at_once(text: str) -> None:
    started = time.monotonic()
    extract_program(text, ["f"])
    assert time.monotonic() - started < 3


def test_blocks_of_other_languages_are_no_python_blocks() -> None:
    text = f"```text\na\n```\n```python\nx = 1\n```\n```python3\n{PROGRAM}```\n```python\ny = 2"
    assert python_blocks(text) == ["x = 1\n", PROGRAM]
    assert python_blocks("```\nf()\n```\n```\n5\n```") == ["f()\n"]
