"""Fixtures that several test rooms share: a very small policy and batches made by hand."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import session_processes
import torch
from hypothesis import HealthCheck, settings

from quintet.records import Batch


class LoggerDict(dict[str, logging.Logger | logging.PlaceHolder]):
    """Loggers by name, whose `values` are a copy: pytest iterates over them while threads create loggers."""

    def values(self) -> list[logging.Logger | logging.PlaceHolder]:  # type: ignore[override]
        return list(super().values())


LONGEST = (
    *("tests/system/test_train.py", "tests/system/test_ranks.py", "tests/system/test_ray.py", "tests/system/"),
    *("tests/unit/training/parallel/", "tests/unit/policies/parallel/", "tests/unit/training/megatron/"),
    "tests/unit/runtime/",
)
"""Files and directories with the longest tests, which run first: two workers then end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by `LONGEST`; `--dist loadfile --no-loadscope-reorder` starts the files in this order."""
    items.sort(key=lambda item: [not item.nodeid.startswith(prefix) for prefix in LONGEST])


def pytest_collection(session: pytest.Session) -> None:
    """Collect no garbage while the tests are collected: a quarter of the time, for objects that stay."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage again, of which the collected tests and imported packages are none."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Let SIGINT end processes that tests start: `nohup make test &` and some CI runners ignore it, and a process
    inherits that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(session_processes)
    logging.Logger.manager.loggerDict = LoggerDict(logging.Logger.manager.loggerDict)
    # a busy machine is no failure
    settings.register_profile(
        "any_speed", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any_speed")


TEXTS = [
    "system\nWalk to the goal G. P is you, _ is ice, O is a hole.",
    "user\n P _ O _\n _ _ G _\n √ X # S\nassistant\n",
    "<think> goal 1 Down </think><answer> Down </answer>",
    "<think> goal 2 Right 1 Up </think><answer> Right </answer>",
    "<answer> Left || Up </answer>",
]


@pytest.fixture(scope="module", autouse=True)
def without_process_group() -> None:
    """Destroy a process group that an earlier module of the same worker left: the next one could not create its own."""
    if torch.distributed.is_initialized():
        if parallel_state := sys.modules.get("megatron.core.parallel_state"):
            parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def transformers_stays_as_it_was() -> Iterator[None]:
    """Name the module in which two threads loaded models at once: all models that the worker loads later would have
    random tied heads, see `quintet.loading_lock`."""
    yield
    if transformers := sys.modules.get("transformers.modeling_utils"):
        assert transformers.PreTrainedModel.tie_weights.__qualname__ == "PreTrainedModel.tie_weights"


@pytest.fixture(autouse=True)
def environment_stays_as_it_was() -> Iterator[None]:
    """Restore the variables of the environment: commands that a test calls in this process set those of libraries."""
    before = os.environ.copy()
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name, value in before.items():
        if name != "PYTEST_CURRENT_TEST" and os.environ.get(name) != value:
            os.environ[name] = value


@pytest.fixture(scope="session")
def policy_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer policy of random weights with its tokenizer, as a Hugging Face directory."""
    return save_tiny_policy(tmp_path_factory.mktemp("policy"), experts=0)


@pytest.fixture(scope="session")
def mixture_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with four experts in each layer, two of which see a token."""
    return save_tiny_policy(tmp_path_factory.mktemp("mixture"), experts=4)


@pytest.fixture(scope="session")
def deep_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of five layers."""
    return save_tiny_policy(tmp_path_factory.mktemp("deep"), experts=0, layers=5)


def save_tiny_policy(directory: Path, experts: int, layers: int = 2) -> Path:
    """A policy of random weights and its tokenizer, written there."""
    from quintet.policies import tiny_models

    shape = tiny_models.Preset(
        hidden=32, layers=layers, heads=4, kv_heads=2, mlp=64, vocabulary=420, context=512, experts=experts
    )
    tokenizer = tiny_models.train_tokenizer(shape.vocabulary, TEXTS)
    model = tiny_models.build_model(shape, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed=7)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def make_batch() -> Callable[..., Batch]:
    """A batch from lists: one mask, turn-end and reward list a sequence."""

    def make(
        masks: list[list[int]],
        rewards: list[list[float]],
        *,
        ends: list[list[int]] | None = None,
        values: list[list[float]] | None = None,
        trajectory: list[int] | None = None,
        group: list[int] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> Batch:
        lengths = torch.tensor([len(mask) for mask in masks])
        owners = trajectory or list(range(len(masks)))
        size = int(lengths.sum())
        flat = lambda rows: torch.tensor([x for row in rows for x in row], dtype=dtype)  # noqa: E731
        return Batch(
            tokens=torch.arange(size) % 50,
            positions=torch.cat([torch.arange(n) for n in lengths.tolist()]),
            lengths=lengths,
            loss_mask=flat(masks).bool(),
            turn=torch.zeros(size, dtype=torch.long),
            turn_end=flat(ends if ends is not None else [[0] * len(mask) for mask in masks]).bool(),
            trajectory=torch.tensor(owners),
            group=torch.tensor(group or [0] * (max(owners) + 1)),
            logprobs=torch.zeros(size),
            rewards=flat(rewards),
            values=None if values is None else flat(values),
        )

    return make


@pytest.fixture
def megatron_alone() -> Iterator[None]:
    """Megatron in this process, of which no groups and no threads are left behind; skips where it isn't installed."""
    pytest.importorskip("megatron.core", reason="pip install -e '.[megatron]'")
    from megatron.core import parallel_state

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
