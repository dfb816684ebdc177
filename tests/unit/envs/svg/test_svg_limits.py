"""If these fail, hostile SVG code of a policy reads files, opens connections, or costs more than its own score."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from quintet.envs.svg.document_check import MAX_CHARS, InvalidSvgError
from quintet.envs.svg.renderer import SvgRenderer, render_svgs

pytestmark = pytest.mark.attack

RECT = '<rect width="8" height="8" fill="red"/>'
GOOD = f'<svg viewBox="0 0 16 16">{RECT}</svg>'


def svg(content: str, attributes: str = 'viewBox="0 0 16 16"') -> str:
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f"<svg {namespaces} {attributes}>{content}</svg>"


def uses(levels: int, copies: int) -> str:
    """Groups that each draw the last one several times."""
    inner = "".join(
        f'<g id="g{level}">{f"""<use xlink:href="#g{level - 1}"/>""" * copies}</g>' for level in range(1, levels)
    )
    return f'<defs><rect id="g0" width="1" height="1"/>{inner}</defs><use href="#g{levels - 1}"/>'


LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
HOSTILE = {
    "billion laughs": (f'<!DOCTYPE svg [<!ENTITY l0 "lol">{LAUGHS}]>{svg("<text>&l9;</text>")}', "DOCTYPE"),
    "quadratic blow-up": (f'<!DOCTYPE s [<!ENTITY a "{"a" * 9000}">]>{svg("<text>" + "&a;" * 9000)}', "DOCTYPE"),
    "external entity": (f'<!DOCTYPE s [<!ENTITY a SYSTEM "file:///etc/passwd">]>{svg("<text>&a;</text>")}', "DOCTYPE"),
    "external DTD": (f'<!DOCTYPE svg SYSTEM "http://127.0.0.1/x.dtd">{GOOD}', "DOCTYPE"),
    "style sheet by instruction": (f'<?xml-stylesheet href="file:///etc/passwd"?>{GOOD}', "instructions"),
    "exponential use": (svg(uses(25, 2)), "draw more than"),
    "wide use": (svg(uses(4, 60)), "draw more than"),
    "circular use": (svg('<g id="a"><use href="#b"/></g><g id="b"><use href="#a"/></g>'), "circular"),
    "use of itself": (svg('<g id="a"><use href="#a"/></g>'), "circular"),
    "recursive pattern": (
        svg(f'<pattern id="p" width="1" height="1"><rect width="9" height="9" fill="url(#p)"/></pattern>{RECT}'),
        "circular",
    ),
    "inherited patterns": (
        svg(
            "".join(
                f'<pattern id="p{n}" width="1" height="1"><g fill="url(#p{n - 1})">{RECT * 40}</g></pattern>'
                for n in range(1, 5)
            )
            + '<rect width="9" height="9" fill="url(#p4)"/>'
        ),
        "draw more than",
    ),
    "huge viewBox": (svg(RECT, 'viewBox="0 0 1e30 1e30"'), "above"),
    "huge width": (svg(RECT, 'width="99999999999" height="99999999999"'), "above"),
    "sizes that are not numbers": (svg(RECT, 'width="NaN" height="NaN"'), "not a number"),
    "infinite size": (svg(RECT, 'viewBox="0 0 inf inf"'), "not a number"),
    "overflowing size": (svg(RECT, 'viewBox="0 0 1e999 1e999"'), "above"),
    "giant blur": (svg(f'<filter id="f"><feGaussianBlur stdDeviation="1e9"/></filter>{RECT}'), "above"),
    "giant filter region": (svg(f'<filter id="f" width="1e8" height="1e8"><feFlood/></filter>{RECT}'), "above"),
    "noise of many octaves": (svg(f'<filter id="f"><feTurbulence numOctaves="99999"/></filter>{RECT}'), "feTurbulence"),
    "giant morphology": (svg('<filter id="f"><feMorphology radius="400"/></filter>'), "feMorphology"),
    "deep nesting": (svg("<g>" * 3000 + "</g>" * 3000), "nested"),
    "many elements": (svg("<g/>" * 2500), "elements"),
    "script": (svg("<script>alert(1)</script>"), "<script>"),
    "event handler": (svg('<rect onload="alert(1)"/>'), "event handler"),
    "foreign object": (svg("<foreignObject/>"), "<foreignObject>"),
    "image": (svg('<image href="file:///etc/passwd"/>'), "<image>"),
    "image filter": (svg('<filter id="f"><feImage href="http://127.0.0.1/"/></filter>'), "feImage"),
    "animation": (svg('<animate attributeName="x"/>'), "<animate>"),
    "external use": (svg('<use href="file:///etc/passwd#a"/>'), "outside"),
    "external use by xlink": (svg('<use xlink:href="http://127.0.0.1/a.svg#a"/>'), "outside"),
    "data URL": (svg('<use href="data:image/svg+xml;base64,AAAA"/>'), "outside"),
    "base": (svg('<g xml:base="http://127.0.0.1/"/>'), "outside"),
    "external paint": (svg('<rect fill="url(http://127.0.0.1/a.svg#p)"/>'), "outside"),
    "external paint in characters": (svg('<rect fill="&#117;rl(//127.0.0.1/a)"/>'), "outside"),
    "external paint in a style": (svg("<rect style=\"fill: URL ( 'file:///a#p' )\"/>"), "external"),
    "escapes in a style": (svg('<rect style="fill:\\75rl(file:///a)"/>'), "escapes"),
    "element in a style sheet": (svg("<style>@import<title/> 'file:///etc/passwd';</style>"), "only text"),
    "import": (svg("<style>@import 'file:///etc/passwd';</style>"), "style sheet"),
    "import in pieces": (svg("<style>@im<![CDATA[port 'file:///etc/passwd';]]></style>"), "style sheet"),
    "url of a style sheet": (svg("<style>rect {fill: url(http://127.0.0.1/)}</style>"), "style sheet"),
    "long path": (svg(f'<path d="M0 0 {"l 1 1 " * 2_000_000}"/>'), f"{MAX_CHARS} characters"),
    "wrong root": ("<html><svg/></html>", "root"),
    "open tag": ("<svg", "XML"),
    "zero bytes": ("<svg>\x00</svg>", "XML"),
    "lone surrogate": ("<svg>\ud800<", "XML"),
    "no element": ("", "no <svg>"),
    "no size": (svg(RECT, 'viewBox="0 0 0 0" width="0" height="0"'), "rendered"),
}


@pytest.fixture(scope="module")
def renderer() -> Iterator[SvgRenderer]:
    with closing(SvgRenderer(max_workers=2)) as started:
        yield started


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_only_costs_its_own_picture(renderer: SvgRenderer, name: str) -> None:
    text, reason = HOSTILE[name]
    first, refused, last = renderer.render([GOOD, text, GOOD], 32)
    assert isinstance(refused, InvalidSvgError)
    assert reason in str(refused)
    assert isinstance(first, np.ndarray)
    assert (first == last).all()


def test_a_drawing_with_everything_that_is_allowed_is_rendered(renderer: SvgRenderer) -> None:
    text = svg(
        '<title>a</title><defs><linearGradient id="l"><stop offset="0" stop-color="red"/></linearGradient>'
        '<clipPath id="c"><circle cx="8" cy="8" r="8"/></clipPath><g id="u"><rect width="4" height="4"/></g>'
        '<filter id="f"><feGaussianBlur stdDeviation="1"/></filter></defs><style>.a { fill: blue }</style>'
        '<g clip-path="url(#c)" style="fill:url(#l); opacity: 0.9"><rect width="16" height="16"/></g>'
        '<use xlink:href="#u" x="4" class="a" filter="url(#f)"/><text x="1" y="9">hi</text>'
    )
    (picture,) = renderer.render([text], 48)
    assert isinstance(picture, np.ndarray)
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 10


def test_pictures_of_other_proportions_are_centred_on_white(renderer: SvgRenderer) -> None:
    (picture,) = renderer.render([svg('<rect width="40" height="10" fill="red"/>', 'viewBox="0 0 40 10"')], 40)
    assert (picture[:15] == 255).all()
    assert (picture[15:25] == [255, 0, 0]).all()
    assert (picture[25:] == 255).all()


def test_code_that_takes_too_long_is_killed_by_its_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # without the check of the document: the limits of the process are the second line of defence
    monkeypatch.setattr("quintet.envs.svg.renderer.TIMEOUT_SECONDS", 300.0)
    monkeypatch.setattr("quintet.envs.svg.renderer.WORKER", "unchecked_svg_worker")
    text = HOSTILE["noise of many octaves"][0].replace(RECT, RECT.replace("/>", ' filter="url(#f)"/>'))
    with closing(SvgRenderer(max_workers=1)) as unchecked:
        first, slow, last = unchecked.render([GOOD, text, GOOD], 64)
    assert "of CPU time" in str(slow)
    assert (first == last).all()


def test_a_worker_that_opens_files_or_connections_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without checks is asked to read a canary file and to connect to a listener."""
    canary = tmp_path / "canary.svg"
    canary.write_text(GOOD)
    accepted: list[object] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=_accept, args=(listener, accepted), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/a.svg"
        monkeypatch.setattr("quintet.envs.svg.renderer.WORKER", "unchecked_svg_worker")
        with closing(SvgRenderer(max_workers=1)) as unchecked:
            read, connected, shown, fetched = unchecked.render(
                [
                    f"read {canary}",
                    f"connect {listener.getsockname()[1]}",
                    svg(f'<image href="{canary}" width="16" height="16"/>'),
                    svg(f'<image href="{url}" width="16" height="16"/>'),
                ],
                16,
            )
    assert "PermissionError" in str(read)
    assert "PermissionError" in str(connected)
    assert (shown == 255).all()
    assert (fetched == 255).all()
    assert not accepted


def _accept(listener: socket.socket, accepted: list[object]) -> None:
    try:
        accepted.append(listener.accept())
    except OSError:
        return


def test_a_batch_is_rendered_in_the_order_of_its_texts() -> None:
    colors = [f"#{number:02x}0000" for number in range(64)]
    pictures = render_svgs([GOOD.replace("red", color) for color in colors], 16)
    assert [int(picture[0, 0, 0]) for picture in pictures] == list(range(64))
