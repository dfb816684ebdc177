"""Prompts from files, what judges the answers, and answers that were stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from quintet.config.capability import Capability, Waits
from quintet.config.native.section import Count, NonNegative, Section, Share, Texts

__all__ = [
    "DataConfig",
    "EvaluationConfig",
    "JudgeConfig",
    "OverlongConfig",
    "RewardConfig",
    "RewardModelConfig",
]

Weights = Annotated[tuple[PositiveFloat, ...], Field(strict=False)]
Counts = Annotated[tuple[PositiveInt, ...], Field(strict=False)]


class DataConfig(Section):
    """Prompts from files."""

    kind: Annotated[
        Literal["prompts", "conversations", "demonstrations"], Waits(Capability.EMBODIED, lacks=("demonstrations",))
    ] = "prompts"
    """What a row holds: a prompt to be answered, a conversation to be imitated, or a robot's movements."""
    train_files: Texts = ()
    """Parquet, JSON, JSON Lines or CSV, one file or many; patterns such as `data/*.jsonl`, and addresses such as
    `hdfs://…` that fsspec reads."""
    validation_files: Texts = ()
    """Held-out prompts; none given takes the training files."""
    weights: Weights = ()
    """Share of each training file in what is drawn, in their order; none given draws from all rows alike."""
    prompt_key: str = "prompt"
    """Column of the prompt: chat messages, or text. A dot leads into a mapping, `extra_info.question`."""
    messages_key: str | None = None
    """Column of a whole conversation, in place of `prompt_key`; messages, or their JSON. One that ends with an answer
    shows how to answer."""
    response_key: str | None = None
    """Column of a demonstrated answer, to imitate; null takes `response`, `answer` or `solution` where there is
    one."""
    source_key: str = "data_source"
    """Column that says which rules judge; rows without it are judged by `reward.kind`."""
    truth_key: str = "reward_model"
    """Column of what is right: a mapping with `ground_truth`, or the answer itself; without such a column
    `ground_truth`, `answer`, `solution`, `solutions`, `target` or `label` is looked for."""
    extra_key: str = "extra_info"
    """Column of what a reward function is told besides; rows without it hand over their other columns."""
    system_prompt: str | None = None
    """System message of rows that have none."""
    template: str | None = None
    """How messages become text: `chatml`, `qwen2_5`, `qwen3`, `llama3`, a `.jinja` file or a Jinja template itself,
    `none` for the bare text; null or `native` takes the tokenizer's chat template."""
    image_key: Annotated[str | None, Waits(Capability.VISION, ("images",))] = None
    """Column of pictures, in rows that have it; null for none."""
    shuffle: bool = True
    """Rows come in a random order, anew in each pass."""
    validation_shuffle: bool = False
    """So do held-out rows."""
    seed: Count | None = None
    """Of that order; null takes the run's."""
    workers: Count = 0
    """Processes that make the prompts of coming rows; 0 makes them where they are used."""
    filter_long_prompts: bool = False
    """Rows whose prompt is longer than `rollout.max_prompt_tokens` are left out."""
    filter_workers: PositiveInt = 1
    """Processes that look for them."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What is cut off a prompt of more than `rollout.max_prompt_tokens`: its beginning, its end or its middle;
    `error` ends the run."""
    keep_raw_tokens: bool = False
    """Rows keep the prompt's tokens before padding: reward functions find them in `extra_info` as
    `raw_prompt_ids`."""
    keep_messages: bool = False
    """Rows keep the chat messages, as `raw_prompt` there."""
    keep_text: bool = False
    """Rows keep the prompt as text, with the chat template applied, as `full_prompts` there."""
    dataset_class: str | None = None
    """A data set of your own, `file.py:Class`: `Class(data_files, tokenizer, config)`, with `len()` and rows by
    number, each a mapping as a file's row is."""
    cache_dir: str | None = None
    """Where large tables lie in a form that is read row by row; null takes the user's cache directory."""
    train_rows: PositiveInt | None = None
    """Rows that are drawn once by the seed, and no others used; null takes all."""
    validation_rows: PositiveInt | None = None
    """The first so many held-out rows; null takes all."""
    validation_batch: PositiveInt | None = None
    """Held-out prompts at a time; null takes all at once."""
    epochs: PositiveInt | None = None
    """Passes over the rows, where `training.steps` follows from them; null where it doesn't."""
    max_steps: Count | None = None
    """Steps at most, where they follow from the rows; null sets no limit."""


class RewardModelConfig(Section):
    """A model that judges answers: a sequence classifier whose only output is the score."""

    path: str | None = None
    """Its directory; null takes the policy's."""
    tokenizer: str | None = None
    """Tokenizer of the policy, where it isn't the reward model's own: question and answer become one conversation
    under the reward model's chat template. null hands over the prompt and the answer as the policy saw and wrote
    them."""
    external_libs: Texts = ()
    """Modules that are imported before the model is loaded."""
    trust_remote_code: bool = False
    """Run code that lies in the model's directory."""
    max_tokens: PositiveInt | None = None
    """Question and answer beyond it lose their end; null takes prompt and reply."""
    sequences_per_pass: PositiveInt | None = None
    """Answers that are judged in one forward pass on one device; null takes as many as fill 16,384 tokens."""
    min_sharded_parameters: Annotated[Count, Waits(Capability.CLUSTER)] = 0
    """Modules with at least so many parameters are sharding units of their own."""
    offload_parameters: bool = False
    """Weights move to the CPU while others compute."""


