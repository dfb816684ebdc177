"""Base classes of the configuration of environments, and their registry."""

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from quintet.config.native.registry_union import NamedSection, register
from quintet.config.native.relations import RelationScoring
from quintet.config.native.section import TEXT_AS_LIST, Count, ListOf, NotEmpty, Section, Share
from quintet.registry import Registry

Rendered = Literal["text", "vision"]
ServerUrl = Annotated[str, Field(pattern=r"^https?://[^/]")]


ENVS: Registry[Any] = Registry("env", entry_points="quintet.envs", old_entry_points="quintet.worlds")
"""Env classes or factories called with the config; see `quintet.envs.env.Env`."""
register_env = partial(register, ENVS, "quintet.envs")


class EnvSection(NamedSection):
    """Base class of the configuration of an environment."""

    reads_prompts: ClassVar[bool] = False
    """Episodes are prompts from `data.train_files` with one response each, scored by `reward`."""
    is_simulator: ClassVar[bool] = False
    """Episodes run in a vectorized robot simulator with its own placement."""
    has_expert: ClassVar[bool] = False
    """The env class has `expert_action` and `expert_thought`, which demonstrations are made with."""
    runs_external_code: ClassVar[bool] = False
    """The env is code of the user or of another package: it is loaded once before the run starts."""

    name: str = ""
    """Environment."""

    @property
    def shows_images(self) -> bool:
        """Whether observations have images, as far as the configuration says."""
        return getattr(self, "render", "text") == "vision"

    @property
    def rendered_size(self) -> tuple[int, int] | None:
        """Height and width of the images, pixels; None if the configuration does not set them."""
        return None

    @property
    def images_per_observation(self) -> int:
        """Number of images of an observation that has some."""
        return 1

    def data_paths(self) -> dict[str, str]:
        """Return the files and directories that the env reads, by key. Clients of an environment service may only name
        those in its working directory."""
        return {}

    def server_keys(self) -> tuple[str, ...]:
        """Return the keys that name modules, programs or services other than the default. Clients of an environment
        service may not set them."""
        return ()


class EnvProcessesConfig(Section):
    """Environments in separate processes: one that hangs or dies ends only its own episode."""

    max_processes: PositiveInt = 256
    """Maximum number of processes; further episodes wait."""
    reset_timeout_seconds: PositiveFloat = 60.0
    """Time limit of an episode's start; then its process is killed and the episode has failed."""
    step_timeout_seconds: PositiveFloat = 10.0
    """Time limit of one action; then its process is killed and the episode has failed."""
    episodes_per_process: PositiveInt | None = None
    """Episodes after which a process is replaced by a fresh one; 1 gives each episode a fresh process. null keeps a
    process as long as its episodes end without a failure."""
    memory_gib: PositiveFloat | None = None
    """Address space limit of a process, GiB; null sets no limit."""


def _expand_processes(value: Any) -> Any:
    """Accept `true`, `false`, or a number of processes in place of a section."""
    if isinstance(value, bool):
        return {} if value else None
    return {"max_processes": value} if isinstance(value, int) else value


Processes = Annotated[EnvProcessesConfig | None, BeforeValidator(_expand_processes)]


class EnvServiceConfig(Section):
    """Environment service whose servers run the envs, started by `quintet serve-envs`."""

    urls: Annotated[ListOf[ServerUrl], Field(min_length=1), TEXT_AS_LIST]
    """Base URLs of the servers, such as `http://10.0.0.7:5000`. Episodes are distributed over all of them; those of a
    server that is lost continue on another one."""
    protocol: Literal["quintet", "vagen"] = "quintet"
    """Protocol of the servers: Quintet's own, or that of VAGEN's servers, which parse the actions again and return one
    observation for all actions of a response. Quintet's servers have both."""
    timeout_seconds: PositiveFloat = 600.0
    """Time limit of a request, which steps all of a server's envs, and how long the run waits if all servers are lost,
    seconds."""
    max_retries: Count = 3
    """Number of times that a request is sent again over another connection before its server is lost. Requests that
    would be executed twice are not repeated."""
    token_env: NotEmpty = "QUINTET_TOKEN"  # noqa: S105 - the name of a variable
    """Environment variable with the token of the servers; if it is not set, no token is sent."""


class InteractiveEnvSection(EnvSection):
    """Base class of the configuration of an environment with turns."""

    relation_scoring: ClassVar[RelationScoring | None] = None
    """Its observations have `relations`, which `rollout.state_reward` compares descriptions with; None if they have
    not."""

    instruction: NotEmpty | None = None
    """System message in place of that of the env; null uses the env's own."""
    processes: Processes = None
    """Run envs in separate processes: a section, `true` for its defaults, or a number of processes. null runs them in
    the main process, which is faster for fast envs."""
    service: EnvServiceConfig | None = None
    """Environment service that runs the envs; null runs them in this run. `processes` has no effect on a service, which
    has worker processes of its own."""
    max_actions: PositiveInt | None = None
    """Maximum number of actions in an episode, over all turns, after which the episode is truncated; null sets no
    limit besides the env's own."""
    max_tokens: PositiveInt | None = None
    """Maximum number of tokens in an episode, prompts and responses; the response is cut there, and no further turn
    begins. null sets no limit besides those of the turns."""
    max_failed_share: Share = 0.5
    """Maximum share of the concurrent episodes whose env or engine fails before the run stops; failed episodes are left
    out of the update."""
