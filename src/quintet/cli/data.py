"""`quintet data`: make verifiable tasks, look into data files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from quintet.errors import ConfigError

__all__ = ["app"]

app = typer.Typer(help="Make verifiable tasks, look into data files.", no_args_is_help=True, rich_markup_mode=None)

SOLVED = "solved"
WIDE = 120
"""Characters of a cell."""
Options = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options of the task.")]
Size = Annotated[int, typer.Option(min=0, help="Rows; of `solved`, games.")]


@app.command()
def make(
    task: Annotated[str, typer.Argument(help="`quintet data tasks` lists them; `reasoning_gym:NAME`; `solved`.")],
    out_dir: Annotated[str, typer.Argument(help="Gets train.parquet and validation.parquet.")],
    options: Options = None,
    train: Size = 1000,
    validation: Size = 100,
    seed: Annotated[int, typer.Option(min=0, help="Every draw follows from it; of `solved`, the first game.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Change the time, not the result.")] = 1,
    style: Annotated[str | None, typer.Option(help="Demonstrated answers: `direct`, or `worked` out.")] = None,
    world: Annotated[str | None, typer.Option(help="Of `solved`: sokoban or frozenlake.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    rows: Annotated[int, typer.Option(min=0, help="Show so many of the rows that were made.")] = 0,
) -> None:
    """Make a data set of a task: questions, what is right, and answers to learn from."""
    given, directory = _pairs(options or []), Path(out_dir).expanduser()
    if task == SOLVED:
        games = {"games": train, "validation_games": validation, "seed": seed, "processes": processes}
        made = _solved(world, style, directory, given, games, overwrite=overwrite)
    else:
        from quintet.data.making import make_data

        if world is not None:
            raise ConfigError(f"{task} isn't played in a world", key="--world", value=world, hint="leave it out")
        made = make_data(
            task,
            directory,
            train=train,
            validation=validation,
            seed=seed,
            processes=processes,
            options=given if style is None else {**given, "style": style},
            overwrite=overwrite,
        )
    for split, path in made.items():
        print(f"{path}: {_count(path):,} rows of {split}")
    if rows and made:
        _show(str(next(iter(made.values()))), rows, {}, None)


@app.command()
def tasks() -> None:
    """List the tasks that can be made, and their options."""
    from quintet.data.arithmetic import AdditionOptions, ArithmeticOptions
    from quintet.data.countdown import CountdownOptions
    from quintet.data.tasks import TASKS, TaskOptions

    kinds: dict[str, type[TaskOptions]] = {
        "addition": AdditionOptions,
        "arithmetic": ArithmeticOptions,
        "countdown": CountdownOptions,
    }
    for entry in TASKS:
        missing = f" (needs {entry.install})" if entry.missing() else ""
        print(f"{entry.name}: {entry.help}{missing}")
        for name, field in kinds.get(entry.name, TaskOptions).model_fields.items():
            said = " ".join((field.description or "").split())
            print(f"  {f'{name}={field.default}':<26} {said}")
    print(f"{SOLVED}: games of --world sokoban or frozenlake that an expert won, a row for each move")
    print("  form=message, max_depth=100, think=true, and the options of the world such as size or boxes")


@app.command()
def show(
    file: Annotated[str, typer.Argument(help="Parquet, JSON, JSON Lines or CSV; a pattern or an address too.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Of `data`: prompt_key=question.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="How many of the first.")] = 5,
    model: Annotated[str | None, typer.Option(help="Directory of a tokenizer that counts the prompts' tokens.")] = None,
) -> None:
    """Show rows as a run would read them."""
    _show(file, rows, _pairs(options or []), model)


def _pairs(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` words, values read as YAML does."""
    import yaml

    pairs: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise ConfigError(f"{word} is no KEY=VALUE", value=word, hint="write it as digits=3")
        try:
            pairs[name] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError as error:
            raise ConfigError(f"{word}: its value can't be read", key=name, value=value, hint="quote it") from error
    return pairs


def _solved(
    world: str | None,
    style: str | None,
    directory: Path,
    given: Mapping[str, Any],
    sizes: Mapping[str, int],
    *,
    overwrite: bool,
) -> dict[str, Path]:
    from quintet.config.native.training import SolvedGamesConfig
    from quintet.data.solved import make_solved, world_of
    from quintet.data.tasks import options_of

    if world is None:
        raise ConfigError(f"{SOLVED} needs a world", key="--world", hint="say --world sokoban or frozenlake")
    if style is not None:
        raise ConfigError(f"{SOLVED} has no styles", key="--style", value=style, hint="there is think=false")
    if not all(sizes[name] for name in ("games", "validation_games")):
        raise ConfigError(f"{SOLVED} makes both splits", key="--validation", hint="ask for at least one game of each")
    ours = {name: value for name, value in given.items() if name in {"form", "max_depth"}}
    theirs = {name: value for name, value in given.items() if name not in ours and name != "think"}
    think = given.get("think", True)
    if not isinstance(think, bool):
        raise ConfigError(f"think={think}", key="think", value=think, hint="it is true or false")
    games = options_of(SolvedGamesConfig, {**ours, **sizes}, SOLVED)
    return make_solved(world_of(world, theirs), games, directory, think=think, overwrite=overwrite)


def _count(path: Path) -> int:
    import pyarrow.parquet as pq

    return int(pq.ParquetFile(path).metadata.num_rows)


def _show(file: str, count: int, options: Mapping[str, Any], model: str | None) -> None:
    from rich.table import Table
    from rich.text import Text

    from quintet.cli.plan_table import page
    from quintet.config.native.data import DataConfig
    from quintet.data.source import open_rows
    from quintet.data.tasks import options_of

    config = options_of(DataConfig, {**options, "train_files": [file]}, "data")
    found, _ = open_rows(config.train_files, "FILE", config.cache_dir)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("row", *(["tokens"] if model else ()), "source", "prompt", "truth", "response"):
        table.add_column(title, overflow="fold", justify="right" if title in {"row", "tokens"} else "left")
    for cells in _cells(found, min(count, len(found)), config, model):
        table.add_row(*(Text(cell) for cell in cells))
    with page() as out:
        out.print(Text(f"{len(found):,} rows, columns {', '.join(found[0])}"))
        out.print(table)


def _cells(rows: Any, count: int, config: Any, model: str | None) -> Iterator[list[str]]:
    """Row by row what the table holds, long texts cut short."""
    from quintet.data.prompts import PromptFormat
    from quintet.data.questions import RowReader

    reader, form = RowReader(config), None
    if model is not None:
        from quintet.policies.causal_lm import load_tokenizer

        form = PromptFormat(load_tokenizer(model), config.template, max_tokens=1)
    for number in range(count):
        question = reader.read(rows[number], number, rows.place(number))
        tokens = [] if form is None else [str(len(form.whole(question)))]
        asked = "\n".join(f"{message['role']}: {_short(message['content'])}" for message in question.messages)
        yield [str(number), *tokens, question.source, asked, _short(question.truth), _short(question.response)]


def _short(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= WIDE else f"{text[: WIDE - 1]}…"
