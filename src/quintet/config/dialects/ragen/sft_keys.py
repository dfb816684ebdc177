"""The keys of the `sft` section of RAGEN's `config/base.yaml`."""

from __future__ import annotations

import yaml

from quintet.config.dialects.ledger import Capability, Row, row
from quintet.config.dialects.takes import (
    BOOLEAN,
    COUNT,
    POSITIVE,
    POSITIVE_NUMBER,
    TEXT,
    TEXTS,
    Takes,
    choice,
    integer,
    number,
    optional,
)

__all__ = ["LOCAL_LOGGERS", "LOGGERS", "PROOF", "RAGEN_SFT_KEYS"]

PROOF = "tests/unit/config/dialects/test_ragen.py::test_a_key_reaches_the_run"
SOKOBAN_PROOF = "tests/unit/config/dialects/test_ragen.py::test_a_key_of_sokoban_reaches_the_run"

_NAMES = ("console", "wandb", "mlflow", "swanlab", "vemlp_wandb", "tensorboard", "clearml")


def _loggers(*names: str) -> Takes:
    """Those loggers, as a list or as the text of one."""

    def accepts(mode: object) -> bool:
        try:
            read = yaml.safe_load(mode) if isinstance(mode, str) else mode
        except yaml.YAMLError:
            return False
        return all(name in names for name in (read if isinstance(read, list) else [read]))

    return Takes(f"a list, or the text of one, of {', '.join(names)}", accepts, names)


LOGGERS = _loggers(*_NAMES)
"""The loggers of its trainer."""
LOCAL_LOGGERS = (_loggers("console", "wandb", "tensorboard"),)
"""Those of them that this version has."""

