"""Prompts from files, scoring of responses, stored responses, and their generation."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from quintet.config.native.section import (
    AllowsCode,
    Count,
    ListOf,
    NonNegative,
    NotEmpty,
    PositiveShare,
    RunsCode,
    Section,
    Share,
    Texts,
    UnitInterval,
)

DEFAULT_VALIDATION_ROWS = 256
"""Training rows of a validation without validation files; as many as `validation.episodes` by default."""


class DomainConfig(Section):
    """Prompts of one domain."""

    sources: Texts = ()
    """Data sources of its rows, `data.source_key`; `*` stands for any text. If several domains have the source of
    a row, it belongs to one that names it without `*`, or else to the first."""
    share: Share
    """Share of the prompts of a step; their number is rounded down, and the last domain gets the rest. 0 scores rows
    of the domain, but trains on none."""


class DataConfig(Section):
    """Prompts, or conversations to imitate, from files. Demonstrations of robots are `warm_start.files`."""

    train_files: Texts = ()
    """Parquet, JSON, JSON Lines or CSV files; glob patterns such as `data/*.jsonl`, and fsspec URLs such as
    `hdfs://…`."""
    validation_files: Texts = ()
    """Held-out files; an empty list uses the training files."""
    weights: ListOf[PositiveFloat] = ()
    """Sampling weight of each training file, in their order; an empty list samples all rows equally."""
    domains: dict[str, DomainConfig] = {}  # noqa: RUF012 - pydantic copies it
    """Domains by name: a step trains on a fixed number of prompts of each, advantages are computed for each domain by
    itself, and its name replaces the data source of its rows. Rows of no domain are not trained on."""
    domain_key: str = "domain"
    """Column with the name of a row's domain; rows without it are assigned by `domains.NAME.sources`."""
    prompt_key: str = "prompt"
    """Column of the prompt: chat messages, or text. Dots select inside a mapping: `extra_info.question`."""
    messages_key: str | None = None
    """Column of a whole conversation, in place of `prompt_key`: messages, or their JSON. A final assistant message is a
    demonstration."""
    response_key: str | None = None
    """Column of a demonstrated response, text or messages; null looks for `response`, `completion`, `answer`,
    `solution` or `output`."""
    tools_key: str | None = "tools"
    """Column with the tools of a conversation in fine-tuning, which the chat template describes: a list of OpenAI's
    tools, or its JSON. Rows may lack it. null reads none."""
    thinking_key: str | None = "enable_thinking"
    """Column that sets the chat template's option `enable_thinking` for a row in fine-tuning. Rows may lack it. null
    reads none."""
    source_key: str = "data_source"
    """Column with the data source, which selects the verifier; rows without it use `reward.kind`."""
    truth_key: str = "reward_model"
    """Column of the ground truth: a mapping with `ground_truth`, or the answer; without that column `ground_truth`,
    `answer`, `solution`, `solutions`, `target` or `label` is used."""
    extra_key: str = "extra_info"
    """Column of further arguments for reward functions; rows without it pass on their other columns."""
    agent_loop: Literal["single_turn_agent", "tool_agent"] | None = None
    """How rows that do not name it are answered: by one response, or by responses that may call the tools of
    `rollout.tool_calls`; null calls tools if there are any."""
    agent_loop_key: str | None = "agent_name"
    """Column that names it for a row, as under verl; rows may lack it. null reads none."""
    system_prompt: str | None = None
    """System message for rows without one."""
    template: str | None = None
    """Chat template: `chatml`, `hermes` (ChatML with tools), `qwen2_5`, `qwen3`, `llama3`, a `.jinja` file or a Jinja
    template, `none` for plain text; null or `native` takes the tokenizer's, `native_thinking` and `native_nonthinking`
    with its option `enable_thinking`."""
    image_key: str | None = None
    """Column with the images of a row, for which its messages have the placeholder `<image>`; null for none. Rows may
    lack the column `images`, as under verl, but none of another name."""
    shuffle: bool = True
    """Shuffle rows in each epoch."""
    validation_shuffle: bool = False
    """Shuffle held-out rows."""
    seed: Count | None = None
    """Seed of the shuffling; null uses `seed`."""
    workers: Count = 0
    """Processes that prepare prompts in advance; 0 prepares them in the main process."""
    filter_long_prompts: bool = False
    """Drop rows whose prompt exceeds `rollout.max_prompt_tokens`."""
    filter_workers: PositiveInt = 1
    """Processes for that filter."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """Truncation of prompts that exceed `rollout.max_prompt_tokens`: their beginning, end or middle is removed; `error`
    ends the run, and so does a truncation that would remove an image."""
    keep_raw_tokens: bool = False
    """Pass the token ids of the prompt to reward functions, as `raw_prompt_ids` in `extra_info`."""
    keep_messages: bool = False
    """Pass the chat messages to reward functions, as `raw_prompt` in `extra_info`."""
    keep_text: bool = False
    """Pass the prompt as text, chat template applied, to reward functions, as `full_prompts` in `extra_info`."""
    dataset_class: Annotated[str | None, RunsCode()] = None
    """Custom dataset, `file.py:Class`: `Class(data_files, tokenizer, config)` with `len()` and rows by index, each a
    mapping like a row of a file."""
    check: Literal["columns", "all"] = "columns"
    """What is checked of the rows of fine-tuning before the first step: that they have the columns, types and roles, or
    `all`: every row is encoded as well. With `columns`, a row that the chat template refuses ends the run when a step
    needs it."""
    cache_dir: str | None = None
    """Directory for memory-mapped copies of large tables; null uses the user cache directory."""
    train_rows: PositiveInt | None = None
    """Number of randomly selected training rows; null uses all."""
    validation_rows: PositiveInt | None = None
    """Number of first held-out rows; null uses all, or a sample of 256 training rows if there are no validation
    files."""
    validation_batch: PositiveInt | None = None
    """Held-out prompts per batch; null uses all at once."""
    epochs: PositiveInt | None = None
    """Epochs over the rows, which set the number of steps; null leaves that to `training.steps`."""
    max_steps: Count | None = None
    """Maximum steps with `epochs`; null sets no limit."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.domains and self.weights:
            yield "`domains` and `weights` exclude each other", "weights=[]", "domains={}"
        shares = sum(domain.share for domain in self.domains.values())
        if self.domains and not 0.0 < shares <= 1.0 + 1e-6:
            yield f"the shares of `domains` sum to {shares:g}, and not to 1", "domains={}"

    @property
    def validates_on_training_rows(self) -> bool:
        """Whether there are no held-out files."""
        return not self.validation_files

    def prompts_per_domain(self, prompts_per_step: int) -> dict[str, int]:
        """Return the number of prompts of each domain in a step."""
        counts = {name: int(domain.share * prompts_per_step) for name, domain in self.domains.items()}
        trained = [name for name, domain in self.domains.items() if domain.share]
        if trained:
            counts[trained[-1]] += prompts_per_step - sum(counts.values())
        return counts

    def domain_of(self, source: str) -> str | None:
        """Return the domain of rows of a data source, None if no domain has it."""
        for matches in (str.__eq__, fnmatchcase):
            for name, domain in self.domains.items():
                if any(matches(source, pattern) for pattern in domain.sources):
                    return name
        return None


