"""/docs: Swagger UI over /openapi.json. Its files are part of a package, so the page asks no other server."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI
from fastapi import Request as StarletteRequest
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

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
