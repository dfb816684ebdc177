"""Requests of Quintet's own protocol of an environment service."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from quintet.runtime.http_service.body_model import at_most, with_one_unknown_field
from quintet.runtime.http_service.limits import check_depth

MAX_REQUESTS = 8192
"""Maximum number of requests in a body."""
MAX_ACTIONS = 1024
"""Maximum number of actions in a request."""
MAX_CONFIG_BYTES = 1 << 14
"""Maximum size of the configuration of an environment as JSON. Its texts are sent to each of a session's environments,
and may be repeated in each of their results."""
MAX_DEPTH = 64
"""Maximum depth of nested objects and lists in configurations and actions."""
MAX_SEPARATORS = {",": 1 << 18, ":": 1 << 17}
"""Maximum number of commas and colons in a body: it is parsed in the event loop."""


def _limit_depth(value: Any) -> Any:
    check_depth(value, MAX_DEPTH)
    return value


EnvName = Annotated[str, Field(min_length=1, max_length=200)]
StartSeed = Annotated[int, Field(ge=0, lt=1 << 62)]
Actions = Annotated[list[Any], Field(max_length=MAX_ACTIONS), AfterValidator(_limit_depth)]
Arrays = Annotated[dict[str, Any], AfterValidator(_limit_depth)]


class Body(BaseModel):
    """Base class of all bodies."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, fields: Any) -> Any:
        return with_one_unknown_field(cls, fields)


class SessionBody(Body):
    """A new session."""

    env: dict[str, Any] = {}
    """Configuration of the session's environments, with the keys of `env` in a run, such as `{"name": "frozenlake",
    "size": 4}`; the default is that of the server's first environment."""


class RobotsCall(Body):
    """A call of a simulator: `describe` and `reset` build it if there is none, `step` executes a chunk of actions."""

    call: Literal["describe", "reset", "step"]
    num_robots: Annotated[int, Field(ge=1, le=4096)]
    """Number of robots of the simulator."""
    start_states: Arrays | None = None
    """Start states of each robot's successive episodes, array int64 [robots, episodes]."""
    actions: Arrays | None = None
    """Array float32 [robots, actions, dimensions]."""
    record_frames: bool = False
    """Return a picture after each action."""


class ExchangeItem(Body):
    """A call of one environment: `reset` with a seed, `step` with actions, a simulator with `robots`, `close` with none
    of them."""

    env: EnvName
    """Name of the environment in the session; the client chooses it."""
    seed: StartSeed | None = None
    actions: Actions | None = None
    robots: RobotsCall | None = None


class ExchangeBody(Body):
    """Calls of environments; the response has their results in the same order."""

    number: Annotated[int, Field(ge=0)] | None = None
    """Number of the exchange: a repetition of the last one gets the same response, without executing it again."""
    requests: Annotated[list[ExchangeItem], Field(max_length=MAX_REQUESTS, fail_fast=True)]


class ResetBody(Body):
    """Start states of environments by name. Others than those of the session are created."""

    seeds: Annotated[dict[EnvName, StartSeed], Field(max_length=MAX_REQUESTS), at_most(MAX_REQUESTS)]


class StepBody(Body):
    """Actions of environments by name."""

    actions: Annotated[dict[EnvName, Actions], Field(max_length=MAX_REQUESTS), at_most(MAX_REQUESTS)]


class EnvsBody(Body):
    """Names of environments."""

    envs: Annotated[list[EnvName], Field(max_length=MAX_REQUESTS, fail_fast=True)]
