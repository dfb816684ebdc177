"""`quintet check`: diagnostics of a configuration on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from quintet.cli.options import (
    Config,
    DialectName,
    IgnoreForkKeys,
    Overrides,
    Release,
    UnknownKeys,
    split,
    unknown_key_policy,
    with_release,
)

if TYPE_CHECKING:
    from rich.table import Table

    from quintet.pipelines.drift_check import DriftReport

app = typer.Typer(help="Run diagnostics.", no_args_is_help=True, rich_markup_mode=None)

MAX_EXAMPLE_CHARACTERS = 60
ROWS = {
    "tokens": "tokens",
    "probs_diff_max": "|Δ probability|, max",
    "probs_diff_mean": "|Δ probability|, mean",
    "logprobs_diff_max": "|Δ log-prob|, max (nats)",
    "logprobs_diff_mean": "|Δ log-prob|, mean (nats)",
    "kl": "KL(engine ‖ learner), k1 (nats)",
    "k3_kl": "KL(engine ‖ learner), k3 (nats)",
    "pearson": "correlation of probabilities",
    "share_above_limit": "share of tokens above the limit",
}


@app.callback()
def check() -> None:
    """Run diagnostics."""


@app.command()
def drift(
    config: Config = None,
    overrides: Overrides = None,
    dialect: DialectName = None,
    release: Release = None,
    unknown_keys: UnknownKeys = "refuse",
    ignore_fork_keys: IgnoreForkKeys = False,
    episodes: Annotated[int, typer.Option(help="Episodes to generate, or prompts to answer.", min=1)] = 16,
    updates: Annotated[
        int, typer.Option(help="Learner updates and weight syncs, each followed by another measurement.", min=0)
    ] = 1,
    limit: Annotated[
        float | None,
        typer.Option(
            help="Maximum log-prob difference of a token in nats (default: 1e-4 in float32, 0.05 in float16, 0.2 in"
            " bfloat16).",
            min=0.0,
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            help="Tolerated share of tokens above the limit (default: 0 in float32, else 0.01).", min=0.0, max=1.0
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare the log-probs of engine and learner on a few episodes; exit with status 1 if they differ too much."""
    from quintet.cli.choices import check_choices
    from quintet.cli.configuration import load_config
    from quintet.cli.messages import warn
    from quintet.cli.model_downloads import with_downloaded_models
    from quintet.cli.transformers_setup import silence_transformers

    policy = unknown_key_policy(unknown_keys, ignore_fork_keys)
    composed = load_config(*split(config, overrides), with_release(dialect, release), policy)
    check_choices(composed)
    composed = with_downloaded_models(composed)
    silence_transformers()
    from quintet.pipelines.drift_check import DriftCheckOptions, check_drift

    report = check_drift(composed, DriftCheckOptions(episodes, updates, limit, share), warn)
    if as_json:
        print(json.dumps(report.as_json(), indent=1, ensure_ascii=False))
    else:
        _show(report)
    raise typer.Exit(int(not report.passed))


def _show(report: DriftReport) -> None:
    from rich.console import Console

    console = Console()
    console.print(_table(report))
    for line in _lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(report: DriftReport) -> Table:
    from rich.table import Table

    table = Table(title=f"{report.engine} in {report.engine_dtype} against the learner in {report.learner_dtype}")
    table.add_column("")
    for measurement in report.measurements:
        table.add_column(measurement.name, justify="right")
    columns = [measurement.drift.as_json() for measurement in report.measurements]
    for name, label in ROWS.items():
        table.add_row(label, *(_number(column[name]) for column in columns))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _lines(report: DriftReport) -> Iterator[str]:
    yield f"policy: {report.policy}; {report.episodes // len(report.measurements)} episodes per column"
    for measurement in report.measurements:
        worst_token = measurement.worst_token
        log_probs = f"engine {worst_token.engine_logprob:.6g}, learner {worst_token.learner_logprob:.6g} nats"
        token = f"token {worst_token.token_id} {_shorten(worst_token.text)}, turn {worst_token.turn}"
        yield f"largest gap {measurement.name}: {token}: {log_probs}"
    yield from _reencoding_lines(report)
    yield from _template_lines(report)
    verdict = "below" if report.passed else "ABOVE"
    share = max(measurement.drift.share_above_limit for measurement in report.measurements)
    yield (
        f"{verdict} the limit: {share:.3g} of the tokens differ by more than {report.limit:g} nats"
        f" (tolerated: {report.tolerated_share:g})"
    )


def _reencoding_lines(report: DriftReport) -> Iterator[str]:
    retokenization = report.retokenization
    if retokenization.example is None:
        yield f"re-encoding the text of {retokenization.num_turns} turns would give the same tokens"
        return
    yield (
        f"re-encoding the text would change response tokens in {retokenization.changed_turns} of"
        f" {retokenization.num_turns} turns: {retokenization.changed_response_tokens} response tokens,"
        f" {retokenization.changed_prompt_tokens} prompt tokens. The sampled tokens are used"
    )
    example = retokenization.example
    yield (
        f"  for example, turn {example.turn}: {list(example.tokens)} {_shorten(retokenization.example_text)} would"
        f" become {list(example.retokenized)} {_shorten(retokenization.retokenized_text)}"
    )


def _template_lines(report: DriftReport) -> Iterator[str]:
    comparison = report.template_comparison
    if comparison is None:
        return
    lines = comparison.report.lines()
    yield "chat template: reproduced token by token" if not lines else "chat template: reproduced except for"
    yield from (f"  {line}" for line in lines)
    for rule, count in comparison.deviations.items():
        example = comparison.examples[rule]
        tokens = f"{_shorten(example.prompt)} instead of {_shorten(example.template)}"
        yield f"  {rule}, {count} times in these episodes, for example in turn {example.turn}: {tokens}"
    if comparison.reproduced_prompts < comparison.num_turns:
        wrong = comparison.num_turns - comparison.reproduced_prompts
        yield f"  {wrong} of {comparison.num_turns} prompts cannot be rebuilt from the messages: tokens were lost"


def _shorten(text: str) -> str:
    return repr(
        text
        if len(text) <= MAX_EXAMPLE_CHARACTERS
        else f"{text[: MAX_EXAMPLE_CHARACTERS // 2]} … {text[-MAX_EXAMPLE_CHARACTERS // 2 :]}"
    )
