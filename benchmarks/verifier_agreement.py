"""Measure how often verifiers of mathematics are wrong, on pairs of answers with known truth.

    python benchmarks/verifier_agreement.py [--pairs 20280] [--seed 0] [--processes 1]
        [--verl CHECKOUT] [--out FILE] [--show]

Each pair is an answer in a box and a ground truth (`benchmarks/answer_pairs.py`). False positives are different answers
that are accepted, false negatives equal ones that are refused. Compared are Quintet's `math`, math-verify's `parse` and
`verify` with their defaults and, given a checkout of verl, its `math_reward`, `math_dapo` and `prime_math`, which needs
the package pylatexenc, and antlr4 4.11 for its LaTeX parser. The scoring functions of the checkout are executed.
verl's `math_dapo` gets `Answer: …` instead of a box.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

from answer_pairs import CATEGORIES, Pair, pairs
from machine import machine
from quintet.rewards.verifiers import math

Verifier = Callable[[str, str], bool]
SCORED_AT_ONCE = 500
"""Pairs of which each time is one measurement; the median of their rates is reported."""
_verify: Verifier
"""What the processes score with."""


def quintet_math(answer: str, truth: str) -> bool:
    """Score with `math`."""
    return math.verify_anywhere(f"So it is $\\boxed{{{answer}}}$.", truth, {}).score == 1.0


def math_verify(answer: str, truth: str) -> bool:
    """Score with the defaults of math-verify, which reads a bare answer only between dollar signs or in a box."""
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{truth}}}"), parse(f"So it is $\\boxed{{{answer}}}$.")))


def verl_verifiers(checkout: Path) -> Iterator[tuple[str, Verifier]]:
    """Yield verl's scoring functions, without importing the whole package, which needs all of its requirements."""
    for name in ("verl", "verl.utils", "verl.utils.reward_score"):
        module = types.ModuleType(name)
        module.__path__ = [str(checkout.joinpath(*name.split(".")))]
        sys.modules[name] = module
    functional = types.ModuleType("verl.utils.py_functional")
    functional.timeout_limit = lambda seconds: lambda function: function
    sys.modules["verl.utils.py_functional"] = functional
    reward = importlib.import_module("verl.utils.reward_score.math_reward")
    yield "verl math_reward", lambda answer, truth: reward.compute_score(boxed(answer), truth) == 1.0
    dapo = importlib.import_module("verl.utils.reward_score.math_dapo")
    yield "verl math_dapo", lambda answer, truth: bool(dapo.compute_score(f"Answer: {answer}", truth)["acc"])
    with contextlib.suppress(ImportError):
        prime = importlib.import_module("verl.utils.reward_score.prime_math")
        yield "verl prime_math", lambda answer, truth: bool(prime.compute_score(boxed(answer), truth)[0])


def boxed(answer: str) -> str:
    return f"So it is $\\boxed{{{answer}}}$."


def measured(verify: Verifier, drawn: list[Pair], show: str | None, processes: int = 1) -> dict[str, object]:
    """Return the errors of a verifier, and answers per second of one process."""
    chunks = [drawn[start : start + SCORED_AT_ONCE] for start in range(0, len(drawn), SCORED_AT_ONCE)]
    global _verify
    _verify = verify
    if processes == 1:
        scored = [scored_chunk(chunk) for chunk in chunks]
    else:
        with get_context("fork").Pool(processes) as pool:
            scored = pool.map(scored_chunk, chunks, chunksize=1)
    verdicts = [verdict for chunk, _ in scored for verdict in chunk]
    errors = {name: {"pairs": 0, "false_positives": 0, "false_negatives": 0} for name in CATEGORIES}
    for pair, verdict in zip(drawn, verdicts, strict=True):
        counts = errors[pair.category]
        counts["pairs"] += 1
        counts["false_positives"] += verdict is True and not pair.equal
        counts["false_negatives"] += pair.equal and verdict is not True
        if show and (verdict is True) != pair.equal:
            print(f"{show}: {'refused' if pair.equal else 'accepted'} {pair}", file=sys.stderr)
    equal = sum(pair.equal for pair in drawn)
    positives, negatives = (
        sum(counts[f"false_{kind}"] for counts in errors.values()) for kind in ("positives", "negatives")
    )
    return {
        "false_positives": positives,
        "false_negatives": negatives,
        "false_positive_rate": round(positives / (len(drawn) - equal), 5),
        "false_negative_rate": round(negatives / equal, 5),
        "exceptions": verdicts.count(None),
        "median_answers_per_second": round(statistics.median(rate for _, rate in scored)),
        "categories": errors,
    }


def scored_chunk(chunk: list[Pair]) -> tuple[list[bool | None], float]:
    """Return the verdicts, None where the verifier raises, and answers per second of processor time."""
    started, verdicts = time.process_time(), []
    for pair in chunk:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                verdicts.append(bool(_verify(pair.answer, pair.truth)))
        except Exception:  # noqa: BLE001 - an answer on which a verifier fails counts as refused
            verdicts.append(None)
    return verdicts, len(chunk) / (time.process_time() - started)


def release(checkout: Path) -> str:
    """Return the version of a checkout of verl and its commit, if it is a repository."""
    commit = subprocess.run(
        ["git", "-C", str(checkout), "log", "-1", "--format=%h %cs"], capture_output=True, text=True
    )
    return f"{(checkout / 'verl/version/version').read_text().strip()} {commit.stdout.strip()}".strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=520 * len(CATEGORIES))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verl", type=Path, help="checkout of verl")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", action="store_true", help="print each error")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    math.preload()
    drawn = list(pairs(arguments.pairs, arguments.seed))
    verifiers: dict[str, Verifier] = {"quintet math": quintet_math, "math-verify": math_verify}
    if arguments.verl:
        verifiers |= dict(verl_verifiers(arguments.verl))
    result = {
        "machine": machine(),
        "versions": {"math-verify": version("math-verify"), "sympy": version("sympy")}
        | ({"verl": release(arguments.verl)} if arguments.verl else {}),
        "pairs": len(drawn),
        "equal": sum(pair.equal for pair in drawn),
        "seed": arguments.seed,
        "processes": arguments.processes,
        "verifiers": {
            name: measured(verify, drawn, name if arguments.show else None, arguments.processes)
            for name, verify in verifiers.items()
        },
    }
    for name, verdict in result["verifiers"].items():
        print(name, {key: value for key, value in verdict.items() if key != "categories"})
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
