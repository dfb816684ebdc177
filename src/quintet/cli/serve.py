"""`quintet serve`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.cli.choices import check_choices
from quintet.cli.configuration import ALONE, NATIVE, compose
from quintet.errors import MachineError

if TYPE_CHECKING:
    from quintet.config import Composed
    from quintet.pipelines.evaluate import Found
    from quintet.runtime.serving.opening import Opened
    from quintet.runtime.serving.server import Address

__all__ = ["Asked", "run"]

MEMORY_SHARE = 0.5
"""Of the machine's memory, for a model and its cache, where nothing says how much."""
LOOK_AGAIN = 0.2
"""Seconds between looks whether the server is to end."""


@dataclass(frozen=True, slots=True)
class Asked:
    """How a model is to be served. What is null is as the run's configuration says, or the defaults."""

    engine: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    token: str | None = None
    name: str | None = None
    max_concurrent: int | None = None
    context: int | None = None
    """Tokens of prompt and answer together."""
    dtype: str | None = None
    trust_remote_code: bool = False


def run(what: str, overrides: list[str], asked: Asked) -> int:
    """Serve until it is asked to stop; gives the exit status.

    Raises:
        ConfigError: something is wrong in what was asked.
        MachineError: the model can't be read, the port is taken, or the engine died.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from quintet.runtime.serving.server import Address

    address = Address(asked.host, asked.port, asked.token or os.environ.get("QUINTET_TOKEN") or None)
    address.check()
    from quintet.pipelines.evaluate import find_model

    found = find_model(what)
    composed = compose(
        None if found.config is None else str(found.config), [*_words(found, asked), *overrides], NATIVE, "refuse"
    )
    check_choices(composed)
    if composed.experiment.policy.trust_remote_code:
        print(f"trust_remote_code: code that lies in {found.policy} will run", file=sys.stderr)
    return _serve(composed, found.policy, asked.name or _name(what), asked.context, address)


def _words(found: Found, asked: Asked) -> Iterator[str]:
    """The configuration of that model, over that of its run."""
    settings = {
        "policy.preset": None,
        "policy.path": str(found.policy),
        "warm_start": None,
        "sft": None,
        "evaluation": None,
        "resume": "never",
        **ALONE,
        "rollout.engine": asked.engine,
        "rollout.max_concurrent": asked.max_concurrent,
        "policy.dtype": asked.dtype,
        "rollout.engine_options.memory_share": MEMORY_SHARE if found.config is None else None,
        "policy.trust_remote_code": asked.trust_remote_code or None,
    }
    nothing = ("policy.preset", "warm_start", "sft", "evaluation", *ALONE)
    yield from (
        f"{key}={json.dumps(value, ensure_ascii=False)}"
        for key, value in settings.items()
        if value is not None or key in nothing
    )


def _name(what: str) -> str:
    """The model's name where none is given: its directory's."""
    return Path(what).resolve().name


def _serve(composed: Composed, policy: Path, name: str, context: int | None, address: Address) -> int:
    from transformers.utils import logging

    from quintet.runtime.serving.opening import open_desk
    from quintet.runtime.serving.server import Service
    from quintet.runtime.stop import stop_on_signals

    logging.disable_progress_bar()
    config = composed.experiment
    with stop_on_signals() as stop:
        opened = open_desk(config, policy, name=name, context=context)
        with closing(opened.desk), closing(Service(opened.desk, address)) as service:
            _announce(opened, name, config.rollout.engine, service.url)
            while not stop:
                time.sleep(LOOK_AGAIN)
                if fault := opened.desk.engine.fault:
                    raise MachineError(f"the engine is gone: {type(fault).__name__}: {fault}", "start it again")
    print(f"stopped ({stop.signal})", file=sys.stderr)
    return 0


def _announce(opened: Opened, name: str, engine: str, url: str) -> None:
    print(f"{name} on {url}/v1", flush=True)
    print(
        f"engine {engine}, {opened.dtype}, {opened.slots} requests side by side, context {opened.desk.engine.context}",
        file=sys.stderr,
    )
