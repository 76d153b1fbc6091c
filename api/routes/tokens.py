"""/tokens: issues, lists and revokes tokens (I17). A token acts only on those that reach no further than itself."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from api.http.content import decode
from api.http.request import Request
from api.http.response import Response, ok_response
from api.http.route import Route
from api.openapi.service_views import IssuedView, RevokedView, TokensView
from api.routes.status import NEVER_KEPT
from schemaless.access import LIFETIME_DEFAULT, Scope, now_us
from schemaless.ops.tokens import anybody, create_token, known_tokens, revoke_token

PAYLOAD_BYTES_MAX = 16 << 10


class TokenRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A token to issue: read, write or admin, for this datastore unless `datastores` names others. It ends with the
    caller's own at the latest.
    """

    name: str
    scope: Annotated[str, msgspec.Meta(extra_json_schema={"enum": [str(scope) for scope in Scope]})]
    expires: str = LIFETIME_DEFAULT
    datastores: list[str] = []

    example: ClassVar[Any] = {"name": "loader", "scope": "write", "expires": "90d"}


async def post_token(request: Request) -> Response:
    """A new token for this datastore, or for `datastores`. The answer shows it once: only its digest is stored."""
    request.query()
    asked = decode(await request.payload(PAYLOAD_BYTES_MAX), request.request_format().decoder(TokenRequest), "token")
    state = request.state
    datastores = asked.datastores or [request.path["datastore"]]
    request.action = f"name={asked.name} scope={asked.scope} expires={asked.expires} datastores={','.join(datastores)}"
    issued = await create_token(
        state.storage,
        asked.name,
        datastores,
        asked.scope,
        asked.expires,
        request.token or anybody(),
    )
    state.tokens.learn([issued.token])
    view = {"token": issued.secret, **issued.token.view(now_us()), "unreached": issued.unreached}
    return ok_response(request.response_format(), view, NEVER_KEPT, status=201)


async def get_tokens(request: Request) -> Response:
    """The tokens that reach this datastore, without their secrets."""
    request.query()
    datastore, now = request.path["datastore"], now_us()
    known = sorted((await known_tokens(request.state.storage)).values(), key=lambda token: token.created_at)
    views = [token.view(now) for token in known if token.reaches(datastore)]
    return ok_response(request.response_format(), {"tokens": views}, NEVER_KEPT)


async def delete_token(request: Request) -> Response:
    """The valid token of that name is revoked. `unreached` are clusters that learn it when they are back."""
    request.query()
    name = request.path["name"]
    unreached = await revoke_token(request.state.storage, name, request.token or anybody())
    await request.state.tokens.refresh()
    return ok_response(request.response_format(), {"name": name, "unreached": unreached}, NEVER_KEPT)


ROUTES = (
    Route("POST", "/tokens", post_token, Scope.ADMIN, payload=TokenRequest, answers={201: IssuedView}, problems=(409,)),
    Route("GET", "/tokens", get_tokens, Scope.ADMIN, answers={200: TokensView}),
    Route("DELETE", "/tokens/{name}", delete_token, Scope.ADMIN, answers={200: RevokedView}),
)
