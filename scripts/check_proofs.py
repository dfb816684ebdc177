"""Check that each native key has an effect which a test shows: with the key forced to its default, the test fails.

python scripts/check_proofs.py check [--share 0.1] [--seed 0]   # the proofs in tests/proofs.yaml, or a random share
python scripts/check_proofs.py search [TEST…]                   # look among tests for proofs that are missing there

A key is named by the class that declares it and its field: actor and critic have the same sections, and several
environments have different keys of the same name. Fields are forced where code reads them that acts on them, not where
messages do, see `tests/support/field_access`. `search` runs a few tests that set a missing field by name; it may be
stopped, and adds at its next start what it has found. `check --results FILE` may be stopped, too: the next call with
the same file checks the proofs that it does not have. `--out` writes the numbers as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel

from quintet.config.native.experiment import Experiment
from quintet.config.schema import REPEATED, sections_of

ROOT = Path(__file__).parents[1]
PROOFS = ROOT / "tests" / "proofs.yaml"
FOUND = ROOT / "build" / "proofs.results"
HOOK = ROOT / "tests" / "support" / "field_access"
sys.path += [str(HOOK), str(ROOT / "benchmarks")]
from field_access import field_name  # noqa: E402

from machine import machine  # noqa: E402

PROVES = "proves"
WITHOUT_EFFECT = tuple(f"tests/unit/{name}/" for name in ("diagnosis", "viewer", "scripts"))
WITHOUT_EFFECT += tuple(f"tests/unit/config/{name}" for name in ("checks", "dialects", "fit", "test_"))
"""Tests of conversions, messages and pages."""
MAX_EXCEPTIONS = 0.03
Results = dict[tuple[str, str], str]
"""Results by test and field, see `forced_fields`."""


def native_fields() -> dict[str, str]:
    """Return the first dotted key of every native field by field, but those of sections, their `name`, and fields that
    can have one value only."""
    return {field: key for key, field in reversed(list(_walk(Experiment, "")))}


def _walk(kind: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in kind.model_fields.items():
        key, annotations = f"{prefix}{name}", (field.annotation, *field.metadata)
        sections = [(section, f"{key}.") for section in sections_of(annotations, of_entries=False)]
        sections += [(section, f"{key}.*.") for section in sections_of(annotations, of_entries=True)]
        is_fixed = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
        if not (sections or is_fixed or (name == "name" and prefix)):
            yield key, field_name(kind, name)
        for section, below in sections if key != REPEATED else ():
            yield from _walk(section, below)


def load() -> dict[str, Any]:
    """Return the file of proofs: `proofs`, tests by field, `exceptions`, reasons by field, and `unproven` fields."""
    content = yaml.safe_load(PROOFS.read_text()) if PROOFS.exists() else {}
    return {"exceptions": {}, "unproven": [], "proofs": {}} | content


def save(proofs: Mapping[str, str]) -> None:
    """Write the proofs of native fields, and list fields that have neither one nor an exception as unproven."""
    content, fields = load(), native_fields()
    exceptions = content["exceptions"]
    proofs = {field: test for field, test in sorted(proofs.items()) if field in fields.keys() - exceptions.keys()}
    content |= {"proofs": proofs, "unproven": sorted(fields.keys() - exceptions.keys() - proofs.keys())}
    PROOFS.write_text(yaml.safe_dump(content, width=200, allow_unicode=True, sort_keys=False))


def search(tests: Sequence[str], seconds: float) -> None:
    """Look for a test that fails for each field that has no proof, and add what an earlier search has found."""
    merge(FOUND)
    fields = native_fields()
    missing = {field: fields[field] for field in load()["unproven"]}
    names = re.compile(rf"\b({'|'.join({field.rpartition('.')[2] for field in missing})})\b")
    paths = [file for test in tests for file in (sorted((ROOT / test).rglob("test_*.py")) or [ROOT / test])]
    files = [str(path.relative_to(ROOT)) for path in dict.fromkeys(paths) if names.search(path.read_text())]
    files = [file for file in files if not (file.startswith(WITHOUT_EFFECT) or file.endswith("_hints.py"))]
    if missing and files:
        FOUND.parent.mkdir(parents=True, exist_ok=True)
        _run(files, {"fields": missing, "seconds": seconds}, FOUND)
        merge(FOUND)
    print(f"{len(load()['unproven'])} fields are unproven", file=sys.stderr)


def merge(results: Path) -> None:
    """Add the proofs in a file of results."""
    proofs = {field: test for (test, field), result in _read(results).items() if result == PROVES}
    save(proofs | load()["proofs"])


def _run(tests: Sequence[str], request: Mapping[str, Any], results: Path) -> None:
    """Run test files with the plugin, which appends to `results`."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "cases.json"
        file.write_text(json.dumps({**request, "results": str(results)}))
        path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "QUINTET_FIELD_ACCESS": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "forced_fields", *tests]
        environment = os.environ | variables | {"QUINTET_FORCED_CASES": str(file)}
        subprocess.run(command, cwd=ROOT, env=environment, check=False, stdout=sys.stderr)


