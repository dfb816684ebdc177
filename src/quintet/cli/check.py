"""`quintet check`: whether what a run relies on holds on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from quintet.pipelines.drift import Found

__all__ = ["app"]

app = typer.Typer(help="Check what a run relies on.", no_args_is_help=True, rich_markup_mode=None)

EXAMPLE = 60
"""Characters of a text that is shown as an example."""
ROWS = {
    "tokens": "tokens",
    "probs_diff_max": "|Δ probability|, largest",
    "probs_diff_mean": "|Δ probability|, mean",
    "logprobs_diff_max": "|Δ log-probability|, largest (nats)",
    "logprobs_diff_mean": "|Δ log-probability|, mean (nats)",
    "kl": "KL(engine ‖ learner), k1 (nats)",
    "k3_kl": "KL(engine ‖ learner), k3 (nats)",
    "pearson": "correlation of probabilities",
    "beyond": "share of tokens beyond the limit",
}


@app.callback()
def check() -> None:
    """Check what a run relies on."""


@app.command()
def drift(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="YAML, a run script or a list of key=value; without one, the defaults."),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values set on the way.")] = None,
    dialect: Annotated[str | None, typer.Option("--dialect", help="Whose configuration it is.")] = None,
    unknown_keys: Annotated[str, typer.Option(help="Of another framework's: `refuse`, or `warn`.")] = "refuse",
    games: Annotated[int, typer.Option(help="Games to play, or questions to answer.", min=1)] = 16,
    updates: Annotated[
        int, typer.Option(help="New weights handed to the engine before it is measured again; 0 for once.", min=0)
    ] = 1,
    limit: Annotated[
        float | None,
        typer.Option(
            help="How far apart a token's log-probabilities may be, nats; by itself 1e-4 in float32, 0.05 in float16"
            " and 0.2 in bfloat16.",
            min=0.0,
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(help="Of the tokens, that may be beyond it; by itself 0 in float32, else 0.01.", min=0.0, max=1.0),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the table.")] = False,
) -> None:
    """Play a few games and compare the engine's log-probabilities with the learner's. Exit status 1 where they are too
    far apart."""
    from quintet.cli.choices import check_choices
    from quintet.cli.configuration import compose

    path, words = (None, [config, *(overrides or [])]) if config and "=" in config else (config, list(overrides or []))
    composed = compose(path, words, dialect, unknown_keys)
    check_choices(composed)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers.utils import logging

    from quintet.pipelines.drift import Checked, check_drift

    logging.disable_progress_bar()
    found = check_drift(composed, Checked(games, updates, limit, share))
    if as_json:
        print(json.dumps(found.as_json(), indent=1, ensure_ascii=False))
    else:
        _show(found)
    raise typer.Exit(int(not found.passed))


def _show(found: Found) -> None:
    from rich.console import Console

    console = Console()
    console.print(_table(found))
    for line in _lines(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(found: Found) -> Table:
    from rich.table import Table

    table = Table(title=f"{found.engine} in {found.engine_dtype} against the learner in {found.learner_dtype}")
    table.add_column("")
    for one in found.rounds:
        table.add_column(one.name, justify="right")
    told = [one.drift.as_json() for one in found.rounds]
    for name, label in ROWS.items():
        table.add_row(label, *(_number(each[name]) for each in told))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _lines(found: Found) -> Iterator[str]:
    yield f"policy: {found.policy}; {found.games} games"
    for one in found.rounds:
        worst = one.worst
        told = f"engine {worst.engine:.6g}, learner {worst.learner:.6g} nats"
        yield f"furthest apart {one.name}: token {worst.token} {_short(worst.text)}, turn {worst.turn}: {told}"
    yield from _spelling(found)
    yield from _template(found)
    verdict = "under" if found.passed else "BEYOND"
    beyond = max(one.drift.beyond for one in found.rounds)
    yield (
        f"{verdict} the limit: {beyond:.3g} of the tokens differ by more than {found.limit:g} nats"
        f" (tolerated: {found.share:g})"
    )


def _spelling(found: Found) -> Iterator[str]:
    """What re-encoding would do."""
    spelled = found.respelled
    if spelled.example is None:
        yield f"re-encoding the text of {spelled.of_turns} turns would give the same tokens"
        return
    yield (
        f"re-encoding the text would change the policy's own words in {spelled.turns} of {spelled.of_turns} turns:"
        f" {spelled.own_tokens} of its tokens, {spelled.context_tokens} of the prompts'. Tokens are kept as sampled"
    )
    one = spelled.example
    yield (
        f"  for example, turn {one.turn}: {list(one.tokens)} {_short(spelled.text)} would become"
        f" {list(one.again)} {_short(spelled.again)}"
    )


def _template(found: Found) -> Iterator[str]:
    """Where the chat template isn't followed."""
    templated = found.templated
    if templated is None:
        return
    lines = templated.report.lines()
    yield "chat template: followed to the token" if not lines else "chat template: followed but for"
    yield from (f"  {line}" for line in lines)
    for rule, count in templated.departures.items():
        one = templated.examples[rule]
        told = f"{_short(one.ours)} where the template has {_short(one.template)}"
        yield f"  {rule}, {count} times in these games, for example in turn {one.turn}: {told}"
    if templated.rebuilt < templated.of_turns:
        wrong = templated.of_turns - templated.rebuilt
        yield f"  {wrong} of {templated.of_turns} prompts don't follow from what was said: tokens were lost on the way"


def _short(text: str) -> str:
    return repr(text if len(text) <= EXAMPLE else f"{text[: EXAMPLE // 2]} … {text[-EXAMPLE // 2 :]}")
