"""If these fail, docs/scaling.md shows other growth than the committed results, or a wrong exponent."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_the_page_shows_the_committed_results() -> None:
    import growth_pictures

    page = (ROOT / "docs/scaling.md").read_text()
    assert f"\n{growth_pictures.table(growth_pictures.read('growth'))}\n" in page
    assert f"\n{growth_pictures.engine_table(growth_pictures.read('growth_engine'))}\n" in page
    images = growth_pictures.pictures()
    assert images
    assert all(path.read_text() == svg for path, svg in images.items())


def test_an_exponent_is_the_slope_of_the_logarithms() -> None:
    from growth import exponent

    assert exponent([1, 10, 100], [7, 7, 7]) == pytest.approx(0)
    assert exponent([10, 20, 40], [3, 12, 48]) == pytest.approx(2)
    assert exponent([1, 10, 100], [1, 1, 10]) == pytest.approx(0.5)


def test_a_cost_that_grows_as_the_work_is_drawn_on_the_grey_line() -> None:
    from growth_pictures import Growth

    svg = Growth("work", "s", [10, 100, 1000], [2, 20, 200], 1.0).svg(0, 0)
    grey, blue = (line.split('points="')[1].split('"')[0] for line in svg.split("<polyline")[1:])
    assert grey == blue == "0.0,110.0 100.0,82.5 200.0,55.0"