def _read(results: Path) -> Results:
    lines = results.read_text().splitlines() if results.exists() else []
    return {(test, field): result for test, field, result in map(json.loads, lines)}


def check_entries() -> list[str]:
    """Return the fields that have no proof, no exception, and aren't listed as unproven, or more than one of these."""
    content, fields = load(), native_fields()
    entries = [*content["proofs"], *content["exceptions"], *content["unproven"]]
    problems = [f"{field} ({fields[field]}): no test shows an effect" for field in fields if field not in entries]
    problems += [f"{field}: no such field" for field in entries if field not in fields]
    problems += [f"{field}: {entries.count(field)} entries" for field in fields if entries.count(field) > 1]
    if len(content["exceptions"]) > MAX_EXCEPTIONS * len(fields):
        problems.append(f"{len(content['exceptions'])} exceptions are more than {MAX_EXCEPTIONS:.0%} of all fields")
    return problems


def sample_proofs(share: float, seed: int | None) -> dict[str, str]:
    proofs = load()["proofs"]
    return {field: proofs[field] for field in random.Random(seed).sample(sorted(proofs), round(share * len(proofs)))}


def wrong_proofs(proofs: Mapping[str, str], results: Path | None = None) -> dict[str, str]:
    """Return what is wrong by field, if its test does not fail when the field is forced to its default.

    Args:
        results: file of the results, which are appended; proofs that it has are not checked again.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = results or Path(directory) / "results"
        known = _read(file)
        cases: dict[str, list[str]] = defaultdict(list)
        for field, test in proofs.items():
            if (test, field) not in known:
                cases[test].append(field)
        files = sorted({test.partition("::")[0] for test in cases if (ROOT / test.partition("::")[0]).exists()})
        if files:
            _run(files, {"cases": cases, "seconds": 120}, file)
        known = _read(file)
    reasons = {field: known.get((test, field), "does not exist") for field, test in proofs.items()}
    return {field: f"{proofs[field]} {reason}" for field, reason in reasons.items() if reason != PROVES}


def summary(checked: Mapping[str, str], wrong: Mapping[str, str]) -> dict[str, Any]:
    """Return the numbers of a check: native fields, checked proofs, tests that failed as they should, exceptions."""
    content, num_fields = load(), len(native_fields())
    return {
        **machine(),
        "fields": num_fields,
        "proofs": len(content["proofs"]),
        "tests": len({*content["proofs"].values()}),
        "checked": len(checked),
        "failed_when_forced": len(checked) - len(wrong),
        "wrong": dict(wrong),
        "unproven": len(content["unproven"]),
        "exceptions": len(content["exceptions"]),
        "share_of_exceptions": round(len(content["exceptions"]) / num_fields, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="check recorded proofs")
    check.add_argument("--share", type=float, default=1.0, help="share of the proofs to check, at random")
    check.add_argument("--seed", type=int, help="seed of the share")
    check.add_argument("--remove", action="store_true", help="remove wrong proofs from the file")
    check.add_argument("--results", type=Path, help="file of results, to continue a check that was stopped")
    check.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    searching = commands.add_parser("search", help="look for missing proofs")
    searching.add_argument("tests", nargs="*", default=["tests/unit"], help="files or directories")
    searching.add_argument("--seconds", type=float, default=10.0, help="time limit of a test")
    arguments = parser.parse_args()
    if arguments.command == "search":
        search(arguments.tests, arguments.seconds)
        return 0
    proofs = sample_proofs(arguments.share, arguments.seed)
    wrong = wrong_proofs(proofs, arguments.results and arguments.results.absolute())
    if arguments.out:
        arguments.out.write_text(json.dumps(summary(proofs, wrong), indent=1) + "\n")
    problems = check_entries() + [f"{field}: {problem}" for field, problem in wrong.items()]
    print("\n".join(problems))
    if arguments.remove:
        save({field: test for field, test in load()["proofs"].items() if field not in wrong})
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
