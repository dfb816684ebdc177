"""Check that each native key has an effect which a test shows: with the key forced to its default, the test fails.

python scripts/check_proofs.py check [--share 0.1] [--seed 0]   # the tests of tests/proofs.yaml, or a random share
python scripts/check_proofs.py search [--rounds 5]              # tests for keys that have none, written there
python scripts/check_proofs.py candidates [TEST…]               # run tests and record which keys they read

A key is named by the class of its section and its field: actor and critic have the same sections, and several
environments have fields of the same name. Fields are forced where code reads them that acts on them, not where messages
do, see `tests/support/field_access`. `candidates` takes as long as all tests do, and writes `build/proofs/`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from pydantic import BaseModel

from quintet.config.native.experiment import Experiment
from quintet.config.schema import REPEATED, sections_of

ROOT = Path(__file__).parents[1]
PROOFS = ROOT / "tests" / "proofs.yaml"
CANDIDATES = ROOT / "build" / "proofs"
HOOK = ROOT / "tests" / "support" / "field_access"
WITHOUT_EFFECT = ("config", "diagnosis", "viewer", "scripts")
"""Directories of `tests/unit` whose tests show conversions, messages and pages."""
MAX_EXCEPTIONS = 0.03


def native_fields() -> dict[str, str]:
    """Return the first dotted key of every native field that is no section and does not choose one, by class and
    field."""
    return {field: key for key, field in reversed(list(_walk(Experiment, "")))}


def _walk(kind: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in kind.model_fields.items():
        key, annotations = f"{prefix}{name}", (field.annotation, *field.metadata)
        sections = [(section, f"{key}.") for section in sections_of(annotations, of_entries=False)]
        sections += [(section, f"{key}.*.") for section in sections_of(annotations, of_entries=True)]
        if not sections and not (name == "name" and prefix):
            yield key, f"{kind.__name__}.{name}"
        for section, below in sections if key != REPEATED else ():
            yield from _walk(section, below)


def force(cases: Mapping[str, Iterable[str]]) -> dict[tuple[str, str], bool]:
    """Run tests with fields forced to their defaults; return whether a test failed by test and field. Tests that fail
    without force are left out."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "cases.json"
        file.write_text(json.dumps({test: sorted(fields) for test, fields in cases.items()}))
        _pytest({"QUINTET_FORCED_CASES": str(file)}, "-p", "forced_fields", *cases)
        results = Path(f"{file}.results")
        rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return {(test, field): failed for test, field, failed in rows if field}


def _pytest(variables: Mapping[str, str], *arguments: str) -> None:
    path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | variables
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    subprocess.run(command, cwd=ROOT, env=environment, check=False, stdout=sys.stderr)


def record_candidates(tests: Sequence[str]) -> None:
    """Run tests, all by default, and record their durations and the fields that each reads."""
    reads = CANDIDATES / "reads"
    reads.mkdir(parents=True, exist_ok=True)
    durations = CANDIDATES / f"tests-{len(list(CANDIDATES.glob('tests-*.xml')))}.xml"
    ignored = [f"--ignore=tests/unit/{name}" for name in WITHOUT_EFFECT]
    _pytest({"QUINTET_FIELD_READS": str(reads)}, f"--junitxml={durations}", *ignored, *tests)


def load_candidates() -> dict[str, list[str]]:
    """Return the tests that read a field with another value than its default, the shortest first."""
    seconds = {test: time for file in CANDIDATES.glob("tests-*.xml") for test, time in _durations(file)}
    tests: dict[str, set[str]] = defaultdict(set)
    for file in (CANDIDATES / "reads").iterdir():
        for line in file.read_text().splitlines():
            test, field = line.split("\t")
            tests[field].add(test)
    return {field: sorted(tests[field] & seconds.keys(), key=seconds.__getitem__) for field in native_fields()}


def _durations(file: Path) -> Iterator[tuple[str, float]]:
    """Yield the ids of the tests that passed, and their seconds."""
    for case in ElementTree.parse(file).iter("testcase"):
        if all(child.tag.startswith("system-") for child in case):
            yield f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}", float(case.attrib["time"])


def search(rounds: int) -> None:
    """Try the candidates of each key that has no proof, one per round, and write those that fail to `PROOFS`."""
    proofs, candidates = load_proofs(), load_candidates()
    for attempt in range(rounds):
        cases: dict[str, list[str]] = defaultdict(list)
        for field, tests in candidates.items():
            if field not in proofs and len(tests) > attempt:
                cases[tests[attempt]].append(field)
        proofs |= {field: test for (test, field), failed in force(cases).items() if failed}
        save_proofs(proofs)
        print(f"round {attempt + 1}: {len(proofs)} of {len(candidates)} keys have a proof", file=sys.stderr)


def load_proofs() -> dict[str, str]:
    return yaml.safe_load(PROOFS.read_text())["proofs"] if PROOFS.exists() else {}


def save_proofs(proofs: Mapping[str, str]) -> None:
    content = yaml.safe_load(PROOFS.read_text()) if PROOFS.exists() else {"exceptions": {}}
    text = yaml.safe_dump(content | {"proofs": dict(sorted(proofs.items()))}, width=200, allow_unicode=True)
    PROOFS.write_text(text)


def check(share: float, seed: int | None) -> list[str]:
    """Return what is wrong with the recorded proofs of a random share of the keys."""
    proofs, fields = load_proofs(), native_fields()
    exceptions = yaml.safe_load(PROOFS.read_text())["exceptions"]
    missing = [field for field in fields if field not in proofs | exceptions]
    problems = [f"{field} ({fields[field]}): no test shows an effect" for field in missing]
    problems += [f"{field}: no such key" for field in proofs | exceptions if field not in fields]
    if len(exceptions) > MAX_EXCEPTIONS * len(fields):
        problems.append(f"{len(exceptions)} exceptions are more than {MAX_EXCEPTIONS:.0%} of {len(fields)} keys")
    sample = random.Random(seed).sample(sorted(proofs), round(share * len(proofs)))
    cases: dict[str, list[str]] = defaultdict(list)
    for field in sample:
        cases[proofs[field]].append(field)
    results = force(cases)
    for field in sample:
        failed = results.get((proofs[field], field))
        if not failed:
            cause = "does not run or fails by itself" if failed is None else "passes with the key at its default"
            problems.append(f"{field}: {proofs[field]} {cause}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["check", "search", "candidates"])
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or directories to record")
    parser.add_argument("--share", type=float, default=1.0, help="share of the keys to check, at random")
    parser.add_argument("--seed", type=int, help="seed of the share")
    parser.add_argument("--rounds", type=int, default=5, help="tests to try per key")
    arguments = parser.parse_args()
    if arguments.command == "candidates":
        record_candidates(arguments.tests)
    elif arguments.command == "search":
        search(arguments.rounds)
    else:
        problems = check(arguments.share, arguments.seed)
        print("\n".join(problems))
        return bool(problems)
    return 0


if __name__ == "__main__":
    sys.exit(main())
