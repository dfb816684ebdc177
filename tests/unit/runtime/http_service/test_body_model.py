"""If these fail, one request with many wrong values keeps a server busy for seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic.types import FailFast

from quintet.runtime.env_service import schema as env_service
from quintet.runtime.env_service import vagen_routes
from quintet.runtime.http_service.body_model import at_most
from quintet.runtime.serving import body_parts, request_schema
from quintet.runtime.serving.messages_api import schema as messages
from quintet.runtime.serving.responses_api import schema as responses

MODULES = (env_service, vagen_routes, body_parts, request_schema, messages, responses)
MODELS = sorted(
    {
        value
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseModel) and value.__module__ == module.__name__
    },
    key=lambda model: (model.__module__, model.__name__),
)
NUM_FIELDS = 50_000


def unbounded(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[str]:
    """Lists and mappings in a type, all of whose wrong entries are errors."""
    if hasattr(annotation, "__metadata__"):
        yield from unbounded(get_args(annotation)[0], (*metadata, *annotation.__metadata__))
        return
    # Field(...) in Annotated keeps its own metadata
    merged = [inner for item in metadata for inner in (item, *getattr(item, "metadata", ()))]
    origin, arguments = get_origin(annotation), get_args(annotation)
    is_bounded = {
        list: any(isinstance(item, FailFast) and item.fail_fast for item in merged),
        dict: any(isinstance(item, BeforeValidator) for item in merged),
    }
    if origin in is_bounded and arguments[-1] is not Any and not is_bounded[origin]:
        yield str(annotation)
    for argument in arguments:
        yield from unbounded(argument)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model.__module__.split('.')[-2]}.{model.__name__}")
def test_every_list_and_mapping_of_a_body_has_a_bounded_number_of_errors(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        assert not list(unbounded(field.annotation, tuple(field.metadata))), name


@pytest.mark.parametrize(
    "model",
    [model for model in MODELS if model.model_config.get("extra") == "forbid"],
    ids=lambda model: model.__name__,
)
def test_many_unknown_fields_are_one_error(model: type[BaseModel]) -> None:
    with pytest.raises(ValidationError) as error:
        model.model_validate({f"unknown_{number}": 1 for number in range(NUM_FIELDS)})
    unknown = [item["loc"] for item in error.value.errors() if item["type"] == "extra_forbidden"]
    assert unknown in ([("unknown_0",)], [])  # a check of the whole body may come before
    assert error.value.error_count() < 10


def test_entries_are_counted_before_they_are_validated() -> None:
    with pytest.raises(ValidationError, match="20000 entries, the maximum is 8192") as error:
        env_service.ResetBody.model_validate({"seeds": dict.fromkeys(map(str, range(20_000)), "x")})
    assert error.value.error_count() == 1
    assert at_most(2).func([1, 2]) == [1, 2]
