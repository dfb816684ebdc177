"""Draw the pictures of docs/gallery.md: what a policy sees in environments with images, and the terminal viewer.

    python scripts/draw_gallery.py [--run RUN_DIRECTORY] [--out docs/images]

Without `--run` it trains a short run for the terminal. The browser's pictures come from `draw_viewer_pages.py`. Needs
`pip install playwright`.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from quintet.config.compose import load_experiment
from quintet.envs.factory import build_env
from quintet.envs.simulators.registry import build_simulator
from quintet.viewer.run_catalog import RunCatalog
from quintet.viewer.terminal import TerminalViewer

ENVS: dict[str, tuple[str | None, list[str]]] = {
    "frozenlake": (None, ["env={name: frozenlake, size: 6, render: vision, tile_size: 48}"]),
    "sokoban": (None, ["env={name: sokoban, render: vision, tile_size: 48}"]),
    "navigation": ("examples/native/navigation.yaml", ["env.render=vision"]),
    "primitive_skill": ("examples/native/primitive_skill.yaml", ["env.render=vision"]),
    "svg": ("examples/native/svg.yaml", []),
}
"""Configuration file and overrides by name of the picture."""
ROBOTS = {"arm_reach": ["env.task=reach"], "arm_push": ["env.task=push"]}
"""Overrides of `examples/native/arm.yaml`."""
SIZE = 288
"""Height and width of a picture in pixels."""
TRAINING = ("training.steps=20", "validation.every_steps=5", "name=frozenlake")


def draw_env(path: str | None, overrides: list[str]) -> np.ndarray:
    """Return the image, uint8 [height, width, 3], of the first observation that has one."""
    env = build_env(load_experiment(path, overrides).experiment.env)
    try:
        return np.asarray(env.reset(3).images[0])
    finally:
        env.close()


def draw_robot(overrides: list[str]) -> np.ndarray:
    """Return a picture, uint8 [height, width, 3], of a robot in its start state."""
    overrides = [*overrides, f"env.camera_height={SIZE}", f"env.camera_width={SIZE}"]
    config = load_experiment("examples/native/arm.yaml", overrides).experiment.env
    simulator = build_simulator(config, 1, 0)
    try:
        robots = np.zeros(1, np.int64)
        simulator.reset(robots, robots)
        return simulator.render(robots)[0]
    finally:
        simulator.close()


def write_picture(image: np.ndarray, path: Path) -> None:
    """Write a picture as PNG, enlarged without smoothing if it is smaller than `SIZE`."""
    scale = max(1, SIZE // max(image.shape[:2]))
    Image.fromarray(image.repeat(scale, axis=0).repeat(scale, axis=1)).save(path, optimize=True)


async def terminal_picture(run: Path) -> str:
    """Return the tab of curves of the terminal viewer as SVG."""
    app = TerminalViewer(RunCatalog([run]))
    async with app.run_test(size=(110, 34)) as pilot:
        await pilot.press("2")
        await pilot.pause(1.0)
        return app.export_screenshot(title="quintet view --terminal")


def write_svg_as_png(svg: str, path: Path, chromium: str) -> None:
    """Write an SVG document as PNG, as a browser draws it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_content(svg)
        page.locator("svg").screenshot(path=path)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    for name, (path, overrides) in ENVS.items():
        write_picture(draw_env(path, overrides), options.out / f"env_{name}.png")
    for name, overrides in ROBOTS.items():
        write_picture(draw_robot(overrides), options.out / f"env_{name}.png")
    with tempfile.TemporaryDirectory() as scratch:
        run = options.run or Path(scratch) / "frozenlake"
        if options.run is None:
            command = [sys.executable, "-m", "quintet", "train", *TRAINING, f"output_dir={scratch}"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        svg = asyncio.run(terminal_picture(run))
    write_svg_as_png(svg, options.out / "viewer_terminal.png", options.chromium)


if __name__ == "__main__":
    main()
