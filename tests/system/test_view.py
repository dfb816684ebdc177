"""If these fail, `quintet view` shows an empty page, misses what a run writes, or exports a page that does not open."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import warm_processes
from tests.system.conftest import SMALL

if TYPE_CHECKING:
    from playwright.sync_api import Page

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
SETTINGS = (
    *("tracking.trajectories_every_steps=1", "tracking.token_statistics=true", "training.steps=2"),
    "tracking.profile={steps: [2]}",
)

if CHROMIUM is None:
    pytest.skip("needs Chromium (apt-get install chromium)", allow_module_level=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a finished run, and of a copy with another seed."""
    folder = tmp_path_factory.mktemp("view")
    (folder / "small.yaml").write_text(SMALL)
    command = [sys.executable, "-m", "quintet", "train", "small.yaml", "name=first", *SETTINGS]
    warm_processes.run(command, cwd=folder, check=True, capture_output=True, timeout=240)
    shutil.copytree(folder / "runs/first", folder / "runs/second")
    config = folder / "runs/second/config.yaml"
    config.write_text(config.read_text().replace("seed: 0  # default", "seed: 1  # command line", 1))
    return folder / "runs"


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    """Address of their viewer."""
    command = [sys.executable, "-m", "quintet", "view", "--port", "0"]
    with warm_processes.Popen(command, cwd=runs.parent, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().rsplit(" ", 1)[-1].strip()
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture
def errors() -> list[str]:
    """Errors of the page that its test does not expect: it removes the others."""
    return []


@pytest.fixture
def page(errors: list[str]) -> Iterator[Page]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        yield page
        browser.close()
        assert errors == []


def test_runs_are_compared_episodes_found_and_a_view_exported(address: str, page: Page, tmp_path: Path) -> None:
    page.goto(address)
    page.get_by_label("Select first").check()
    page.get_by_label("Select second").check()
    page.keyboard.press("2")
    page.wait_for_selector(".chart .line.tone1", state="attached")
    assert page.locator(".legend li").all_inner_texts() == ["first", "second"]
    assert page.locator("summary").inner_text() == "1 setting differs"
    page.get_by_label("Filter metrics").fill("entropy")
    page.wait_for_function("() => document.querySelectorAll('.card:not([hidden])').length < 5")

    page.goto(f"{address}#episodes?run=first&split=train")
    page.wait_for_selector(".virtual-row")
    assert "32 episodes" in page.locator("[role=status]").inner_text()
    page.keyboard.press("j")
    page.wait_for_selector(".turn .board")
    page.locator(".episode-header select").select_option("entropies")
    assert page.locator(".tokens span").count() > 0
    page.get_by_label("Samples side by side").check()
    assert page.locator(".side-by-side .episode").count() == 4
    chosen = page.locator(".episode-header").inner_text()

    page.goto(f"{address}#changes?run=first&before=0&after=2")
    page.locator(".virtual-row:has(.marks)").first.click()
    page.wait_for_selector(".side-by-side .episode")
    assert page.locator(".side-by-side .episode").count() == 2

    page.goto(f"{address}#episodes?run=first&split=train&at=train:2:0")
    page.wait_for_selector(".filters")
    page.wait_for_selector(".turn .board")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    exported = tmp_path / "exported.html"
    download.value.save_as(exported)
    page.goto(exported.as_uri())
    page.wait_for_selector(".turn .board")
    assert page.locator(".episode-header").inner_text().split("seed")[0] == chosen.split("seed")[0]


def test_a_run_is_followed_while_it_writes(address: str, page: Page, runs: Path) -> None:
    page.goto(f"{address}#charts?run=first&metric=actor%2Fentropy")
    page.wait_for_selector(".chart .dot")
    before = page.locator("[data-metric='actor/entropy'] .dot").count()
    with (runs / "first/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "time_seconds": 99.0, "actor/entropy": 0.25}) + "\n")
    page.wait_for_function(
        "before => document.querySelectorAll(\"[data-metric='actor/entropy'] .dot\").length === before + 1", arg=before
    )


def colored(page: Page) -> int:
    """Number of pixels of the trace that are not transparent."""
    pixels = "const { width, height } = canvas, data = canvas.getContext('2d').getImageData(0, 0, width, height).data"
    return int(
        page.locator(".trace canvas").evaluate(
            f"canvas => {{ {pixels}; return data.filter((v, i) => i % 4 === 3 && v).length }}"
        )
    )


def test_the_trace_of_a_step_is_zoomed_searched_and_exported(
    address: str, page: Page, runs: Path, tmp_path: Path
) -> None:
    shutil.rmtree(runs / "second/profile")
    page.goto(f"{address}#timeline?run=second")
    page.wait_for_selector(".timeline .segment")
    assert "tracking.profile={steps: [3]}" in page.locator("main").inner_text()
    assert page.locator(".trace").count() == 0

    page.goto(f"{address}#timeline?run=first")
    page.get_by_role("button", name="step 2").click()
    page.wait_for_function("() => location.hash.includes('step=2')")
    page.wait_for_timeout(300)
    assert page.locator(".trace h2").inner_text() == "Trace of step 2: first"
    rows = page.locator(".longest tbody tr").all_inner_texts()
    assert any(row.startswith("request\trequests of engine 0") for row in rows)
    assert any(row.startswith("step\tMainThread\t1\t") for row in rows)
    assert colored(page) > 5_000

    box = page.locator(".trace canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 400, box["y"] + 30)  # the first row: the whole step
    assert page.locator(".span-details b").first.inner_text() == "step"
    page.mouse.wheel(0, -1500)
    page.wait_for_function("() => location.hash.includes('from=')")
    assert page.locator(".longest tbody tr").all_inner_texts() != rows
    page.get_by_label("Find spans").fill("optimizer_step")
    page.wait_for_function("() => location.hash.includes('find=optimizer_step')")
    part = page.url.split("from=")[1]
    page.locator(".trace canvas").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("part => !location.hash.endsWith(part)", arg=part)
    with page.expect_download() as download:
        page.keyboard.press("e")
    exported = tmp_path / "trace.html"
    download.value.save_as(exported)
    page.keyboard.press("0")
    page.wait_for_function("() => !location.hash.includes('from=')")

    page.goto(f"{address}#timeline?run=first&step=2&from=abc&find=before")
    page.wait_for_selector(".longest tbody tr")
    page.evaluate("requestAnimationFrame = () => 0")  # the wheel turns before the first frame
    page.goto(f"{address}#timeline?run=first&step=2&find=frame")
    page.wait_for_function("() => document.querySelector('[type=search]')?.value === 'frame'")
    page.locator(".trace canvas").dispatch_event("wheel", {"deltaY": -1500, "offsetX": 400})
    page.wait_for_function("() => location.hash.includes('from=')")
    assert "NaN" not in page.url

    page.goto(exported.as_uri())
    page.wait_for_selector(".longest tbody tr")
    assert page.locator(".trace h2").inner_text() == "Trace of step 2: first"
    assert colored(page) > 1_000


def test_the_diagnosis_of_two_steps_and_of_no_run_is_not_that_all_is_well(
    address: str, page: Page, errors: list[str]
) -> None:
    page.goto(f"{address}#findings?run=first")
    page.wait_for_selector("text=Not judged yet: first")
    assert page.locator("li", has_text="from 50 steps on: The reward does not rise").count()
    page.goto(f"{address}#findings?run=nowhere")
    page.wait_for_selector("text=This cannot be shown")
    assert page.locator(".failure").inner_text() == "no run is named nowhere; reload the page"
    assert errors
    assert all("404" in error for error in errors)
    errors.clear()


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_every_view_fits_narrow_screens(address: str, page: Page, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 390, "height": 800})
    for view in ("runs", "charts", "findings", "episodes", "changes", "timeline", "config"):
        page.goto(f"{address}#{view}?run=first")
        page.wait_for_selector("main > *")
        page.wait_for_timeout(300)
        assert not page.locator("h2", has_text="This cannot be shown").count()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == (scheme == "dark")
