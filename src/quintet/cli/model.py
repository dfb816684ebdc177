"""`quintet model`: pretrained models that are downloaded without the Hugging Face hub."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Download a pretrained model, or list them.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def get(name: Annotated[str, typer.Argument(help="A model of `quintet model list`, such as smollm2-135m.")]) -> None:
    """Download a pretrained model once, and print its directory; configurations name it by `policy.preset=NAME`."""
    from quintet.cli.model_downloads import download_progress
    from quintet.pipelines.model_download import get_published_model

    with download_progress() as report:
        directory = get_published_model(name, report)
    print(directory)


@app.command("list")
def list_models() -> None:
    """List the pretrained models, and where those are that have been downloaded."""
    from quintet.config.model_locations.locations import config_file
    from quintet.config.model_locations.published_models import published_models

    for name, model in published_models().items():
        print(f"{name}  {model.help}")
        print(f"  {model.license}, {model.bytes / 1e6:.0f} MB, from {model.hub_name}")
        file = config_file(name)
        print(f"  {'not downloaded' if file is None else file.parent}")
