"""`quintet data`: generate verifiable tasks and inspect data files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from quintet.cli import robot_data
from quintet.cli.options import key_value_pairs
from quintet.errors import ConfigError

app = typer.Typer(help="Generate verifiable tasks and inspect data files.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(robot_data.app, name="robots")

SOLVED = "solved"
"""Task name for expert demonstrations."""
MAX_CELL_CHARACTERS = 120
Options = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options of the task.")]
Size = Annotated[int, typer.Option(min=0, help="Number of rows; with `solved`, of episodes.")]


@app.command()
def make(
    task: Annotated[str, typer.Argument(help="A task of `quintet data tasks`, `reasoning_gym:NAME` or `solved`.")],
    out_dir: Annotated[str, typer.Argument(help="Directory for train.parquet and validation.parquet.")],
    options: Options = None,
    train: Size = 1000,
    validation: Size = 100,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; with `solved`, the first episode.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Worker processes; the result is the same.")] = 1,
    style: Annotated[
        str | None, typer.Option(help="Style of the demonstrated answers: `direct`, `worked` or `tool`.")
    ] = None,
    env: Annotated[
        str | None, typer.Option(help="Environment of `solved`, one with an expert, such as sokoban.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite existing files.")] = False,
    rows: Annotated[int, typer.Option(min=0, help="Print this many of the generated rows.")] = 0,
) -> None:
    """Generate a data set of a task: prompts, ground truth and demonstrated answers."""
    arguments, directory = key_value_pairs(options or []), Path(out_dir).expanduser()
    if task == SOLVED:
        episodes = {"episodes": train, "validation_episodes": validation, "seed": seed, "processes": processes}
        files = _write_demonstrations(env, style, directory, arguments, episodes, overwrite=overwrite)
    else:
        from quintet.data.tasks.generation import generate_dataset

        if env is not None:
            raise ConfigError(
                f"--env {env}: the task {task} has no environment", key="--env", value=env, hint="remove --env"
            )
        files = generate_dataset(
            task,
            directory,
            train=train,
            validation=validation,
            seed=seed,
            processes=processes,
            options=arguments if style is None else {**arguments, "style": style},
            overwrite=overwrite,
        )
    for split, path in files.items():
        print(f"{path}: {_count(path):,} {split} rows")
    if rows and files:
        _show(str(next(iter(files.values()))), rows, {}, None)


@app.command()
def envs(
    file: Annotated[str, typer.Argument(help="VAGEN's env_config.yaml.")],
    out_dir: Annotated[str, typer.Argument(help="Directory for train.parquet and test.parquet.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite existing files.")] = False,
) -> None:
    """Write start states of environments for data.train_files and data.val_files of VAGEN."""
    from quintet.config.dialects.vagen.env_config_file import read_sections
    from quintet.data.start_state_files import write_start_state_files

    sections = read_sections(Path(file).expanduser())
    for split, path in write_start_state_files(sections, Path(out_dir).expanduser(), overwrite=overwrite).items():
        print(f"{path}: {_count(path):,} {split} rows")


@app.command()
def tasks() -> None:
    """List the available tasks and their options."""
    from quintet.data.tasks.arithmetic import AdditionOptions, ArithmeticOptions
    from quintet.data.tasks.countdown import CountdownOptions
    from quintet.data.tasks.task import TASKS, TaskOptions

    kinds: dict[str, type[TaskOptions]] = {
        "addition": AdditionOptions,
        "arithmetic": ArithmeticOptions,
        "countdown": CountdownOptions,
    }
    for entry in TASKS:
        missing = f" (needs {entry.guide})" if entry.missing() else ""
        print(f"{entry.name}: {entry.help}{missing}")
        for name, field in kinds.get(entry.name, TaskOptions).model_fields.items():
            description = " ".join((field.description or "").split())
            print(f"  {f'{name}={field.default}':<26} {description}")
    print(f"{SOLVED}: expert episodes of --env sokoban or frozenlake, one row per action")
    print("  form=message, max_depth=100, think=true, and the options of the environment such as size or boxes")


@app.command()
def show(
    file: Annotated[str, typer.Argument(help="Parquet, JSON, JSON Lines or CSV file, glob pattern or URL.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of the `data` section, e.g. prompt_key=question."),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows.")] = 5,
    model: Annotated[str | None, typer.Option(help="Directory with a tokenizer that counts prompt tokens.")] = None,
    masks: Annotated[
        bool, typer.Option("--masks", help="Show the tokens of fine-tuning; trained ones are green, and in ⟦ ⟧.")
    ] = False,
) -> None:
    """Show rows as a run reads them."""
    _show(file, rows, _data_keys(options), model, masks=masks)


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="Parquet, JSON, JSON Lines or CSV file, glob pattern or URL.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of the `data` section, e.g. truth_key=answer."),
    ] = None,
    verifier: Annotated[
        str, typer.Option(help="Verifier of all rows; `rules` selects it by their data source.")
    ] = "rules",
) -> None:
    """Check that verifiers can compare with the ground truths of all rows."""
    from quintet.config.native.data import DataConfig, RewardConfig
    from quintet.data.prompt_source import open_rows
    from quintet.data.row_reader import RowReader
    from quintet.data.tasks.task import parse_options
    from quintet.rewards.data_sources import KIND_KEY
    from quintet.rewards.ground_truths import check_rows

    config = parse_options(DataConfig, {**_data_keys(options), "train_files": [file]}, "data")
    rows, _ = open_rows(config.train_files, "FILE", config.cache_dir)
    reader = RowReader(config)
    prompt_rows = (reader.read(rows[number], number, rows.describe_row(number)) for number in range(len(rows)))
    try:
        count = check_rows(prompt_rows, RewardConfig(kind=verifier, function_arguments={}), math.inf)
    except ConfigError as error:
        if error.key != KIND_KEY:
            raise
        hint = "--verifier NAME (`quintet list` shows them), or source_key=COLUMN"
        message = error.message.replace(f"{KIND_KEY} = {verifier!r}", f"--verifier = {verifier}")
        raise ConfigError(message, key="--verifier", value=verifier, hint=hint) from error
    print(f"{count:,} of {len(rows):,} rows have a verifier, and a ground truth that it can compare with")


def _data_keys(options: Sequence[str] | None) -> dict[str, Any]:
    """Return keys of the section `data`, which may be written with or without its name."""
    return {name.removeprefix("data."): value for name, value in key_value_pairs(options or []).items()}


def _write_demonstrations(
    env: str | None,
    style: str | None,
    directory: Path,
    arguments: Mapping[str, Any],
    sizes: Mapping[str, int],
    *,
    overwrite: bool,
) -> dict[str, Path]:
    from quintet.config.native.training import SolvedEpisodesConfig
    from quintet.data.demonstration_rows import parse_env_config, write_demonstration_rows
    from quintet.data.tasks.task import parse_options

    if env is None:
        raise ConfigError(
            f"{SOLVED} requires an environment", key="--env", hint="add --env sokoban or --env frozenlake"
        )
    if style is not None:
        raise ConfigError(
            f"--style {style}: {SOLVED} has no styles",
            key="--style",
            value=style,
            hint="remove --style; think=false omits the thoughts",
        )
    if not all(sizes[name] for name in ("episodes", "validation_episodes")):
        raise ConfigError(
            f"{SOLVED} writes both splits", key="--validation", hint="set --train and --validation to at least 1"
        )
    demonstration_options = {name: value for name, value in arguments.items() if name in {"form", "max_depth"}}
    env_options = {
        name: value for name, value in arguments.items() if name not in demonstration_options and name != "think"
    }
    think = arguments.get("think", True)
    if not isinstance(think, bool):
        raise ConfigError(f"think={think} is not a boolean", key="think", value=think, hint="valid: true or false")
    episodes = parse_options(SolvedEpisodesConfig, {**demonstration_options, **sizes}, SOLVED)
    return write_demonstration_rows(
        parse_env_config(env, env_options), episodes, directory, think=think, overwrite=overwrite
    )


def _count(path: Path) -> int:
    import pyarrow.parquet as pq

    return int(pq.ParquetFile(path).metadata.num_rows)


def _show(file: str, count: int, options: Mapping[str, Any], model: str | None, *, masks: bool = False) -> None:
    from rich.table import Table
    from rich.text import Text

    from quintet.cli.tables import page
    from quintet.config.native.data import DataConfig
    from quintet.data.prompt_source import open_rows
    from quintet.data.row_forms import describe_form
    from quintet.data.tasks.task import parse_options

    config = parse_options(DataConfig, {**options, "train_files": [file]}, "data")
    file_rows, _ = open_rows(config.train_files, "FILE", config.cache_dir)
    count = min(count, len(file_rows))
    forms = dict.fromkeys(describe_form(config, file_rows[number]) for number in range(max(1, count)))
    read_as = Text(f"read as {'; '.join(forms)}")
    if masks:
        from quintet.cli.loss_masks import iter_masks

        with page() as out:
            out.print(read_as)
            for line in iter_masks(file_rows, count, config, model):
                out.print(line, soft_wrap=True)
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("row", *(["tokens"] if model else ()), "source", "prompt", "truth", "response"):
        table.add_column(title, overflow="fold", justify="right" if title in {"row", "tokens"} else "left")
    for cells in _cells(file_rows, count, config, model):
        table.add_row(*(Text(cell) for cell in cells))
    with page() as out:
        out.print(Text(f"{len(file_rows):,} rows, columns {', '.join(file_rows[0])}"))
        out.print(read_as)
        out.print(table)


def _cells(rows: Any, count: int, config: Any, model: str | None) -> Iterator[list[str]]:
    """Yield the cells of each row; long texts are shortened."""
    from quintet.data.prompt_format import PromptFormat
    from quintet.data.row_reader import RowReader

    reader, form = RowReader(config), None
    if model is not None:
        from quintet.cli.model_downloads import downloaded_model
        from quintet.config.native.policy import VisionConfig
        from quintet.policies.model_loading import load_tokenizer
        from quintet.rollout.chat.image_prompts import ImagePrompts

        model = downloaded_model(model)
        images = ImagePrompts.from_directory(model, VisionConfig())
        form = PromptFormat(load_tokenizer(model), config.template, max_tokens=1, images=images)
    for number in range(count):
        location = rows.describe_row(number)
        prompt_row = reader.read(rows[number], number, location)
        shown = reader.images(rows[number], location, rows.directory(number))
        tokens = [] if form is None else [str(len(form.untruncated_tokens(prompt_row, location, shown)))]
        prompt = "\n".join(f"{message['role']}: {_shorten(message['content'])}" for message in prompt_row.messages)
        yield [
            str(number),
            *tokens,
            prompt_row.data_source,
            prompt,
            _shorten(prompt_row.ground_truth),
            _shorten(prompt_row.response),
        ]


def _shorten(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= MAX_CELL_CHARACTERS else f"{text[: MAX_CELL_CHARACTERS - 1]}…"
