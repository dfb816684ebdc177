"""Draw the pictures of docs/viewer.md: trains two short runs and takes screenshots of their pages.

    python scripts/draw_viewer_pages.py [--runs DIRECTORY] [--out docs/images] [--chromium /usr/bin/chromium]

`--runs` is a directory that has the runs `seed0` and `seed1` already. Needs `pip install playwright`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 40
SETTINGS = (
    *(f"training.steps={STEPS}", "tracking.token_statistics=true", "validation.every_steps=5"),
    "tracking.profile={steps: [3]}",
)
VIEWS = {
    "viewer_charts": ("#charts?run=seed0&run=seed1&smoothing=0.6", ".chart .line.tone1"),
    "viewer_tokens": (f"#episodes?run=seed0&split=train&at=train:{STEPS}:0&colour=entropies", ".tokens span"),
    "viewer_trace": ("#timeline?run=seed0", ".longest tbody tr"),
    "viewer_changes": (f"#changes?run=seed0&before=0&after={STEPS}", ".virtual-row"),
}
OPTIONS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking")


def train(directory: Path) -> None:
    """Train the two runs."""
    for seed in (0, 1):
        command = [sys.executable, "-m", "quintet", "train", f"seed={seed}", f"name=seed{seed}", *SETTINGS]
        subprocess.run([*command, f"output_dir={directory}"], check=True, stdout=subprocess.DEVNULL)


def draw(runs: Path, out: Path, chromium: str) -> None:
    """Take the screenshots."""
    from playwright.sync_api import sync_playwright

    command = (sys.executable, "-m", "quintet", "view", str(runs), "--port", "0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer, sync_playwright() as playwright:
        assert viewer.stdout is not None
        address = viewer.stdout.readline().rsplit(" ", 1)[-1].strip()
        browser = playwright.chromium.launch(executable_path=chromium, args=list(OPTIONS))
        try:
            for name, (view, ready) in VIEWS.items():
                page = browser.new_page(viewport={"width": 1280, "height": 760})
                page.goto(f"{address}{view}")
                page.wait_for_selector(ready, state="attached")
                if name == "viewer_changes":
                    page.locator(ready).first.click()
                page.wait_for_timeout(800)
                page.screenshot(path=out / f"{name}.png")
                page.close()
        finally:
            browser.close()
            viewer.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runs = options.runs or Path(scratch)
        if options.runs is None:
            train(runs)
        draw(runs, options.out, options.chromium)


if __name__ == "__main__":
    main()
