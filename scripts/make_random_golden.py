"""Make tests/parity/golden/verl_random.npz: what verl's advantage estimators return for random rows.

    peer/bin/python scripts/make_random_golden.py

The environment is that of `scripts/make_golden.py`, whose estimators and options these are. The rows are drawn by
`tests/support/random_rows.py`, and only one number per batch and result is stored: `NAME|VARIANT` is float64
[batches, 2], of advantages and returns, NaN where verl raises or returns NaN; `rewards` [batches] are of the inputs.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from make_golden import ADVANTAGES, advantage_options  # noqa: E402
from support.random_rows import NUM_BATCHES, projected, random_rows  # noqa: E402

TARGET = ROOT / "tests/parity/golden/verl_random.npz"


def main() -> None:
    core: Any = importlib.import_module("verl.trainer.ppo.core_algos")
    results: dict[str, list[tuple[float, ...]]] = {}
    batches = [random_rows(seed) for seed in range(NUM_BATCHES)]
    for rows in batches:
        for name, variants in ADVANTAGES.items():
            for variant, given in variants.items():
                options = advantage_options(name, given, rows)
                try:
                    pair = core.get_adv_estimator_fn(name)(
                        token_level_rewards=rows["rewards"].clone(), response_mask=rows["mask"], **options
                    )
                    numbers = tuple(projected(values, rows["mask"]) for values in pair)
                except ValueError as error:
                    print(name, error)
                    numbers = (np.nan, np.nan)
                results.setdefault(f"{name}|{variant}", []).append(numbers)
    arrays = {name: np.array(values) for name, values in results.items()}
    checks = np.array([projected(rows["rewards"], rows["responses"]) for rows in batches])
    np.savez_compressed(TARGET, rewards=checks, **arrays)


main()
