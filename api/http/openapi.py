"""The OpenAPI document of the route table: operations, the shapes that they name, and their problems.

It shows JSON only. Twins in MessagePack and NDJSON, and the stream of a log's events, would double the types in
generated clients. So descriptions say that they exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi import Request as StarletteRequest
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from api.http.asgi import Route
from api.http.content import JSON
from api.http.response import HEAD_TOO_LARGE_KIND, KINDS, METHOD_NOT_ALLOWED, ProblemKind, problem
from schemaless.cell import COLUMN_NAME
from schemaless.contract.cells import ProblemView
from schemaless.contract.parameters import READ_FROM, REF_KEY, TEXT

DESCRIPTION = """\
An append-only store of immutable JSON cells on sharded MySQL, and the log of every shard.

Requests and answers may also be MessagePack (`application/msgpack`), those of batches also NDJSON
(`application/x-ndjson`, one item a line), by Content-Type and Accept. Every answer that is no success is a problem
document (RFC 9457)."""
PROBLEM_MEDIA_TYPE = "application/problem+json"
_REF = "#/components/schemas/{name}"
_ALWAYS = (401, 403, 421, 422, 429, 431, 500, 503)
_WITH_PAYLOAD = (400, 413, 415)
_PATH_PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "datastore": {"type": "string", "pattern": "^[a-z][a-z0-9_]{0,31}$", "example": "mezzanine"},
    "row_key": {"type": "string", "format": "uuid"},
    "column": {"type": "string", "pattern": f"^{COLUMN_NAME.pattern}$", "example": "BASE"},
    "ref_key": REF_KEY,
    "shard": {"type": "integer", "minimum": 0},
    "program": {"type": "string", "pattern": "^[!-.0-~]{1,120}$", "example": "billing"},
    "job": {"type": "string", "pattern": "^[0-9a-f]{16}$"},
}
_ON_READS = {
    "Schemaless-Served-By": "master or minion: the role of the server that was read.",
    "Schemaless-Cluster": "The cluster that was read.",
    "Schemaless-Lag": "How many seconds the server may be behind.",
}


def document_of(routes: Sequence[Route], *, public_paths: Iterable[str] = ()) -> dict[str, Any]:
    """Returns `paths` and `components`. Requests of public paths need no token."""
    shapes = [*_shapes(routes), ProblemView]
    schemas, components = msgspec.json.schema_components(shapes, ref_template=_REF)
    schema_of = {id(shape): schema for shape, schema in zip(shapes, schemas, strict=True)}
    public = frozenset(public_paths)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, schema_of, routes)
        if route.path not in public:
            operation["security"] = [{"token": []}]
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    for component in components.values():
        # Answers may get members, so a client must take those that it doesn't know. Payloads have no others.
        if component.get("title", "").endswith("View"):
            component.pop("additionalProperties", None)
        _name_open_objects(component)
    for schema in schemas:
        _name_open_objects(schema)
    return {
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": _problem_responses(schema_of[id(ProblemView)]),
            "headers": {name: _text_header(description) for name, description in _ON_READS.items()},
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A token of `schemaless token create`, or a JWT of the issuer that is configured."
                    " Until the first token exists, the API serves loopback without one.",
                }
            },
        },
    }


def _shapes(routes: Iterable[Route]) -> list[Any]:
    """Returns every shape once. Those of equal dictionaries with other notes are two."""
    found = {}
    for route in routes:
        for shape in (route.payload, *route.answers.values()):
            if shape is not None:
                found[id(shape)] = shape
    return list(found.values())


def _operation(route: Route, schema_of: Mapping[int, Any], routes: Sequence[Route]) -> dict[str, Any]:
    text = (route.handler.__doc__ or route.name).strip()
    operation: dict[str, Any] = {
        "tags": [next((part for part in route.path.split("/") if part not in ("", "v1", "{datastore}")), "service")],
        "summary": text.partition(". ")[0].partition(".\n")[0].rstrip("."),
        "description": " ".join(text.split()),
        "operationId": route.name,
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": _PATH_PARAMETERS.get(name, TEXT)}
                for name in route.path_parameters
            ),
            *(parameter.openapi() for parameter in route.parameters),
            *(header.openapi("header") for header in route.headers),
        ],
        "x-schemaless-scope": str(route.scope),
    }
    if route.payload is not None:
        operation["requestBody"] = {"required": not route.optional, "content": _json(route.payload, schema_of)}
    responses: dict[str, Any] = {}
    for status, shape in route.answers.items():
        response: dict[str, Any] = {"description": HTTPStatus(status).phrase}
        content = {} if shape is None else _json(shape, schema_of)
        if status == 200:
            content |= {name: {"schema": {"type": "string"}, "example": shown} for name, shown in route.text.items()}
        if content:
            response["content"] = content
        if READ_FROM in route.parameters:
            response["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in _ON_READS}
        if links := _links(route, shape, routes):
            response["links"] = links
        responses[str(status)] = response
    for status in problem_statuses(route):
        responses[str(status)] = {"$ref": f"#/components/responses/{_problem_name(status)}"}
    return {**operation, "responses": responses}


def _links(route: Route, shape: Any, routes: Iterable[Route]) -> dict[str, Any]:
    """Returns the calls that a write leads to: about the same thing, with path parameters that are known by then."""
    if route.method not in ("PUT", "POST"):
        return {}
    known = {name: f"$response.body#/{name}" for name in getattr(shape, "__struct_encode_fields__", ())}
    known |= {name: f"$request.path.{name}" for name in route.path_parameters}
    links = {}
    for other in routes:
        pairs = zip(route.path.split("/"), other.path.split("/"), strict=False)
        if other is not route and known.keys() >= set(other.path_parameters) and all(one == its for one, its in pairs):
            parameters = {f"path.{name}": known[name] for name in other.path_parameters}
            links[other.name] = {"operationId": other.name, "parameters": parameters}
    return links


def _json(shape: Any, schema_of: Mapping[int, Any]) -> dict[str, Any]:
    media: dict[str, Any] = {"schema": schema_of[id(shape)]}
    example = getattr(shape, "example", None)
    return {JSON.media_type: media if example is None else {**media, "example": example}}


def _name_open_objects(schema: Any) -> None:
    """Says of objects without members of their own that they may have any. Some generators take them for empty."""
    if isinstance(schema, list):
        for each in schema:
            _name_open_objects(each)
    elif isinstance(schema, dict):
        if schema.get("type") == "object" and "properties" not in schema:
            schema.setdefault("additionalProperties", True)
        for name, each in schema.items():
            if name not in ("example", "examples", "default"):
                _name_open_objects(each)


def problem_statuses(route: Route) -> list[int]:
    missing = (404,) if route.path_parameters else ()
    payload = () if route.payload is None else _WITH_PAYLOAD
    return sorted({*_ALWAYS, *missing, *payload, *route.problems})


def _problem_name(status: int) -> str:
    return HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "")


def _problem_responses(schema: Any) -> dict[str, Any]:
    """Returns the responses of all kinds of problems by their status' name, with an example of each kind."""
    by_status: dict[int, list[ProblemKind]] = {}
    for kind in (*KINDS.values(), METHOD_NOT_ALLOWED, HEAD_TOO_LARGE_KIND):
        by_status.setdefault(kind.status, []).append(kind)
    return {
        _problem_name(status): {
            "description": "; ".join(kind.title for kind in kinds),
            "content": {
                PROBLEM_MEDIA_TYPE: {
                    "schema": schema,
                    "examples": {kind.name: {"value": problem(kind, kind.title)} for kind in kinds},
                }
            },
        }
        for status, kinds in sorted(by_status.items())
    }