class JudgeConfig(Section):
    """A language model that is asked for a verdict, through any endpoint that speaks OpenAI's protocol."""

    url: Annotated[str, Field(pattern=r"^https?://[^/]")]
    """Its base, such as `http://127.0.0.1:8000/v1`."""
    model: str
    """Which of its models."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with its key; it may be unset."""
    prompt: str | None = None
    """What it is asked, with `{question}`, `{answer}` and `{truth}`; null takes a plain question for a score from
    0 to 10. Its reply must hold `[[7]]`, out of 10, `[[4/5]]` or `[[yes]]`."""
    max_tokens: PositiveInt = 512
    """Tokens of one verdict."""
    temperature: NonNegative = 0.0
    """Of its sampling."""
    concurrent: PositiveInt = 16
    """Requests under way at a time."""
    retries: Count = 2
    """Further attempts after a failed request."""
    timeout_seconds: PositiveFloat = 60.0
    """Time for one reply."""


class OverlongConfig(Section):
    """DAPO's soft penalty for answers that come near to the longest allowed."""

    buffer: PositiveInt
    """Tokens before the longest reply, `rollout.max_response_tokens`, over which the penalty grows from 0 to
    `penalty`."""
    penalty: NonNegative = 1.0
    """What is taken off the longest."""


class RewardConfig(Section):
    """What judges an answer."""

    kind: str = "rules"
    """Which rules: `math`, `gsm8k`, `countdown`, `code`, … (`quintet list`); `rules` asks each row for its own."""
    manager: Literal["naive", "prime", "batch", "dapo", "gdpo", "rate_limited", "remote"] = "naive"
    """Who calls the rules: one answer after another (`naive`; `gdpo` alike; `dapo` with `overlong` and without marks
    of the end), in as many processes as there are cores (`prime`; `remote` at an address; `rate_limited` with pauses),
    or all answers at once (`batch`)."""
    function: str | None = None
    """Rules of your own, `file.py:function`: called with `data_source`, `solution_str`, `ground_truth` and
    `extra_info` (`batch`: lists under `data_sources` and so on); gives a number, or a mapping with `score` and whatever
    else is to be logged. An address, `http://…`, is asked the same in JSON."""
    function_arguments: Annotated[dict[str, Any], Field(default_factory=dict)]
    """What the function is given besides."""
    scale: float = 1.0
    """Factor on every reward."""
    worst: float = 0.0
    """Reward of an answer that is quite wrong, where 1 is that of a right one; before `scale`. Scores of your own
    function are taken as they are; there it is the reward of an answer that couldn't be judged."""
    format: Literal["think_answer", "answer_tag", "boxed"] | None = None
    """Form that an answer must have for `format_reward`; null asks for none."""
    format_reward: NonNegative = 0.0
    """Added to the reward of an answer of that form."""
    overlong: OverlongConfig | None = None
    """Penalty for long answers; null for none."""
    timeout_seconds: PositiveFloat = 10.0
    """Time for one answer; then its process is killed and the answer has failed."""
    workers: PositiveInt | None = None
    """Processes that judge; null takes one for `naive`, `batch`, `dapo` and `gdpo`, and as many as there are cores for
    the others. While answers are slow, rules that aren't your own get up to 16 more."""
    requests_per_minute: PositiveInt | None = None
    """Calls that `rate_limited` makes at most, evenly spaced; null sets no limit."""
    max_failed_share: Share = 0.5
    """Share of a step's answers whose judgement fails that ends the run when it is passed; failed answers count as
    quite wrong."""
    model: RewardModelConfig | None = None
    """null judges by rules alone; else the model's score takes the place of theirs in training."""
    judge: JudgeConfig | None = None
    """null asks no language model; else its verdict takes the place of the rules'."""

    @model_validator(mode="after")
    def _one_judge(self) -> Self:
        if self.model is not None and self.judge is not None:
            raise ValueError("give either `model` or `judge`: set the other to null")
        return self

    @model_validator(mode="after")
    def _nothing_idle(self) -> Self:
        """What would have no effect is refused."""
        if self.format_reward and self.format is None:
            raise ValueError("`format_reward` needs `format`, the form that it is for")
        if self.requests_per_minute and self.manager != "rate_limited":
            raise ValueError("`requests_per_minute` is kept by `manager: rate_limited` only")
        if self.function_arguments and self.function is None:
            raise ValueError("`function_arguments` needs `function`, which they are given to")
        return self


class EvaluationConfig(Section):
    """Answers that were stored, to be judged."""

    path: str
    """Parquet, JSON, JSON Lines or CSV file with prompts, answers and what they are judged by."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    response_key: str = "responses"
    """Column of the answers: a list of texts, or one text."""
    source_key: str = "data_source"
    """Column that says which rules judge."""
    truth_key: str = "reward_model"
    """Column of what is right."""
    function: str | None = None
    """Rules of your own, `file.py:function`; null takes those of each row's source."""
    samples: Counts = (1, 2, 4, 8)
    """Numbers k for pass@k and maj@k; those beyond the answers of a prompt are left out."""
    right_from: float = 1.0
    """`acc`, or the score where rules give none, from which an answer counts as right for pass@k."""
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    """Of the intervals around means."""
