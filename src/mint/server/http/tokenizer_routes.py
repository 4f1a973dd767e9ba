"""The tokenizers of the base models, for clients on machines that have no copy of them."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

import mint.wire as wire
from mint.server.http.route_table import Call, RouteRow, answer
from mint.tokenizer import tokenizer_files
from mint.types import TokenizerFilesResponse


async def get_tokenizer(call: Call) -> Response:
    """The text files that a base model's tokenizer is made of."""
    base_model = call.request.path_params["base_model"]
    folder = call.service.bases.folder(base_model)
    files = await asyncio.to_thread(tokenizer_files, folder)
    return answer(TokenizerFilesResponse(base_model=base_model, files=files))


ROUTES: tuple[RouteRow, ...] = (
    RouteRow(
        "GET", f"{wire.API_PREFIX}/tokenizers/{{base_model:path}}", get_tokenizer, response=TokenizerFilesResponse
    ),
)
