"""The configured policy loss, which may be a user's function or come from another package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from quintet.algorithms.losses.targets import Loss, PolicyLoss, PolicyLossInputs
from quintet.config.native.losses import LOSSES, CustomLossConfig, LossSection
from quintet.config.native.registry_union import validate_options
from quintet.errors import ConfigError
from quintet.registry import load_user_object, user_errors


def loss_from_config(config: LossSection) -> tuple[Loss, Any]:
    """Return the configured loss and the `config` argument of its functions.

    Raises:
        ConfigError: the loss is unknown, cannot be imported, or refuses its options.
    """
    if isinstance(config, CustomLossConfig):
        key = "algorithm.loss.function"
        function = load_user_object(config.function, key, "quintet.losses")
        options = validate_options(function, config.options, "algorithm.loss.options")
        return _as_loss(function, key, config.function), options
    entry = LOSSES.get(config.name)
    function = entry.load()
    if entry.is_plugin:
        return _as_loss(function, "algorithm.loss.name", config.name), config
    return function if isinstance(function, Loss) else Loss(function), config


def _as_loss(function: Callable[..., Any] | Loss, key: str, value: str) -> Loss:
    """Wrap a function from another file or package in a check of its result."""
    if isinstance(function, Loss):
        return function

    def checked(logprobs: Tensor, targets: PolicyLossInputs, options: Any) -> PolicyLoss:
        with user_errors(value, key):
            result = function(logprobs, targets, options)
        if not isinstance(result, PolicyLoss) or result.loss.shape != logprobs.shape:
            is_loss = isinstance(result, PolicyLoss)
            returned = f"a loss of shape {list(result.loss.shape)}" if is_loss else repr(type(result))
            raise ConfigError(
                f"{key} = {value!r} returned {returned} for {len(logprobs)} tokens",
                key=key,
                value=value,
                hint="return a quintet.algorithms.losses.targets.PolicyLoss with one loss per log-prob",
            )
        return result

    return Loss(checked)
