"""Advantages of the configured estimator, which may be a user's function or come from another package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quintet.algorithms.tokens import whiten
from quintet.config.native.advantages import ADVANTAGES, AdvantageSection, CustomAdvantageConfig
from quintet.config.native.registry_union import validate_options
from quintet.errors import ConfigError
from quintet.records import Batch
from quintet.registry import load_user_object, user_errors

KEY = "algorithm.advantage.function"


def estimate(batch: Batch, config: AdvantageSection) -> tuple[Tensor, Tensor]:
    """Return (advantages [N], returns [N]) of the configured estimator.

    Raises:
        ConfigError: an estimator from another package cannot be imported or returns something else.
    """
    entry = ADVANTAGES.get(config.name)
    result: tuple[Tensor, Tensor] = entry.load()(batch, config)
    if entry.is_plugin:
        return _checked(result, batch, "algorithm.advantage.name", config.name, whitened=config.whiten)
    return result


def custom_advantage(batch: Batch, config: CustomAdvantageConfig) -> tuple[Tensor, Tensor]:
    """Return (advantages [N], returns [N]) of a user's function `(batch, options)`, set to 0 outside the loss mask.

    Raises:
        ConfigError: the function cannot be imported, refuses its options, raises, or returns something else.
    """
    function = load_user_object(config.function, KEY, "quintet.advantages")
    options = validate_options(function, config.options, "algorithm.advantage.options")
    with user_errors(config.function, KEY):
        result = function(batch, options)
    return _checked(result, batch, KEY, config.function, whitened=config.whiten)


def _checked(result: Any, batch: Batch, key: str, value: str, *, whitened: bool) -> tuple[Tensor, Tensor]:
    shape = (len(batch.tokens),)
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    if not is_pair or not all(isinstance(values, Tensor) and values.shape == shape for values in result):
        raise ConfigError(
            f"{key} = {value!r} must return (advantages, returns), two tensors with one number per token",
            key=key,
            value=value,
            hint="both have the shape of batch.rewards",
        )
    advantages, returns = (torch.where(batch.loss_mask, x.to(batch.rewards.dtype), 0.0) for x in result)
    return (whiten(advantages, batch.loss_mask) if whitened else advantages), returns
