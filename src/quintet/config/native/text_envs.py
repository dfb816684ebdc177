"""Configuration of the text environments of RAGEN: bandits, Countdown, questions from files, WebShop."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from quintet.config.native.env_section import EnvProcessesConfig, InteractiveEnvSection, Processes, register_env
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
