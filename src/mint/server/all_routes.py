"""Every route of the server: training, files, management, the protocols of OpenAI and Anthropic, operations."""

from __future__ import annotations

from mint.server.http import file_routes, management_routes, operations_routes, protocol_routes, tokenizer_routes
from mint.server.http.route_table import RouteRow
from mint.server.messages_api import routes as messages_routes
from mint.server.openai import routes as openai_routes
from mint.server.responses_api import routes as responses_routes

ROUTES: tuple[RouteRow, ...] = (
    *protocol_routes.ROUTES,
    *file_routes.ROUTES,
    *management_routes.ROUTES,
    *openai_routes.ROUTES,
    *responses_routes.ROUTES,
    *messages_routes.ROUTES,
    *operations_routes.ROUTES,
    *tokenizer_routes.ROUTES,
)
