"""Keys that name a ROLL run and its model, and those of its algorithms: its reference leaves them out, and no file of
ROLL's is without them."""

from __future__ import annotations

from quintet.config.dialects.ledger import Row, row
from quintet.config.dialects.roll.algorithm_keys import ROLL_ALGORITHM_KEYS
from quintet.config.dialects.roll.sampling_keys import ROLL_SAMPLING_KEYS
from quintet.config.dialects.takes import COUNT, POSITIVE, TEXT, integer, optional

__all__ = ["ROLL_RUN_KEYS"]

PROOF = "tests/unit/config/dialects/test_roll.py::test_the_run_and_its_model_can_be_named"

_NAMES: tuple[Row, ...] = (
    row(
        "pretrain",
        optional(TEXT),
        None,
        "Model directory or hub name from which every worker starts; null takes the small model made on the spot.",
        native="policy.path",
        computed=True,
        proof=PROOF,
    ),
    row("exp_name", TEXT, "roll", "Name of the run.", native="name", proof=PROOF),
    row("seed", integer(least=0, most=2**32 - 1), 42, "Every random draw follows from it.", native="seed", proof=PROOF),
    row(
        "max_steps",
        COUNT,
        500,
        "Rounds of generating and learning.",
        native="training.steps",
        proof=PROOF,
        unit="steps",
    ),
    row(
        "save_steps",
        POSITIVE,
        50,
        "Steps between two checkpoints.",
        native="checkpoint.every_steps",
        proof=PROOF,
        unit="steps",
    ),
    row(
        "eval_steps",
        COUNT,
        10,
        "Steps between two validations.",
        native="validation.every_steps",
        proof=PROOF,
        unit="steps",
    ),
)

ROLL_RUN_KEYS: tuple[Row, ...] = (*_NAMES, *ROLL_ALGORITHM_KEYS, *ROLL_SAMPLING_KEYS)
