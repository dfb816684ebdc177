"""Measure how many slips in keys are traced to the key that was meant.

    python benchmarks/typos.py [--seed 0] [--out FILE]

For every documented key of every kind of file: one deletion, insertion, substitution and transposition of letters, a
missing and a doubled section, hyphens for underscores, and another case. A slip counts as right if the file is refused
and the key that was meant is suggested first. Left out are slips that give another valid key, and missing sections that
several keys have in common. Writes one JSON file: slips and right suggestions by kind of file and by kind of slip.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from key_slips import FILES, file_keys, make_slips, suggested_keys


def measure(name: str, seed: int) -> dict[str, Any]:
    """Return the counts of one kind of file."""
    keys, rng = file_keys(name), random.Random(f"{name}{seed}")
    slips, right, accepted = Counter[str](), Counter[str](), 0
    for slip, suggestion, is_refused in suggested_keys(name, make_slips(name, keys, rng)):
        slips[slip.kind] += 1
        right[slip.kind] += is_refused and suggestion == slip.key
        accepted += not is_refused
    share = round(right.total() / slips.total(), 4)
    by_kind = {kind: [right[kind], count] for kind, count in slips.items()}
    return {"keys": len(keys), "slips": slips.total(), "accepted": accepted, "right": share, "by_slip": by_kind}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    files = {}
    for name in FILES:
        files[name] = measure(name, arguments.seed)
        print(name, {key: value for key, value in files[name].items() if key != "by_slip"}, file=sys.stderr, flush=True)
    result = {"seed": arguments.seed, "lowest_right": min(file["right"] for file in files.values()), "files": files}
    text = json.dumps(result, indent=1) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
