"""If these fail, small bodies take seconds to parse, or end in a RecursionError of whatever handles them."""

from __future__ import annotations

import pytest

from quintet.runtime.http_service.limits import check_depth, check_separators
from quintet.runtime.http_service.request_error import RequestError

pytestmark = pytest.mark.attack


def test_nesting_is_refused_beyond_the_maximum_depth() -> None:
    value: object = 1
    for depth in range(1, 6):
        value = {"a": value} if depth % 2 else [[], value]
        check_depth(value, 5)
    with pytest.raises(RequestError, match="more than 5 levels"):
        check_depth([value], 5)


def test_many_values_are_refused_before_they_are_parsed() -> None:
    check_separators(b"[1,2,3]", {",": 2})
    with pytest.raises(RequestError, match="2 times ',', the maximum is 1") as refused:
        check_separators(b"[1,2,3]", {",": 1})
    assert refused.value.status == 413


def test_errors_do_not_return_large_values_of_the_request() -> None:
    error = RequestError("x" * 10_000_000, param="y" * 10_000_000)
    assert len(str(error.body())) < 5000
