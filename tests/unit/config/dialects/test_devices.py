"""If these fail, a worker is put on devices that nobody named, or a configuration's text is executed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.config.dialects.rlinf.component_placement import parse_placement
from quintet.config.dialects.roll.device_mapping import parse_device_mapping


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("list(range(0,4))", (0, 1, 2, 3)),
        ("list(range(3))", (0, 1, 2)),
        ("list(range(0, 8, 2))", (0, 2, 4, 6)),
        ("[0, 5,7]", (0, 5, 7)),
        (" list(range(0,2)) + [4] + list(range(6,8)) ", (0, 1, 4, 6, 7)),
    ],
)
def test_a_device_mapping_is_lists_ranges_and_sums(text: str, devices: tuple[int, ...]) -> None:
    assert parse_device_mapping(text) == devices


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "list(range(0,10**9))",
        "list(range(99999999))",
        "list(range(0,4,0))",
        "[0,0]",
        "[-1]",
        "[]",
        "[True]",
        "['a']",
        "range(4)",
        "list(range(n=4))",
        "[0]*4",
        "list(map(int, '12'))",
        "",
        "(" * 5000,
    ],
)
def test_a_device_mapping_executes_nothing(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_device_mapping(text)


@given(st.text(max_size=40))
def test_no_text_does_more_than_be_refused(text: str) -> None:
    for parse in (parse_device_mapping, lambda text: parse_placement("actor", text, 8)):
        try:
            parse(text)
        except ValueError:
            continue


@pytest.mark.parametrize(
    ("spec", "places"),
    [
        ("all", [(d,) for d in range(8)]),
        ("ALL", [(d,) for d in range(8)]),
        (3, [(3,)]),
        ("0,2,3", [(0,), (2,), (3,)]),
        ("0-3, 5", [(0,), (1,), (2,), (3,), (5,)]),
        ("0-1:0-3", [(0,), (0,), (1,), (1,)]),
        ("0-3:0-1", [(0, 1), (2, 3)]),
        ("0-1:0-3,3-5,7:7-14", [(0,), (0,), (1,), (1,), (3,), (4,), (5,), *[(7,)] * 8]),
        ("0-1,", [(0,), (1,)]),
        ("", []),
    ],
)
def test_a_placement_puts_processes_on_devices(spec: object, places: list[tuple[int, ...]]) -> None:
    assert parse_placement("actor, rollout", spec, 8) == {"actor": places, "rollout": places}


@pytest.mark.parametrize(
    ("components", "spec", "word"),
    [
        ("actor", "0-8", "there are 8 devices"),
        ("actor", "3-1", "descending"),
        ("actor", "1,0", "ascending"),
        ("actor", "0-2,2", "ascending"),
        ("actor", "0-2:0-1", "evenly"),
        ("actor", "0-1:0-3,3:5", "continue at 4"),
        ("actor", "a-b", "not a rank"),
        ("actor", "0-1:all", "not a rank"),
        ("actor", True, "not a placement"),
        ("actor", [0], "not a placement"),
        ("actor,actor", "0", "each once"),
        ("actor,,rollout", "0", "each once"),
    ],
)
def test_a_placement_that_cant_be_is_told_why(components: str, spec: object, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_placement(components, spec, 8)