class RewardModelConfig(Section):
    """Reward model: a sequence classifier with one output."""

    path: str | None = None
    """Model directory; null uses that of the policy."""
    tokenizer: str | None = None
    """Set this to the policy's tokenizer if the reward model has a different one: prompt and response are then decoded
    and formatted with the reward model's chat template. null passes the token ids of the policy."""
    external_libs: Annotated[Texts, RunsCode()] = ()
    """Python modules that are imported before the model is loaded."""
    trust_remote_code: AllowsCode = False
    """Run Python code from the model directory."""
    max_tokens: PositiveInt | None = None
    """Maximum tokens of prompt and response, which are truncated from the right; null uses the sum of their limits."""
    sequences_per_pass: PositiveInt | None = None
    """Sequences per forward pass and device; null uses as many as fit into 16,384 tokens."""
    min_sharded_parameters: Count = 0
    """Shard the weights over the ranks of the actor, or of `placement.reward.devices`, and gather modules with at least
    so many parameters together. 0 keeps whole copies."""
    offload_parameters: bool = False
    """Offload weights to host memory while other components compute."""


class ChatRequestConfig(Section):
    """Requests to an OpenAI-compatible endpoint."""

    key_variable: str = "OPENAI_API_KEY"
    """Environment variable with the API key; it may be unset."""
    max_tokens: PositiveInt | None = 512
    """Maximum tokens of a reply; null leaves it to the endpoint."""
    temperature: NonNegative | None = 0.0
    """Sampling temperature; null leaves it to the endpoint."""
    concurrent: PositiveInt = 16
    """Maximum concurrent requests."""
    retries: Count = 2
    """Retries after a failed request."""
    timeout_seconds: PositiveFloat = 60.0
    """Timeout of a request, seconds."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of a request."""
        fields = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return {name: value for name, value in fields.items() if value is not None}


EndpointUrl = Annotated[str, Field(pattern=r"^https?://[^/]")]


