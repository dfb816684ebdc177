"""Keys of `actor_rollout_ref.rollout` and of asynchronous runs in verl's newer releases: the reference leaves them out.
verl hands every name of vLLM's sampling parameters on that stands there."""

from __future__ import annotations

from quintet.config.dialects.ledger import Row, row
from quintet.config.dialects.takes import (
    BOOLEAN,
    COUNT,
    POSITIVE,
    POSITIVE_NUMBER,
    SHARE,
    TEXTS,
    number,
    optional,
)
from quintet.config.dialects.verl.batches import ROLLOUT
from quintet.config.dialects.verl.rollout_keys import SERVED

__all__ = ["VERL_NEWER_ROLLOUT_KEYS"]

PROOF = "tests/unit/config/dialects/test_verl_newer_keys.py::test_a_newer_key_reaches_the_run"

VERL_NEWER_ROLLOUT_KEYS: tuple[Row, ...] = (
    row(
        f"{ROLLOUT}.min_p",
        SHARE,
        0.0,
        "Tokens less likely than this share of the likeliest one's probability aren't drawn; verl hands it on to vLLM.",
        native="rollout.min_p",
        proof=PROOF,
    ),
    row(
        f"{ROLLOUT}.repetition_penalty",
        POSITIVE_NUMBER,
        1.0,
        "Above 1, tokens that occurred before become less likely, in validation too; verl hands it on to vLLM.",
        native="rollout.repetition_penalty",
        proof=PROOF,
    ),
    row(
        f"{ROLLOUT}.min_tokens",
        COUNT,
        0,
        "Tokens before which a reply can't end; verl hands it on to vLLM.",
        native="rollout.min_response_tokens",
        proof=PROOF,
        unit="tokens",
    ),
    row(
        f"{ROLLOUT}.stop",
        TEXTS,
        [],
        "Texts that end a reply, as its last words; verl hands them on to vLLM, which cuts them off.",
        native="rollout.stop",
        proof=PROOF,
    ),
    row(
        f"{ROLLOUT}.enable_chunked_prefill",
        optional(BOOLEAN),
        None,
        "Long prompts are read in pieces, in between the decoding of others; null leaves it to the engine.",
        native="rollout.engine_options.chunked_prefill",
        proof=PROOF,
        only_if=SERVED,
    ),
    row(
        f"{ROLLOUT}.max_model_len",
        optional(POSITIVE),
        None,
        "Tokens of prompt and reply together, at most; null takes both lengths.",
        native="rollout.engine_options.max_model_tokens",
        proof=PROOF,
        unit="tokens",
        only_if=SERVED,
    ),
    row(
        "async_training.staleness_threshold",
        number(least=0),
        0.0,
        "Replies in the making beyond a step's own, in shares of a step's, while the policy learns; 0 waits for each "
        "other. Here on the same devices.",
        native="rollout.async_ratio",
        proof=PROOF,
        computed=True,
    ),
    row(
        "async_training.partial_rollout",
        BOOLEAN,
        True,
        "Replies in the middle go on under new weights; without it they are written anew. Only with "
        "`async_training.staleness_threshold` above 0.",
        native="rollout.partial",
        proof=PROOF,
        computed=True,
    ),
)