def _text_header(description: str) -> dict[str, Any]:
    return {"description": description, "schema": {"type": "string"}}


# /docs: Swagger UI over /openapi.json. Its files are part of a package, so the page asks no other server.

PATH = "/docs"
FILES = f"{PATH}/files"
_PACKAGE = "fastapi-offline"

_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
    " connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""Inline: FastAPI's page starts Swagger UI by a script of its own. Nothing is loaded from anywhere else."""


def add_docs(app: FastAPI) -> None:
    """Adds the page and its files to the application."""
    app.mount(FILES, StaticFiles(packages=[("fastapi_offline", "static")]), name="docs-files")
    query = f"?v={version(_PACKAGE)}"  # another version is another file to browsers

    @app.get(PATH, include_in_schema=False)
    async def docs(request: StarletteRequest) -> HTMLResponse:
        root = request.scope.get("root_path", "")
        page = get_swagger_ui_html(
            openapi_url=f"{root}{app.openapi_url}",
            title=app.title,
            swagger_js_url=f"{root}{FILES}/swagger-ui-bundle.js{query}",
            swagger_css_url=f"{root}{FILES}/swagger-ui.css{query}",
            swagger_favicon_url=f"{root}{FILES}/favicon.png{query}",
            swagger_ui_parameters=app.swagger_ui_parameters,
        )
        page.headers["content-security-policy"] = _POLICY
        return page