class JudgeServerConfig(Section):
    """Servers of a judge's model that the run starts, one on each of `devices`. If components take turns
    (`placement.colocated`), they leave the devices' memory to the others while there is nothing to judge."""

    path: str
    """Model directory."""
    engine: Literal["hf", "vllm", "sglang"] = "hf"
    """Engine, as in `rollout.engine`."""
    devices: ListOf[Count] | None = None
    """Global device numbers, on nodes with a device of the actor; null uses the first device of the actor."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights."""
    template: str | None = None
    """Chat template, as in `data.template`; null uses that of the model."""
    max_model_tokens: Annotated[int, Field(ge=2)] | None = None
    """Maximum tokens of prompt and reply; null leaves room for the longest prompt and response of the run, the reply
    and 1,024 other tokens, as far as the model supports these."""
    memory_share: PositiveShare | None = None
    """Share of the device's memory, as in `rollout.engine_options.memory_share`."""
    arguments: Annotated[dict[str, Any], Field(default_factory=dict), RunsCode()]
    """Further arguments of vLLM or SGLang, as in `rollout.engine_options.arguments`."""


class JudgeConfig(ChatRequestConfig):
    """LLM judge behind an OpenAI-compatible endpoint, or on servers that the run starts."""

    url: EndpointUrl | None = None
    """Base URL, such as `http://127.0.0.1:8000/v1`; null starts `server`."""
    model: str | None = None
    """Name of the model in requests to `url`."""
    server: JudgeServerConfig | None = None
    """Servers to start; null uses `url`."""
    prompt: str | None = None
    """Prompt with `{question}` or `{last_message}`, the last message of the prompt, `{answer}` and `{truth}`; null asks
    for a verdict of the kind of `verdict`."""
    verdict: Literal["score", "yes_no"] = "score"
    """Reading of the reply, after its thoughts. `score`: `[[7]]`, out of 10, `[[4/5]]`, `[[yes]]`, `Score: 7`, or JSON.
    `yes_no`: yes or no as its first word, its last line, behind a label such as `Verdict:`, or in JSON. A reply without
    a verdict is a failure."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling; 1 leaves it to the endpoint."""
    top_k: Count = 0
    """Number of likeliest tokens that are sampled from; 0 leaves it to the endpoint."""

    @property
    def sampling(self) -> dict[str, Any]:
        fields = super().sampling
        fields |= {} if self.top_p == 1.0 else {"top_p": self.top_p}
        return fields | ({"top_k": self.top_k} if self.top_k else {})

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        with_model = "server=null" if self.model else "server=null model=NAME"
        if self.server is None and self.url is None:
            yield (
                "it has neither `url` nor `server`",
                "url=http://127.0.0.1:8000/v1 model=NAME",
                "server.path=DIRECTORY",
            )
        elif self.server is not None and self.url is not None:
            yield "`url` and `server` exclude each other", with_model, "url=null model=null"
        elif self.url is not None and self.model is None:
            yield "`url` needs `model`", "model=NAME"
        elif self.server is not None and self.model is not None:
            yield "the server has one model, and `model` would have no effect", "model=null"


class OverlongConfig(Section):
    """DAPO's soft penalty for long responses. Their length is the number of sampled tokens of all turns, without
    replies of tools and users."""

    buffer: PositiveInt
    """Tokens before `rollout.max_response_tokens` over which the penalty grows from 0 to `penalty`."""
    penalty: NonNegative = 1.0
    """Penalty of a response of maximum length."""


class VerifierConfig(Section):
    """Verifier of the rows of a data source."""

    kind: str = "rules"
    """Verifier, as in `reward.kind`."""
    arguments: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Options of the verifier."""
    judge: JudgeConfig | None = None
    """LLM judge in place of `kind`; null uses none."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.judge is not None and (self.kind != "rules" or self.arguments):
            yield "the judge scores the rows, and `kind` would have no effect", "judge=null", "kind=rules arguments={}"


