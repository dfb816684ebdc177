"""`quintet data robots`: write demonstrations of robots and inspect their data sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quintet.cli.options import key_value_pairs

if TYPE_CHECKING:
    from quintet.data.robot_demonstrations.dataset import RobotDataset, RobotDemonstration

app = typer.Typer(
    help="Write demonstrations of robots and inspect their data sets.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def make(
    out_dir: Annotated[str, typer.Argument(help="Directory of the LeRobot data set (v2.1).")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of `env`, e.g. simulator=arm camera_height=64."),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Number of solved episodes.")] = 100,
    epsilon: Annotated[float, typer.Option(min=0.0, max=1.0, help="Probability of a random action.")] = 0.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into a directory with files.")] = False,
) -> None:
    """Write episodes that the expert of a simulator solves as a LeRobot data set."""
    from quintet.config.native.envs import SimulatorConfig
    from quintet.data.robot_demonstrations.expert import expert_episodes
    from quintet.data.robot_demonstrations.writer import LeRobotWriter
    from quintet.data.tasks.task import parse_options

    directory, num_actions = Path(out_dir).expanduser(), 0
    env = parse_options(SimulatorConfig, key_value_pairs(options or []), "env")
    with expert_episodes(env, episodes, epsilon) as (simulator, solved):
        frequency = simulator.control_frequency
        writer = LeRobotWriter(directory, frames_per_second=frequency, robot=env.simulator, overwrite=overwrite)
        for episode in solved:
            writer.write(episode)
            num_actions += len(episode.actions)
        writer.close()
    print(f"{directory}: {episodes:,} episodes, {num_actions:,} actions")


@app.command()
def show(
    directory: Annotated[str, typer.Argument(help="Directory of a LeRobot or RLDS data set.")],
    cameras: Annotated[list[str] | None, typer.Option("--camera", help="Image feature; may be repeated.")] = None,
    state: Annotated[str | None, typer.Option(help="Feature with the proprioception.")] = None,
    statistics: Annotated[
        str | None, typer.Option(help="Write the statistics of actions, as in OpenVLA, to this JSON file.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read all images and checksums.")] = False,
) -> None:
    """Show episodes, actions and instructions of a data set; end with an error that names a damaged file and row."""
    from quintet.data.robot_demonstrations.dataset import FeatureNames
    from quintet.data.robot_demonstrations.open_dataset import open_robot_dataset
    from quintet.data.robot_demonstrations.statistics import dataset_statistics, write_statistics

    names = FeatureNames(tuple(cameras or ()), state)
    dataset = open_robot_dataset(Path(directory).expanduser(), "DIRECTORY", names)
    first = dataset.episode(0)
    for index in range(1, len(dataset.lengths) if verify else 1):
        dataset.episode(index)
    computed = dataset_statistics([dataset])
    _print_summary(dataset, first, computed)
    if statistics is not None:
        path = Path(statistics).expanduser()
        write_statistics(path, {dataset.name: computed})
        print(f"\n{path}: statistics of {dataset.name}")


def _print_summary(dataset: RobotDataset, first: RobotDemonstration, statistics: Mapping[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from quintet.cli.tables import page

    images = first.observations.images
    lengths = dataset.lengths
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("action", "min", "q01", "mean", "q99", "max", "std", "normalized"):
        table.add_column(title, justify="left" if title in {"action", "normalized"} else "right")
    for row in _action_rows(statistics["action"]):
        table.add_row(*row)
    with page() as out:
        out.print(Text(f"{dataset.name}: {len(lengths):,} episodes, {sum(lengths):,} actions"))
        out.print(Text(f"length of episodes: {min(lengths)} to {max(lengths)} actions"))
        cameras = ", ".join(dataset.cameras) or "none"
        out.print(Text(f"cameras: {cameras}; {images.shape[2]} × {images.shape[3]} pixels"))
        out.print(Text(f"proprioception: {first.observations.state.shape[1]} numbers"))
        out.print(table)
        out.print(Text("instructions of episodes:"))
        for instruction, count in _instructions(dataset).most_common(20):
            out.print(Text(f"{count:,} × {instruction}"))


def _action_rows(action: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    columns = [action[name] for name in ("min", "q01", "mean", "q99", "max", "std")]
    return [
        [str(dimension), *(f"{column[dimension]:.4g}" for column in columns), "yes" if normalized else "no"]
        for dimension, normalized in enumerate(action["mask"])
    ]


def _instructions(dataset: RobotDataset) -> Counter[str]:
    """Return the number of episodes by their first instruction."""
    episodes = (dataset.episode(index, with_images=False) for index in range(len(dataset.lengths)))
    return Counter(episode.observations.instructions[0] for episode in episodes if len(episode.actions))
