"""The tokenizers of the base models, for clients on machines that have no copy of them."""

from __future__ import annotations

from starlette.responses import Response

import mint.wire as wire
from mint.server.http.route_table import Call, RouteRow, respond
from mint.tokenizer import tokenizer_files
from mint.types import TokenizerFilesResponse


def get_tokenizer(call: Call) -> Response:
    """The text files that a base model's tokenizer is made of."""
    base_model = call.request.path_params["base_model"]
    folder = call.service.base_models.folder(base_model)
    return respond(TokenizerFilesResponse(base_model=base_model, files=tokenizer_files(folder)))


ROUTES: tuple[RouteRow, ...] = (
    RouteRow(
        "GET", f"{wire.API_PREFIX}/tokenizers/{{base_model:path}}", get_tokenizer, response=TokenizerFilesResponse
    ),
)
