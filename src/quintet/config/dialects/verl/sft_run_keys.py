"""Keys of data and trainer in verl's `sft_trainer.yaml`: its reference leaves them out, and no file is without them."""

from __future__ import annotations

from dataclasses import replace

from quintet.config.dialects.ledger import Row, row
from quintet.config.dialects.takes import BOOLEAN, COUNT, POSITIVE, TEXT, choice, list_of, number, optional
from quintet.config.dialects.verl.keys import VERL_TRAINER_KEYS

__all__ = ["VERL_SFT_RUN_KEYS"]

PROOF = "tests/unit/config/dialects/test_verl.py::test_a_key_of_an_sft_run_reaches_it"

_OF_TRAINER = {
    **{f"data.{key}": None for key in ("train_files", "val_files", "prompt_key", "truncation")},
    **{f"data.custom_cls.{key}": None for key in ("path", "name")},
    "data.train_batch_size": "sft.batch",
    "trainer.total_epochs": "sft.epochs",
    **{f"trainer.{key}": None for key in ("project_name", "experiment_name", "logger", "nnodes", "n_gpus_per_node")},
    **{f"trainer.{key}": None for key in ("save_freq", "test_freq", "default_hdfs_dir", "default_local_dir")},
    **{f"trainer.{key}": None for key in ("resume_mode", "resume_from_path")},
}
"""Keys that `ppo_trainer.yaml` documents, and what they feed here where it is something else."""


def _of_sft(row: Row) -> Row:
    """A key of `ppo_trainer.yaml` in `sft_trainer.yaml`."""
    native = _OF_TRAINER[row.key]
    computed = row.computed or row.key == "data.prompt_key"
    return replace(row, computed=computed) if native is None else replace(row, native=(native,), computed=False)


_OWN: tuple[Row, ...] = (
    row(
        "data.prompt_dict_keys",
        optional(list_of(TEXT)),
        None,
        "Names that lead from the prompt's column into mappings, one after the other; null stays at the column.",
        native="data.prompt_key",
        computed=True,
        proof=PROOF,
    ),
    row(
        "data.response_key",
        optional(TEXT),
        None,
        "Column of the answer that is imitated; null looks for `response`, `answer` and `solution`.",
        native="data.response_key",
        computed=True,
        proof=PROOF,
    ),
    row(
        "data.response_dict_keys",
        optional(list_of(TEXT)),
        None,
        "Names that lead from the answer's column into mappings, one after the other; null stays at the column.",
        native="data.response_key",
        computed=True,
        proof=PROOF,
    ),
    row(
        "data.multiturn.enable",
        BOOLEAN,
        False,
        "Rows are whole conversations, of which what the assistant says is learnt.",
        native="data.messages_key",
        computed=True,
        proof=PROOF,
    ),
    row(
        "data.multiturn.messages_key",
        TEXT,
        "messages",
        "Column of those conversations.",
        native="data.messages_key",
        computed=True,
        only_if=("data.multiturn.enable", True),
        proof=PROOF,
    ),
    row(
        "data.max_length",
        POSITIVE,
        1024,
        "Tokens of one example, prompt and answer together; `truncation` rules on longer ones.",
        native="sft.max_tokens",
        proof=PROOF,
        unit="tokens",
    ),
    row(
        "data.micro_batch_size_per_gpu",
        POSITIVE,
        4,
        "Examples of one forward and backward pass on one GPU. Changes memory, not the result.",
        native="sft.sequences_per_pass",
        aliases=("data.micro_batch_size",),
        proof=PROOF,
        unit="sequences",
    ),
    row(
        "optim.betas",
        list_of(number(least=0, below=1)),
        [0.9, 0.95],
        "AdamW's decay rates of the two moments.",
        native="sft.optimizer.betas",
        proof=PROOF,
    ),
    row(
        "model.strategy",
        choice("fsdp", "fsdp2"),
        "fsdp2",
        "What shards the learner over GPUs.",
        native="actor.backend",
        proof=PROOF,
    ),
    row(
        "trainer.total_training_steps",
        optional(POSITIVE),
        None,
        "Optimizer steps at most; null makes as many as `trainer.total_epochs` does.",
        native="data.max_steps",
        proof=PROOF,
        unit="steps",
    ),
    row("trainer.seed", COUNT, 1, "Every random draw follows from it.", native="seed", proof=PROOF),
)

VERL_SFT_RUN_KEYS: tuple[Row, ...] = (
    *(_of_sft(row) for row in VERL_TRAINER_KEYS if row.key in _OF_TRAINER),
    *_OWN,
)