class RewardConfig(Section):
    """Scoring of responses."""

    kind: str = "rules"
    """Verifier: `math`, `gsm8k`, `countdown`, `code`, … (`quintet list`); `rules` selects it by each row's data
    source."""
    verifiers: dict[str, VerifierConfig] = {}  # noqa: RUF012 - pydantic copies it
    """Verifiers of certain data sources, or of domains of `data.domains`, by their names; other rows use `kind`."""
    manager: Literal["naive", "prime", "batch", "dapo", "gdpo", "rate_limited", "remote"] = "naive"
    """Calls of the verifier: one response after another (`naive`; also `gdpo`, and `dapo` with `overlong` and without
    end-of-sequence tokens), in one process per core (`prime`; `remote` with a URL; `rate_limited` with a rate limit),
    or all responses in one call (`batch`)."""
    function: Annotated[str | None, RunsCode()] = None
    """Custom reward function, `file.py:function`, called with `data_source`, `solution_str`, `ground_truth` and
    `extra_info` (`batch`: lists under `data_sources` and so on). It returns a number, or a mapping with `score` and
    further values to log. A URL, `http://…`, receives the same as JSON."""
    function_arguments: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Further keyword arguments of the function, or options of the verifier `kind`."""
    scale: float = 1.0
    """Factor on every reward."""
    wrong_reward: float = 0.0
    """Reward of a wrong answer, before `scale`; a right one has 1. Scores of a custom function are not changed; there
    it is the reward of a response that could not be scored."""
    format: Literal["think_answer", "answer_tag", "boxed"] | None = None
    """Format that `format_reward` requires; null for none."""
    format_reward: NonNegative = 0.0
    """Added to the reward of a response in that format."""
    overlong: OverlongConfig | None = None
    """Penalty for long responses; null for none."""
    timeout_seconds: PositiveFloat = 10.0
    """Time limit per response, seconds; then its process is killed and scoring has failed."""
    workers: PositiveInt | None = None
    """Number of scoring processes; null uses one for `naive`, `batch`, `dapo` and `gdpo`, and one per core for the
    others. Built-in verifiers get up to 16 more while scoring is slow."""
    requests_per_minute: PositiveInt | None = None
    """Maximum calls per minute of `rate_limited`, evenly spaced; null sets no limit."""
    max_failed_share: Share = 0.5
    """Share of responses of a step whose scoring may fail before the run ends; they count as wrong."""
    model: RewardModelConfig | None = None
    """Reward model, whose score replaces that of the verifier in training; null uses none."""
    judge: JudgeConfig | None = None
    """LLM judge, whose score replaces that of the verifier; null uses none."""

    @property
    def judge_devices(self) -> frozenset[int]:
        """Global numbers of the devices of the servers of judges."""
        servers = (judge.server for judge in self.judges.values())
        return frozenset(device for server in servers if server is not None for device in server.devices or ())

    @property
    def judges(self) -> dict[str, JudgeConfig]:
        """Judges by their sections: `judge` or `verifiers.NAME.judge`."""
        sections = {"judge": self.judge} | {
            f"verifiers.{name}.judge": each.judge for name, each in self.verifiers.items()
        }
        return {section: judge for section, judge in sections.items() if judge is not None}

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.model is not None and self.judge is not None:
            yield "`model` and `judge` exclude each other", "model=null", "judge=null"
        if self.verifiers and self.function is not None:
            yield "`verifiers` and `function` exclude each other", "function=null", "verifiers={}"
        if self.model is not None and any(verifier.judge for verifier in self.verifiers.values()):
            yield "the reward model scores all rows, and judges of `verifiers` would have no effect", "model=null"
        if self.verifiers and self.judge is not None:
            yield "the judge scores all rows, and `verifiers` would have no effect", "judge=null", "verifiers={}"
        if self.format_reward and self.format is None:
            formats = (f"format={name}" for name in ("think_answer", "answer_tag", "boxed"))
            yield "`format_reward` needs `format`", *formats, "format_reward=0"
        if self.requests_per_minute and self.manager != "rate_limited":
            yield "`requests_per_minute` needs another `manager`", "manager=rate_limited", "requests_per_minute=null"
        if self.function_arguments and self.function is None and self.kind == "rules":
            problem = "`function_arguments` needs a function, or a `kind` with options"
            yield problem, "function=FILE.py:FUNCTION", "function_arguments={}"


class EvaluationConfig(Section):
    """Scoring of stored responses."""

    path: str
    """Parquet, JSON, JSON Lines or CSV file with prompts, responses and ground truth."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    response_key: str = "responses"
    """Column of the responses: a list of texts, or one text."""
    source_key: str = "data_source"
    """Column of the data source, which selects the verifier."""
    truth_key: str = "reward_model"
    """Column of the ground truth."""
    function: Annotated[str | None, RunsCode()] = None
    """Custom reward function, `file.py:function`; null uses the verifier of each row's data source."""
    samples: ListOf[PositiveInt] = (1, 2, 4, 8)
    """Values of k for pass@k and maj@k; those above the number of responses are left out."""
    pass_threshold: float = 1.0
    """Minimum `acc`, or score if there is none, of a correct response for pass@k."""
    confidence: UnitInterval = 0.95
    """Confidence level of intervals around means."""


class GenerationConfig(Section):
    """Responses to the prompts of `data.train_files`, sampled as `rollout` says."""

    output_path: Annotated[str, Field(pattern=r"\.(parquet|jsonl)$")]
    """Parquet or JSON Lines file, written when all responses are there: the rows of the prompts with their
    responses."""
    response_key: NotEmpty = "responses"
    """Column of the responses, a list of texts. It replaces a column of this name."""
    samples: PositiveInt = 1
    """Responses to each prompt."""
    batch_size: PositiveInt = 512
    """Prompts that the engines answer together. After each batch its responses are stored: an interrupted run repeats
    at most one."""
