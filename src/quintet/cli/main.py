"""The `quintet` command: finds the command's file, calls it, and turns faults into one message."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from quintet import __version__
from quintet.cli import check, data
from quintet.cli.ranks import hushed
from quintet.errors import UserError

__all__ = ["app", "main"]

app = typer.Typer(
    name="quintet",
    help="Post-train language models by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(check.app, name="check")
app.add_typer(data.app, name="data")

Config = Annotated[
    str | None,
    typer.Argument(metavar="CONFIG", help="YAML, a run script or a list of key=value; without one, the defaults."),
]
DialectName = Annotated[
    str | None,
    typer.Option("--dialect", help="Whose configuration it is; recognised from the file where it isn't said."),
]
UnknownKeys = Annotated[
    str, typer.Option(help="Of another framework's configuration: `refuse`, or `warn` and go on without.")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values set on the way.")]


def _split(config: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """The first word is a file unless it is a `key=value`."""
    rest = list(overrides or [])
    if config is not None and "=" in config:
        return None, [config, *rest]
    return config, rest


@app.command()
def train(
    config: Config = None,
    overrides: Overrides = None,
    dialect: DialectName = None,
    unknown_keys: UnknownKeys = "refuse",
) -> None:
    """Warm-start a policy, train it by reinforcement learning, report."""
    from quintet.cli.train import run

    raise typer.Exit(run(*_split(config, overrides), dialect, unknown_keys))


@app.command()
def sft(
    config: Config = None,
    overrides: Overrides = None,
    dialect: DialectName = None,
    unknown_keys: UnknownKeys = "refuse",
) -> None:
    """Fine-tune a model on conversations or on solved games."""
    from quintet.cli.sft import run

    raise typer.Exit(run(*_split(config, overrides), dialect, unknown_keys))


@app.command(name="eval")
def evaluate(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG|MODEL",
            help="A configuration of stored answers or of a run that only validates, a model, a checkpoint or a run.",
        ),
    ] = None,
    overrides: Overrides = None,
    data_file: Annotated[
        str | None, typer.Option("--data", metavar="FILE", help="Questions that the model is to answer.")
    ] = None,
    world: Annotated[str | None, typer.Option(help="A world that it is to play.")] = None,
    samples: Annotated[int, typer.Option(help="Answers to each question, games from each start.", min=1)] = 1,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; by itself 0 for one sample, 1 for several.", min=0.0)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of one answer.", min=1)] = None,
    limit: Annotated[int | None, typer.Option(help="Questions at most.", min=1)] = None,
    games: Annotated[int, typer.Option(help="Start states of a world.", min=1)] = 256,
    confidence: Annotated[float, typer.Option(help="Of the intervals.", min=0.01, max=0.999)] = 0.95,
    name: Annotated[str | None, typer.Option(help="Directory of the results under the output directory.")] = None,
    output_dir: Annotated[str, typer.Option(help="Where results lie.")] = "runs",
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="An OpenAI-compatible endpoint that answers, http://…/v1.")
    ] = None,
    endpoint_model: Annotated[str | None, typer.Option(metavar="NAME", help="Which of its models.")] = None,
    endpoint_key: Annotated[
        str, typer.Option(metavar="VARIABLE", help="Environment variable with its key.")
    ] = "OPENAI_API_KEY",
    endpoint_concurrent: Annotated[int, typer.Option(help="Requests under way at a time.", min=1)] = 16,
    endpoint_retries: Annotated[int, typer.Option(help="Further attempts after a failed request.", min=0)] = 2,
    endpoint_timeout: Annotated[float, typer.Option(help="Seconds for one reply.", min=0.001)] = 300.0,
    dialect: DialectName = None,
    unknown_keys: UnknownKeys = "refuse",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of the table.")] = False,
) -> None:
    """Judge stored answers, or have a model or an endpoint answer and judge that."""
    from quintet.cli.evaluate import Asked, run

    asked = Asked(
        data_file,
        world,
        samples,
        temperature,
        max_tokens,
        limit,
        games,
        confidence,
        name,
        output_dir,
        endpoint,
        endpoint_model,
        endpoint_key,
        endpoint_concurrent,
        endpoint_retries,
        endpoint_timeout,
    )
    raise typer.Exit(run(*_split(what, overrides), dialect, unknown_keys, asked, as_json=as_json))


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A model, a checkpoint or a run.")],
    overrides: Overrides = None,
    engine: Annotated[str | None, typer.Option(help="hf, vllm or sglang; the run's, else hf.")] = None,
    host: Annotated[str, typer.Option(help="Beyond this machine only with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None, typer.Option(help="What callers have to know; better in the environment, as QUINTET_TOKEN.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Under which the model is asked for; its directory's.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Requests decoded side by side.", min=1)] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.", min=2)] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that lies in the model's directory.")
    ] = False,
) -> None:
    """Offer a model as an OpenAI-compatible endpoint, with its tokens and log-probs."""
    from quintet.cli.serve import Asked, run

    asked = Asked(engine, host, port, token, name, max_concurrent, context, dtype, trust_remote_code)
    raise typer.Exit(run(model, list(overrides or []), asked))


@app.command()
def export(
    source: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, a run, a model or adapters.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Directory that is made.")],
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; as they were without it.")] = None,
) -> None:
    """Write a trained model as transformers loads it: adapters merged, types converted, a model card beside it."""
    from quintet.cli.export import run

    run(source, target, dtype)


@app.command()
def plan(
    config: Config = None,
    overrides: Overrides = None,
    dialect: DialectName = None,
    unknown_keys: UnknownKeys = "refuse",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of tables.")] = False,
    device_memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="Memory of one device; refuses what doesn't fit.", min=0.001)
    ] = None,
) -> None:
    """Show what a run would do: games, updates, devices and memory; and check its configuration."""
    from quintet.cli.plan import run

    run(*_split(config, overrides), dialect, unknown_keys, as_json=as_json, device_memory=device_memory)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of tables.")] = False,
) -> None:
    """Show what this machine has and what can run on it."""
    from quintet.cli.doctor import run

    run(as_json=as_json)


@app.command()
def explain(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[CONFIG] KEY", help="A dotted key; with a file, its value there.")
    ] = None,
    dialect: Annotated[str | None, typer.Option(help="Whose key: native, ragen, verl, vagen, rlinf or roll.")] = None,
    every: Annotated[bool, typer.Option("--list", help="Every documented key of every dialect.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a key.")] = False,
) -> None:
    """Say what a key means."""
    from quintet.cli.explain import run

    run(words or [], dialect, every=every, as_json=as_json)


@app.command()
def translate(
    config: Config = None,
    overrides: Overrides = None,
    to: Annotated[str, typer.Option(help="native, ragen, verl, vagen, rlinf or roll.")] = "native",
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Written there; else to stdout.")
    ] = None,
    dialect: DialectName = None,
    unknown_keys: UnknownKeys = "refuse",
) -> None:
    """Say the same run in another framework's words."""
    from quintet.cli.translate import run

    run(*_split(config, overrides), dialect, unknown_keys, to=to, output=output)


@app.command()
def schema() -> None:
    """Print the JSON schema of the native configuration, for editors."""
    import json

    from quintet.config import Experiment

    print(json.dumps(Experiment.model_json_schema(), indent=1))


@app.command(name="list")
def list_entries() -> None:
    """Show what can be chosen: worlds, engines, advantages, loggers, presets."""
    from quintet.cli.list import run

    run()


def _version(shown: bool) -> None:
    if shown:
        print(f"quintet {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Post-train language models by reinforcement learning."""


def main() -> NoReturn:
    """Run the command line; the user's faults end in one message and exit status 2."""
    try:
        with hushed():
            app(standalone_mode=True)
    except UserError as error:
        print(f"quintet: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        print("quintet: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    sys.exit(0)


if __name__ == "__main__":
    main()
