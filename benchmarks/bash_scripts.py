"""Compare the reader of run scripts with bash on generated scripts.

    python benchmarks/bash_scripts.py [--count 5000] [--seed 0] [--show] [--out FILE]

Each script is run by bash with an empty environment, in a directory of its own, with a `python3` that only notes its
arguments; and it is read. Classes:

- `equal`: the reader gives the arguments that bash gives, or says that bash never trains.
- `unknown`: the reader names a line, and why a value or the script is not known.
- `different`: the reader gives other arguments. `--show` prints these scripts.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from bash_script_generator import ScriptGenerator

from bash_scripts import ScriptComparison
from machine import machine

PLACE = re.compile(r"\S*run\.sh:\d+:? ?|\(?line \d+\)?|data\.\w+ ")


def bash_version() -> str:
    """Return the version of bash."""
    return subprocess.run(["bash", "-c", "echo $BASH_VERSION"], capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print the scripts that differ")
    parser.add_argument("--out", type=Path, help="add the result to this file")
    arguments = parser.parse_args()
    generator = ScriptGenerator(arguments.seed)
    counts: Counter[str] = Counter({"equal": 0, "unknown": 0, "different": 0})
    reasons: Counter[str] = Counter()
    trained = 0
    started = time.perf_counter()
    with TemporaryDirectory() as directory:
        comparison = ScriptComparison(Path(directory))
        for _ in range(arguments.count):
            script, words = generator.script()
            result = comparison.compare(script, words)
            counts[result.result] += 1
            trained += bool(result.bash)
            if result.result == "unknown":
                reasons[PLACE.sub("", result.reason)[:60]] += 1
            elif result.result == "different" and arguments.show:
                print(f"{'=' * 40} {words}\n{script}\nbash: {result.bash}\nreader: {result.reader}")
    table = {
        "machine": machine(),
        "bash": bash_version(),
        "scripts": arguments.count,
        "scripts_in_which_bash_trains": trained,
        "counts": dict(counts),
        "unknown_for": dict(reasons.most_common(20)),
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(table, indent=1))
    if arguments.out:
        known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        arguments.out.write_text(json.dumps(known | {f"seed {arguments.seed}": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
