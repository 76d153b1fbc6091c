"""The OpenAPI document: valid, with a shape and an example for each request, answer and problem, and named shortly."""

import msgspec
import pytest
from openapi_spec_validator import validate

from api.http.openapi import document_of
from api.http.response import KINDS
from api.routes import ROUTES

SHAPES = {
    f"{route.name} {what}": shape
    for route in ROUTES
    for what, shape in {"payload": route.payload, **route.answers}.items()
    if shape is not None
}


@pytest.fixture(scope="module")
def document():
    return {
        "openapi": "3.1.0",
        "info": {"title": "Schemaless", "version": "1"},
        **document_of(ROUTES, public_paths=("/healthz",)),
    }


def operations(document):
    return {each["operationId"]: each for methods in document["paths"].values() for each in methods.values()}


def test_the_document_is_valid(document):
    """By the validator of the specification, which follows every reference."""
    validate(document)


def test_a_write_links_to_what_may_be_asked_of_it_then(document):
    """A link gives all path parameters of its operation, from the request or from members of the answer."""
    found = operations(document)
    links = {name: each["responses"]["201"]["links"] for name, each in found.items() if "201" in each["responses"]}
    assert {"get_cell", "get_latest", "get_row"} <= links["put_cell"].keys()
    assert links["post_version"]["get_cell"]["parameters"] == {
        "path.datastore": "$request.path.datastore",
        "path.row_key": "$request.path.row_key",
        "path.column": "$request.path.column",
        "path.ref_key": "$response.body#/ref_key",
    }
    for own in links.values():
        for link in own.values():
            parameters = found[link["operationId"]]["parameters"]
            in_path = {f"path.{each['name']}" for each in parameters if each["in"] == "path"}
            assert link["parameters"].keys() == in_path


def test_an_operation_is_named_after_its_handler(document):
    """Names of functions in generated clients are short, and each exists once."""
    assert set(operations(document)) == {route.name for route in ROUTES}
    assert len({route.name for route in ROUTES}) == len(ROUTES)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_example_has_the_shape_that_it_shows(shape):
    """Examples are read by people who have nothing else."""
    example = getattr(shape, "example", None)
    if example is None:
        (example,) = msgspec.json.schema(shape)["examples"]
    msgspec.convert(example, shape)


def test_each_content_has_one_media_type_a_schema_and_an_example(document):
    """Others beside JSON would double the types of generated clients."""
    contents = [
        (name, content)
        for name, operation in operations(document).items()
        for content in (
            operation.get("requestBody", {}).get("content"),
            *(response.get("content") for response in operation["responses"].values()),
        )
        if content is not None
    ]
    contents += [(name, response["content"]) for name, response in document["components"]["responses"].items()]
    assert [name for name, content in contents if len(content) > 1] == []
    for name, content in contents:
        for media in content.values():
            assert media["schema"], name
            assert media.keys() & {"example", "examples"} or "examples" in media["schema"], name


def test_every_kind_of_problem_is_shown(document):
    """With the status that it has, and an example."""
    shown = {}
    for response in document["components"]["responses"].values():
        shown |= response["content"]["application/problem+json"]["examples"]
    assert {(kind.name, kind.status) for kind in KINDS.values()} <= {
        (name, example["value"]["status"]) for name, example in shown.items()
    }


def test_a_token_is_needed_but_for_public_paths(document):
    """Generated clients ask for a token."""
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    open_to_all = {name for name, operation in operations(document).items() if "security" not in operation}
    assert open_to_all == {"healthz"}


def test_objects_of_any_members_say_so(document):
    """A generator takes an object that names none, and doesn't allow more, for an empty one."""
    body = document["components"]["schemas"]["CellView"]["properties"]["body"]
    assert (body["type"], body["additionalProperties"]) == ("object", True)


def test_payloads_have_no_other_members_and_answers_may_get_some(document):
    """A new member of an answer breaks no generated client."""
    schemas = document["components"]["schemas"]
    assert schemas["TokenRequest"]["additionalProperties"] is False
    assert "additionalProperties" not in schemas["CellView"]
