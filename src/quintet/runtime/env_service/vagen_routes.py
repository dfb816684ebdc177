"""Routes of VAGEN's protocol of environment services: its clients cannot tell the difference.

All clients share one namespace of environments, as on VAGEN's servers.
"""

# the annotations of routes are evaluated by FastAPI
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import AfterValidator, BaseModel, Field

from quintet.config.dialects.vagen.service_env import env_from_vagen
from quintet.envs.service.payload import JSON
from quintet.errors import ConfigError
from quintet.runtime.env_service.json_route import FastJsonRoute
from quintet.runtime.env_service.schema import MAX_CONFIG_BYTES, MAX_DEPTH, MAX_REQUESTS, EnvName, StartSeed
from quintet.runtime.env_service.served_envs import ServedEnvs
from quintet.runtime.env_service.sessions import SessionTable
from quintet.runtime.env_service.worker_pool import Call
from quintet.runtime.http_service.body_model import at_most
from quintet.runtime.http_service.limits import check_depth
from quintet.runtime.http_service.request_error import RequestError


def _limit_size(config: dict[str, Any]) -> dict[str, Any]:
    check_depth(config, MAX_DEPTH)
    if (size := len(json.dumps(config))) > MAX_CONFIG_BYTES:
        raise ValueError(f"{size} bytes as JSON, the maximum is {MAX_CONFIG_BYTES}")
    return config


VagenConfig = Annotated[dict[str, Any], AfterValidator(_limit_size)]


class VagenEnv(BaseModel):
    """Environment to create."""

    env_name: EnvName
    env_config: VagenConfig = {}
    seed: Any = None


class EnvironmentsBody(BaseModel):
    """Environments to create by id."""

    ids2configs: Annotated[dict[EnvName, VagenEnv], Field(max_length=MAX_REQUESTS), at_most(MAX_REQUESTS)]


class SeedsBody(BaseModel):
    """Start states of environments by id."""

    ids2seeds: Annotated[dict[EnvName, StartSeed], Field(max_length=MAX_REQUESTS), at_most(MAX_REQUESTS)]


class ResponsesBody(BaseModel):
    """Responses of the policy by environment."""

    ids2actions: Annotated[dict[EnvName, str], Field(max_length=MAX_REQUESTS), at_most(MAX_REQUESTS)]


class IdsBody(BaseModel):
    """Ids of environments."""

    env_ids: Annotated[list[EnvName], Field(max_length=MAX_REQUESTS, fail_fast=True)]


class SeedBody(BaseModel):
    """Start state of an environment."""

    seed: StartSeed = 0


class ResponseBody(BaseModel):
    """Response of the policy."""

    action: str


class _VagenSession:
    """The session of all VAGEN's clients, created with its first environment."""

    def __init__(self, envs: ServedEnvs, sessions: SessionTable) -> None:
        self._envs, self._sessions = envs, sessions
        self._id: str | None = None

    async def create(self, configs: Mapping[str, VagenEnv]) -> None:
        """Create environments; those of the same ids are replaced.

        Raises:
            RequestError: one cannot be created.
        """
        calls = []
        for env, vagen in configs.items():
            try:
                config, responses = env_from_vagen(vagen.env_name, vagen.env_config)
            except ConfigError as error:
                raise RequestError(f"{env}: {error}", code="invalid_env") from error
            calls.append(Call(env, "vagen_create", (asdict(responses),), self._envs.config(config)))
        await self.call([Call(env, "close") for env in configs])
        await self.call(calls)

    async def call(self, calls: Sequence[Call]) -> dict[str, Any]:
        """Return the results by environment.

        Raises:
            RequestError: an environment is unknown or has failed; the message names all of these.
        """
        try:
            session = self._sessions.get(self._id or "")
        except RequestError:
            session = self._sessions.create("", client="")
            self._id = session.id
        results = [json.loads(result) for result in await self._sessions.exchange(session, calls, JSON)]
        problems = [
            f"{call.env}: {result.get('lost') or ': '.join(result['failure'])}"
            for call, result in zip(calls, results, strict=True)
            if "lost" in result or "failure" in result
        ]
        if problems:
            raise RequestError("; ".join(problems[:8]), status=500, kind="server_error", code="env_failed")
        return {call.env: result.get("result") for call, result in zip(calls, results, strict=True)}

    async def call_one(self, call: Call) -> Any:
        """Return the result of a call; raises as `call` does."""
        return (await self.call([call]))[call.env]


def vagen_router(envs: ServedEnvs, sessions: SessionTable) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["VAGEN"], route_class=FastJsonRoute)
    session = _VagenSession(envs, sessions)
    _add_batch_routes(router, session)
    _add_single_routes(router, session)
    return router


def _add_batch_routes(router: APIRouter, session: _VagenSession) -> None:
    @router.post("/environments")
    async def create(body: EnvironmentsBody) -> dict[str, Any]:
        """Create environments."""
        await session.create(body.ids2configs)
        return {"success": True}

    @router.post("/batch/reset")
    async def reset(body: SeedsBody) -> dict[str, Any]:
        """Start an episode in each environment: `[observation, info]` by id."""
        return {"results": await session.call([Call(env, "reset", (seed,)) for env, seed in body.ids2seeds.items()])}

    @router.post("/batch/step")
    async def step(body: ResponsesBody) -> dict[str, Any]:
        """Execute the actions in responses of the policy: `[observation, reward, done, info]` by id."""
        return {"results": await session.call([Call(env, "step", (text,)) for env, text in body.ids2actions.items()])}

    @router.post("/batch/reward")
    async def reward(body: IdsBody) -> dict[str, Any]:
        """Rewards of the episodes beyond those of their steps: 0."""
        return {"rewards": await session.call([Call(env, "reward") for env in body.env_ids])}

    @router.post("/batch/system_prompt")
    async def system_prompt(body: IdsBody) -> dict[str, Any]:
        """System prompts by id."""
        return {"system_prompts": await session.call([Call(env, "system_prompt") for env in body.env_ids])}

    @router.post("/batch/close")
    async def close(body: IdsBody) -> dict[str, Any]:
        """Close environments, if they exist."""
        await session.call([Call(env, "close") for env in body.env_ids])
        return {"status": "success"}


def _add_single_routes(router: APIRouter, session: _VagenSession) -> None:
    @router.post("/reset/{env_id}")
    async def reset(env_id: str, body: SeedBody) -> dict[str, Any]:
        """Start an episode in one environment."""
        observation, info = await session.call_one(Call(env_id, "reset", (body.seed,)))
        return {"observation": observation, "info": info}

    @router.post("/step/{env_id}")
    async def step(env_id: str, body: ResponseBody) -> dict[str, Any]:
        """Execute the actions in a response of the policy."""
        observation, reward, done, info = await session.call_one(Call(env_id, "step", (body.action,)))
        return {"observation": observation, "reward": reward, "done": done, "info": info}

    @router.get("/reward/{env_id}")
    async def reward(env_id: str) -> dict[str, Any]:
        """Return the reward of the episode beyond the rewards of its steps: 0."""
        return {"reward": await session.call_one(Call(env_id, "reward"))}

    @router.get("/system_prompt/{env_id}")
    async def system_prompt(env_id: str) -> dict[str, Any]:
        """System prompt of one environment."""
        return {"system_prompt": await session.call_one(Call(env_id, "system_prompt"))}

    @router.delete("/close/{env_id}")
    async def close(env_id: str) -> dict[str, Any]:
        """Close one environment, if it exists."""
        await session.call([Call(env_id, "close")])
        return {"status": "success"}
