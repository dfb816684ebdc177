"""Compute the rewards in tests/parity/golden/roll_rules.json with ROLL's own functions, from a checkout:

    git clone https://github.com/alibaba/ROLL
    python scripts/make_roll_golden.py ROLL

The inputs are those of the file, so that a case is added by writing its input there. Programs run as ROLL runs them:
without confinement. `math-verify` must be installed.

- `choice`: `crossthinkqa`, by `reward_type`, and `multiple_choice_boxed`, the accuracy of that class.
- `ifeval`: first the texts, then for each ground truth the rewards of all texts.
- `code`: the score with `use_local`.
- `math`: the score after a prompt.
"""

from __future__ import annotations

import ast
import asyncio
import copy
import inspect
import json
import re
import sys
import time
import traceback
import typing
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

TARGET = Path(__file__).parent.parent / "tests/parity/golden/roll_rules.json"
MODULES = {"re": re, "json": json, "inspect": inspect, "asyncio": asyncio, "time": time, "uuid": uuid}


class RuntimeModule:
    """Stands for the class of the package pyext, which does not install on current Pythons."""

    @staticmethod
    def from_string(name: str, doc: str, source: str) -> ModuleType:
        module = ModuleType(name, doc)
        exec(source, module.__dict__)
        return module


def load_functions(path: Path, **names: Any) -> SimpleNamespace:
    """Return the functions and constants of a file without its imports, which need Ray."""
    kept = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict | ast.Constant))
    ]
    space = {**vars(typing), **MODULES, "traceback": traceback, **names}
    exec(compile(ast.Module(kept, []), str(path), "exec"), space)
    return SimpleNamespace(**space)


def _clean(text: str) -> str:
    return text.replace("<|endoftext|>", "").replace("<pad>", "").replace("<|im_end|>", "")


def compute_choice(rewards: Path, cases: list[Any]) -> None:
    """Compute the rewards of multiple choice."""
    cross = load_functions(rewards / "crossthinkqa_rule_reward_worker.py")
    boxed = load_functions(rewards / "multiple_choice_boxed_rule_reward_worker.py")
    penalty = cross.get_repetition_penalty_reward(3, -0.5)
    for case in cases:
        text, truth = _clean(case["text"]), case["truth"]
        answer = cross.extract_after_last_think(text)
        case["crossthinkqa"] = {
            kind: cross.crossthinkqa_reward_fn(answer, truth, kind)[1] + penalty(text)
            for kind in ("loose", "soft", "strict")
        }
        case["multiple_choice_boxed"] = float(boxed.multiple_choice_boxed_reward_fn(answer, truth)[1])


def compute_ifeval(rewards: Path, cases: list[Any]) -> None:
    """Compute the rewards of constraints."""
    rules = load_functions(rewards / "ifeval_rule_reward_worker.py")
    penalty = rules.get_repetition_penalty_reward(3, -0.5)
    texts = [_clean(text) for text in cases[0]["texts"]]
    for case in cases[1:]:
        case["rewards"] = [_meets(rules, text, dict(case["truth"])) + penalty(text) for text in texts]


def _meets(rules: SimpleNamespace, text: str, arguments: dict[str, Any]) -> float:
    function = rules.IF_FUNCTIONS_MAP[arguments.pop("func_name")]
    try:
        return float(rules.call_ifeval_function(function, rules.extract_after_last_think(text), arguments))
    except Exception:  # noqa: BLE001 - ROLL catches all, too
        return 0.0


def compute_code(rewards: Path, cases: list[Any]) -> None:
    """Compute the scores of programs."""
    roll = rewards.parent.parent.parent
    pyext = ModuleType("pyext")
    pyext.RuntimeModule = RuntimeModule  # type: ignore[attr-defined]
    sys.modules["pyext"] = pyext
    for name in ("roll", "roll.utils", "roll.utils.local_code"):
        package = ModuleType(name)
        package.__path__ = [str(roll.parent / name.replace(".", "/"))]
        sys.modules[name] = package
    from roll.utils.local_code.extract_utils import extract_code_generation

    worker = rewards / "code_sandbox_reward_worker.py"
    functions = load_functions(worker, extract_code_generation=extract_code_generation)
    for case in cases:
        tests = copy.deepcopy(case["test_cases"])
        row = (0, "", "", case["text"], case["case_type"], tests, case["test_case_function"])
        with _kept_output():
            case["score"] = float(functions.cal_local_test(*row, timeout=5)[0])


@contextmanager
def _kept_output() -> Iterator[None]:
    streams = sys.stdout, sys.stderr
    yield
    sys.stdout, sys.stderr = streams


def compute_math(rewards: Path, cases: list[Any]) -> None:
    """Compute the scores of math answers."""
    import math_verify

    functions = load_functions(
        rewards / "math_rule_reward_worker.py", parse=math_verify.parse, verify=math_verify.verify
    )
    for case in cases:
        text = case["text"].replace("<|endoftext|>", "").replace("<pad>", "")
        result: list[Any] = []
        functions._hf_verify_math_sample(text, f"${case['truth']}$", result, case["prompt"])
        case["score"] = float(bool(result[0][0]))


def write(golden: dict[str, list[Any]]) -> None:
    """Write a line per case."""
    parts = [
        f"{json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(case)}" for case in cases) + "\n]"
        for name, cases in golden.items()
    ]
    TARGET.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main() -> None:
    """Compute all rewards again."""
    rewards = Path(sys.argv[1]).resolve() / "roll/pipeline/rlvr/rewards"
    golden = json.loads(TARGET.read_text())
    compute_choice(rewards, golden["choice"])
    compute_ifeval(rewards, golden["ifeval"])
    compute_code(rewards, golden["code"])
    compute_math(rewards, golden["math"])
    write(golden)


if __name__ == "__main__":
    main()
