"""Measure how many slips in keys are traced to the key that was meant.

    python benchmarks/typos.py [--seed 0] [--only NAME] [--out FILE]

For every documented key of every kind of file: one deletion, insertion, substitution and transposition of letters, a
missing and a doubled section, hyphens for underscores, and another case. A slip counts as right if the file is refused
and the key that was meant is suggested first. Left out are slips that give another valid key, and missing sections that
several keys have in common. Writes one JSON file: the numbers of keys and slips, and the share that is right, by kind
of file; with `--only`, the other kinds keep their numbers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from key_slips import FILES, NATIVE, file_keys, make_slips, native_suggestions, suggested_keys


def measure(name: str, seed: int) -> dict[str, Any]:
    """Return the counts of one kind of file."""
    rng = random.Random(f"{name}{seed}")
    if name == NATIVE:
        results = [*native_suggestions(rng)]
    else:
        results = [*suggested_keys(name, make_slips(name, file_keys(name), rng))]
    keys = {slip.key for slip, _, _ in results}
    accepted = sum(not is_refused for _, _, is_refused in results)
    right = sum(suggestion == slip.key for slip, suggestion, _ in results)
    return {"keys": len(keys), "slips": len(results), "accepted": accepted, "right": round(right / len(results), 4)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[NATIVE, *FILES], nargs="*", default=[NATIVE, *FILES], metavar="NAME")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    former = arguments.out is not None and arguments.out.exists() and len(arguments.only) <= len(FILES)
    files = json.loads(arguments.out.read_text())["files"] if former else {}
    for name in arguments.only:
        files[name] = measure(name, arguments.seed)
        print(name, files[name], file=sys.stderr, flush=True)
    result = {"seed": arguments.seed, "lowest_right": min(file["right"] for file in files.values()), "files": files}
    text = json.dumps(result, indent=1) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
