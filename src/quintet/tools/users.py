"""Built-in simulated users, and the users of a run from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from quintet.config.interaction_files import run_users
from quintet.config.native.interactions import InteractionsConfig, UserConfig
from quintet.errors import ConfigError
from quintet.registry import Registry, load_user_object
from quintet.tools.interaction import Interaction
from quintet.tools.registry import check_arguments
from quintet.tools.verl_modules import VerlInteraction, verl_modules

KEY = "rollout.interactions.users"
USERS: Registry[Interaction] = Registry("user", entry_points="quintet.users")
"""Classes of simulated users; see `quintet.tools.interaction.Interaction`."""

USERS.add("gsm8k", "quintet.tools.gsm8k_interaction:Gsm8kInteraction", help="check of answers, as verl's interaction")


def load_user(name: str, config: UserConfig) -> Callable[[], Interaction]:
    """Return a function that builds the user of this name.

    Raises:
        ConfigError: there is no such user, file or class, importing it fails, it lacks a method of `Interaction`, or it
            does not accept the arguments.
    """
    reference, key = config.user or name, f"{KEY}.{name}.user"
    if ":" not in reference:
        try:
            return USERS.get(reference).load()
        except ConfigError as error:
            raise ConfigError(f"{key}: {error.message}", key=key, value=reference, hint=error.hint) from error
    with verl_modules():
        user_class: Any = load_user_object(reference, key)
    check_arguments(user_class, reference, config.arguments, f"{KEY}.{name}.arguments")
    if hasattr(user_class, "generate_response"):
        return lambda: VerlInteraction(user_class(**config.arguments))
    missing = [method for method in ("create", "reply", "close") if not callable(getattr(user_class, method, None))]
    if missing:
        message = f"{key} = {reference!r} lacks {', '.join(missing)}"
        raise ConfigError(message, key=key, value=reference, hint="docs/tools.md lists what a user has")
    return lambda: user_class(**config.arguments)


def user_names(config: InteractionsConfig | None) -> tuple[str, ...]:
    """Return the names of the users of a run.

    Raises:
        ConfigError: see `run_users`.
    """
    return () if config is None else tuple(run_users(config))


def user_name(extra: Mapping[str, Any], names: Collection[str]) -> Any:
    """Return the name of a row's user from its `extra_info`; of only one user, it may be missing."""
    arguments = extra.get("interaction_kwargs")
    name = arguments.get("name") if isinstance(arguments, Mapping) else None
    return next(iter(names)) if name is None and len(names) == 1 else name
