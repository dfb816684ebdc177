"""Keys by which ROLL's files say how replies are drawn, in training and in validation, and how far generation may run
ahead of learning: its reference leaves them out."""

from __future__ import annotations

from typing import Any

from quintet.config.dialects.ledger import Row, row
from quintet.config.dialects.takes import (
    BOOLEAN,
    POSITIVE,
    POSITIVE_NUMBER,
    TEXTS,
    Takes,
    choice,
    integer,
    number,
    optional,
)

__all__ = ["DRAWN", "ROLL_SAMPLING_KEYS", "VALIDATION"]

PROOF = "tests/unit/config/dialects/test_roll_sampling.py::test_a_key_reaches_the_run"
VALIDATION = "validation.generating_args."
DRAWN = ("temperature", "top_p", "top_k")
"""Keys of that section that say how replies are drawn."""
_OF_VALIDATION = "A file without a `validation` section takes the likeliest token each time."


def _key(key: str, takes: Takes, default: Any, effect: str, native: str | tuple[str, ...], **options: Any) -> Row:
    return row(key, takes, default, effect, native=native, proof=PROOF, **{"computed": True, **options})


_TRAINING: tuple[Row, ...] = (
    _key(
        "actor_infer.generating_args.do_sample",
        BOOLEAN,
        True,
        "Tokens are sampled; false takes the likeliest one each time.",
        "rollout.do_sample",
        computed=False,
    ),
    _key(
        "actor_infer.generating_args.repetition_penalty",
        POSITIVE_NUMBER,
        1.0,
        "Above 1, tokens that occurred before become less likely.",
        "rollout.repetition_penalty",
        computed=False,
    ),
    _key(
        "actor_infer.generating_args.stop_strings",
        TEXTS,
        [],
        "Texts that end a reply, as its last words.",
        "rollout.stop",
        computed=False,
    ),
    _key(
        "actor_infer.generating_args.num_beams",
        choice(1),
        1,
        "Replies are drawn token by token; searching with several beams isn't there.",
        (),
    ),
    _key(
        "async_generation_ratio",
        number(least=0),
        0,
        "Replies or games in the making beyond a step's own, in shares of a step's, while the policy learns; none is "
        "learnt from that is more updates old. 0 waits for each other. Here on the same devices.",
        ("rollout.async_ratio", "rollout.max_staleness", "rollout.partial"),
    ),
)

_VALIDATION: tuple[Row, ...] = (
    _key(
        "validation.generating_args.temperature",
        number(least=0),
        0.95,
        f"Divides the logits in validation. {_OF_VALIDATION}",
        "validation.sampling.temperature",
    ),
    _key(
        "validation.generating_args.top_p",
        number(above=0, most=1),
        0.7,
        f"Probability that the likeliest tokens, from which validation draws, reach together. {_OF_VALIDATION}",
        "validation.sampling.top_p",
    ),
    _key(
        "validation.generating_args.top_k",
        integer(least=-1),
        50,
        f"Likeliest tokens from which validation draws; -1 and 0 keep all. {_OF_VALIDATION}",
        "validation.sampling.top_k",
        unit="tokens",
    ),
    _key(
        "validation.generating_args.do_sample",
        BOOLEAN,
        True,
        "Validation draws; false takes the likeliest token each time, as does a file without a `validation` section.",
        "validation.sampling.do_sample",
    ),
    _key(
        "validation.generating_args.num_return_sequences",
        POSITIVE,
        1,
        "Replies to each prompt of the validation.",
        "validation.sampling.samples",
        computed=False,
        unit="replies",
    ),
    _key(
        "validation.generating_args.num_beams",
        choice(1),
        1,
        "Replies are drawn token by token; searching with several beams isn't there.",
        (),
    ),
    _key(
        "validation.generating_args.max_new_tokens",
        POSITIVE,
        "${actor_infer.generating_args.max_new_tokens}",
        "Tokens of one reply of the validation at most; must be those of training.",
        "rollout.max_response_tokens",
        unit="tokens",
    ),
    _key(
        "validation.data_args.file_name",
        optional(TEXTS),
        None,
        "File or files of the prompts of validation, as JSON, JSONL or CSV.",
        "data.validation_files",
    ),
)

ROLL_SAMPLING_KEYS: tuple[Row, ...] = (*_TRAINING, *_VALIDATION)
