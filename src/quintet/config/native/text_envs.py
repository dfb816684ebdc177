"""Configuration of the text environments of RAGEN: bandits, Countdown, questions from files, search, WebShop."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from quintet.config.native.env_section import ENVS, EnvProcessesConfig, InteractiveEnvSection, Processes, register_env
from quintet.config.native.registry_union import register
from quintet.config.native.section import NotEmpty, Share, UnitInterval


@register_env("bandit:Bandit", "choose between two named arms")
class BanditConfig(InteractiveEnvSection, name="bandit"):
    """Pull one of two arms, whose names hint at their rewards; the second arm is better on average."""

    has_expert: ClassVar[bool] = True

    arms: Literal["named", "train", "test"] = "named"
    """`named` are `low_arm` and `high_arm`; `train` and `test` draw two professions from RAGEN's lists of that name,
    the safer one in place of `low_arm`."""
    low_arm: NotEmpty = "Phoenix"
    """Name of the arm with a certain reward."""
    high_arm: NotEmpty = "Dragon"
    """Name of the arm with a random reward, which is the better one on average."""
    low_reward: float = 0.1
    """Reward of the first arm."""
    high_reward: float = 1.0
    """Reward of the second arm if it pays."""
    miss_reward: float = 0.0
    """Reward of the second arm if it does not pay."""
    high_probability: Share = 0.25
    """Probability that the second arm pays."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.low_arm.casefold() == self.high_arm.casefold():
            yield "`high_arm` has the name of `low_arm`", "high_arm=Dragon low_arm=Phoenix"


@register_env("countdown:Countdown", "reach a target number using each given number once")
class CountdownConfig(InteractiveEnvSection, name="countdown"):
    """Write an expression that takes each given number once and reaches the target."""

    path: NotEmpty | None = None
    """Parquet or JSON Lines file with the columns `nums` and `target`; null draws problems from the seed."""
    max_rows: PositiveInt | None = None
    """Number of first rows of the file that are used; null uses all."""
    numbers: Annotated[int, Field(ge=2, le=6)] = 4
    """Numbers of a drawn problem."""
    largest_number: PositiveInt = 99
    """Largest number of a drawn problem; the smallest is 1."""
    format_reward: Share = 0.1
    """Reward of an expression with each number once that does not reach the target, which is rewarded by 1."""

    def data_paths(self) -> dict[str, str]:
        """See `EnvSection.data_paths`."""
        return {} if self.path is None else {"path": self.path}


@register_env("questions:Questions", "questions with answers from files")
class QuestionsConfig(InteractiveEnvSection, name="questions"):
    """Answer a question from a file; after a wrong answer, try again for a smaller reward."""

    path: NotEmpty = "questions.jsonl"
    """Parquet, JSON or JSON Lines file with questions, or directory with such files."""
    question_key: NotEmpty = "query"
    """Column of the question."""
    answer_key: NotEmpty = "response"
    """Column of the answer, or of a solution with the answer after "The answer is:"."""
    discount: UnitInterval = 0.5
    """Factor on the reward, 1 for the first answer, for each wrong answer before the right one."""

    def data_paths(self) -> dict[str, str]:
        """See `EnvSection.data_paths`."""
        return {"path": self.path}


@register(ENVS, "quintet.tools", "search_questions:SearchQuestions", "answer questions by searching for passages")
class SearchQuestionsConfig(InteractiveEnvSection, name="search"):
    """Answer a question from a file by searching in a retrieval service."""

    path: NotEmpty = "data/search/train.parquet"
    """Parquet, JSON or JSON Lines file with questions, or directory with such files."""
    max_rows: PositiveInt | None = None
    """Number of first rows of the file that are used; null uses all."""
    question_key: NotEmpty = "question"
    """Column of the question."""
    answer_key: NotEmpty = "ground_truth"
    """Column of the answer, or of a list of right ones."""
    url: NotEmpty = "http://127.0.0.1:8000"
    """URL of the retrieval service, which answers a POST of `{"query": …, "top_k": 5}` to `/retrieve` with
    `{"results": [{"id": …, "content": …, "score": 0.9}, …]}`."""
    timeout_seconds: PositiveFloat = 30.0
    """Time limit of a search. If the service does not answer, the episode has failed."""
    passages: Annotated[int, Field(ge=1, le=50)] = 5
    """Passages that a search shows."""
    max_characters: PositiveInt = 4000
    """Characters of all passages of a search, after which they are cut."""
    max_steps: PositiveInt = 10
    """Searches after which the env truncates the episode."""
    correct_reward: float = 1.0
    """Reward of a right answer, multiplied by its F1 with the right words."""
    wrong_reward: float = 0.0
    """Reward of another answer."""
    min_f1: Share = 0.3
    """Smallest F1 of a right answer."""
    processes: Processes = EnvProcessesConfig(step_timeout_seconds=60.0)
    """Run envs in separate processes: a section, `true` for its defaults, or a number of processes. null runs them in
    the main process, where one search waits for another."""

    def data_paths(self) -> dict[str, str]:
        """See `EnvSection.data_paths`."""
        return {"path": self.path}

    def server_keys(self) -> tuple[str, ...]:
        """See `EnvSection.server_keys`."""
        return () if self.url == type(self).model_fields["url"].default else ("url",)


@register_env(
    "webshop_env:WebShop",
    "an online shop of WebShop by text commands",
    requires=("webshop_minimal",),
    how="in a checkout of RAGEN: pip install -e external/webshop-minimal, as its setup_webshop.sh does",
)
class WebShopConfig(InteractiveEnvSection, name="webshop"):
    """Search and buy a product in the online shop of WebShop (package `webshop_minimal`)."""

    runs_external_code: ClassVar[bool] = True

    dataset: Literal["small", "full"] | None = "small"
    """Products that the package brings along; null leaves its choice."""
    file_path: NotEmpty | None = None
    """File with the products; null uses the package's own."""
    observation: Literal["text", "html"] = "text"
    """Pages as text, or as HTML."""
    products: PositiveInt | None = None
    """Number of products that can be found; null uses all."""
    human_goals: bool = False
    """Use instructions that people wrote instead of generated ones."""
    processes: Processes = EnvProcessesConfig(reset_timeout_seconds=600.0, step_timeout_seconds=60.0)
    """Run envs in separate processes: a section, `true` for its defaults, or a number of processes. null runs them in
    the main process, where an env that hangs or dies stops the run."""

    def data_paths(self) -> dict[str, str]:
        """See `EnvSection.data_paths`."""
        return {} if self.file_path is None else {"file_path": self.file_path}