RAGEN_SFT_KEYS: tuple[Row, ...] = (
    row(
        "sft.env_type",
        choice("sokoban", "frozenlake"),
        "sokoban",
        "World whose solved games are learned from; RAGEN's command line puts the world of the run in its place.",
        native="world.name",
        proof=PROOF,
    ),
    row(
        "sft.output_dir",
        TEXT,
        "models/sft",
        "Directory of the fine-tuned weights, one folder for the adapters and one for the merged model.",
        native="sft.output_dir",
        proof=PROOF,
    ),
    row(
        "sft.data_generation.data_dir",
        TEXT,
        "sft/data",
        "Directory into which solved games are written, in a folder named for the world.",
        proof=PROOF,
        native="sft.games.directory",
    ),
    row(
        "sft.data_generation.algo",
        choice("bfs"),
        "bfs",
        "How games are solved: breadth first, which finds a shortest solution.",
        proof=PROOF,
        native="sft.games.algorithm",
    ),
    row(
        "sft.data_generation.seed",
        COUNT,
        100000,
        "Seed of the first solved game; each further one counts up, those for testing last. Keep clear of the seeds "
        "that are played.",
        proof=PROOF,
        native="sft.games.seed",
    ),
    row(
        "sft.data_generation.train_size",
        POSITIVE,
        1000,
        "Solved games to learn from, each giving one example for every action.",
        native="sft.games.games",
        proof=PROOF,
        unit="games",
    ),
    row(
        "sft.data_generation.test_size",
        POSITIVE,
        100,
        "Further solved games, on which the loss is measured and the best checkpoint chosen.",
        proof=PROOF,
        native="sft.games.validation_games",
        unit="games",
    ),
    row(
        "sft.data_generation.bfs_max_depths",
        POSITIVE,
        100,
        "Longest solution that is searched for, in actions.",
        proof=PROOF,
        native="sft.games.max_depth",
        unit="moves",
    ),
    row(
        "sft.data_generation.prefix",
        choice("message", "qwen-instruct", "base"),
        "message",
        "Form of the examples: chat messages, or plain text in Qwen's chat format or that of a base model.",
        proof=PROOF,
        native="sft.games.form",
    ),
    row(
        "sft.data_generation.num_processes",
        POSITIVE,
        16,
        "Processes that solve games side by side. Changes the time, not the result.",
        proof=PROOF,
        native="sft.games.processes",
        unit="processes",
    ),
    row(
        "sft.training.num_gpus",
        POSITIVE,
        1,
        "GPUs that share each batch of fine-tuning, each with a process that torchrun starts.",
        proof="tests/unit/config/test_spread.py::test_fine_tuning_takes_as_many_processes_as_devices",
        native="sft.devices",
        unit="devices",
    ),
    row(
        "sft.training.max_length",
        POSITIVE,
        2048,
        "Tokens of one example, prompt and reply together; a longer one is refused.",
        proof=PROOF,
        native="sft.max_tokens",
        unit="tokens",
    ),
    row(
        "sft.training.learning_rate",
        POSITIVE_NUMBER,
        1.0e-4,
        "Peak learning rate of fine-tuning, after a warm-up of a tenth of the updates and before a cosine decay.",
        native="sft.optimizer.learning_rate",
        proof=PROOF,
    ),
    row(
        "sft.training.train_batch_size",
        POSITIVE,
        128,
        "Examples of one optimizer step, an example being one turn, over all GPUs together.",
        native="sft.batch",
        proof=PROOF,
        unit="sequences",
    ),
    row(
        "sft.training.micro_batch_size",
        POSITIVE,
        4,
        "Examples of one forward and backward pass, over all GPUs together. Changes memory, not the result.",
        native="sft.sequences_per_pass",
        proof=PROOF,
        unit="sequences",
    ),
    row(
        "sft.training.experiment_name",
        TEXT,
        "test_sft_lora",
        "Name of the fine-tuning run in loggers.",
        proof=PROOF,
        native="sft.name",
    ),
    row(
        "sft.training.logger",
        LOGGERS,
        "['console','wandb']",
        "Where metrics of fine-tuning go: a list of loggers, or its text as YAML would write it.",
        native="sft.loggers",
        pending=Capability.LOGGERS,
        noop=LOCAL_LOGGERS,
        computed=True,
    ),
    row(
        "sft.training.epochs",
        POSITIVE,
        5,
        "Passes over the examples, each followed by a validation and a checkpoint.",
        native="sft.epochs",
        proof=PROOF,
        unit="passes",
    ),
    row(
        "sft.training.hdfs_dir",
        optional(TEXT),
        None,
        "Directory of a Hadoop file system to which fine-tuned weights are copied; null copies none. RAGEN's code "
        "ignores it.",
        proof=PROOF,
        native="sft.remote_dir",
    ),
    row(
        "sft.training.validate_before_training",
        BOOLEAN,
        True,
        "Measures the loss on the test games before the first update.",
        proof=PROOF,
        native="sft.validate_before",
    ),
    row(
        "sft.training.lora_rank",
        COUNT,
        64,
        "Rank of the low-rank adapters that are trained in place of the weights; 0 trains the weights themselves.",
        proof=PROOF,
        native="sft.lora.rank",
        computed=True,
    ),
    row(
        "sft.training.lora_alpha",
        POSITIVE,
        32,
        "Scale of the adapters: what they add is multiplied by this over the rank.",
        proof=PROOF,
        native="sft.lora.alpha",
        computed=True,
    ),
    row(
        "sft.training.target_modules",
        TEXTS,
        "all-linear",
        "Modules that get adapters, by name; `all-linear` takes every linear layer but the output.",
        proof=PROOF,
        native="sft.lora.target_modules",
        computed=True,
    ),
    row(
        "sft.training.enable_gradient_checkpointing",
        BOOLEAN,
        False,
        "Activations are recomputed in the backward pass of fine-tuning: less memory, more time.",
        native="sft.gradient_checkpointing",
        proof=PROOF,
    ),
    row(
        "sft.training.base_model",
        TEXT,
        "Qwen/Qwen2.5-0.5B-Instruct",
        "Model that is fine-tuned; the adapters are merged into `model.base_model`, so both should be the same.",
        native="sft.path",
        proof=PROOF,
    ),
    row(
        "sft.training.project_name",
        TEXT,
        "RAGEN",
        "Project of the fine-tuning run in loggers.",
        proof=PROOF,
        native="sft.project",
    ),
    row(
        "sft.sokoban.dim_x",
        integer(least=4),
        6,
        "Rows of the Sokoban rooms that are solved, in cells, walls included.",
        native="world.height",
        proof=SOKOBAN_PROOF,
        only_if=("sft.env_type", "sokoban"),
    ),
    row(
        "sft.sokoban.dim_y",
        integer(least=4),
        6,
        "Columns of the Sokoban rooms that are solved, in cells, walls included.",
        native="world.width",
        proof=SOKOBAN_PROOF,
        only_if=("sft.env_type", "sokoban"),
    ),
    row(
        "sft.sokoban.num_boxes",
        POSITIVE,
        1,
        "Boxes in a room that is solved, and as many targets.",
        native="world.boxes",
        proof=SOKOBAN_PROOF,
        only_if=("sft.env_type", "sokoban"),
    ),
    row(
        "sft.sokoban.max_steps",
        POSITIVE,
        100,
        "Actions after which the world itself ends the game.",
        native="world.max_steps",
        proof=SOKOBAN_PROOF,
        only_if=("sft.env_type", "sokoban"),
    ),
    row(
        "sft.sokoban.search_depth",
        POSITIVE,
        30,
        "Moves of the reverse play that makes a room from its solution: more give harder rooms and take longer.",
        native="world.pull_steps",
        proof=SOKOBAN_PROOF,
        only_if=("sft.env_type", "sokoban"),
    ),
    row(
        "sft.frozenlake.size",
        integer(least=2),
        4,
        "Cells on each side of the lakes that are solved.",
        native="world.size",
        proof=PROOF,
        only_if=("sft.env_type", "frozenlake"),
    ),
    row(
        "sft.frozenlake.p",
        number(above=0, most=1),
        0.8,
        "On slippery ice, probability that a move goes where it was meant to. RAGEN's code takes it for the share of "
        "cells that are no holes.",
        native="world.success_rate",
        proof=PROOF,
        only_if=("sft.env_type", "frozenlake"),
    ),
    row(
        "sft.frozenlake.is_slippery",
        BOOLEAN,
        True,
        "Two moves in three slide off to a side, instead of each going where it was meant to.",
        native="world.slippery",
        proof=PROOF,
        only_if=("sft.env_type", "frozenlake"),
    ),
)
