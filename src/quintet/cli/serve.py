"""`quintet serve`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.cli.choices import check_choices
from quintet.cli.configuration import (
    EPISODE_CODE,
    TRAINING_CODE,
    as_overrides,
    generation_settings,
    load_run_config,
)
from quintet.cli.messages import warn
from quintet.cli.model_downloads import downloaded_model
from quintet.cli.options import ServeOptions
from quintet.cli.transformers_setup import silence_transformers
from quintet.errors import SIGNALLED, MachineError

if TYPE_CHECKING:
    from quintet.config.composed import ComposedConfig
    from quintet.config.native.experiment import Experiment
    from quintet.pipelines.model_lookup import StoredModel
    from quintet.runtime.http_service.address import Address
    from quintet.runtime.serving.build import ServedModel

POLL_SECONDS = 0.2
"""Interval at which stop requests and engine failures are checked."""


def run(model: str, overrides: list[str], options: ServeOptions) -> int:
    """Serve a model until a stop signal arrives; return the exit status.

    Raises:
        ConfigError: An option or override is invalid.
        MachineError: The model cannot be read, the port is in use, or the engine died.
    """
    silence_transformers()
    from quintet.runtime.http_service.address import Address

    address = Address(options.host, options.port, options.token or os.environ.get("QUINTET_TOKEN") or None)
    address.check()
    from quintet.pipelines.model_lookup import find_model

    source = find_model(downloaded_model(model), warn)
    arguments = [*_overrides(source, options), *overrides]
    composed = load_run_config(source.config, arguments, unused=(*TRAINING_CODE, *EPISODE_CODE))
    check_choices(composed)
    if composed.experiment.policy.trust_remote_code:
        warn(f"policy.trust_remote_code is set: code from {source.policy} will be executed")
    return _serve(composed, source.policy, options.name or Path(os.path.abspath(model)).name, options.context, address)


def _overrides(source: StoredModel, options: ServeOptions) -> Iterator[str]:
    """Yield the overrides that turn the configuration of the model's run into one for serving."""
    chosen = {
        "rollout.engine": options.engine,
        "rollout.max_concurrent": options.max_concurrent,
        "policy.dtype": options.dtype,
        "policy.trust_remote_code": options.trust_remote_code or None,
        # vLLM and SGLang support structured outputs only with their tokenizer
        "rollout.engine_options.detokenize": True,
    }
    settings = generation_settings(str(source.policy), has_run=source.config is not None)
    yield from as_overrides(settings | {key: value for key, value in chosen.items() if value is not None})


def _serve(composed: ComposedConfig, policy: Path, name: str, context: int | None, address: Address) -> int:
    from quintet.runtime.server_process import server_interpreter
    from quintet.runtime.serving.app import ServingServer
    from quintet.runtime.serving.build import build_request_handler
    from quintet.runtime.signals import stop_on_signals

    config = composed.experiment
    with stop_on_signals() as stop:
        served = build_request_handler(config, policy, name=name, context=context)
        with server_interpreter(), closing(served.handler), closing(ServingServer(served.handler, address)) as service:
            _print_address(served, name, config, service.url)
            while stop.number is None:
                time.sleep(POLL_SECONDS)
                if fault := served.handler.engine.error:
                    raise MachineError(f"the engine died: {type(fault).__name__}: {fault}", "restart the server")
    print(f"stopped ({stop.number.name})", file=sys.stderr)
    return SIGNALLED + stop.number


def _print_address(served: ServedModel, name: str, config: Experiment, url: str) -> None:
    print(f"{name} on {url}/v1", flush=True)
    engine, options = config.rollout.engine, config.rollout.engine_options
    invariance = ", batch-invariant" if engine == "hf" and options.deterministic else ""
    print(
        f"engine {engine}, {served.dtype}, {served.max_concurrent_requests} concurrent requests,"
        f" context {served.handler.engine.max_model_len}{invariance}",
        file=sys.stderr,
    )
