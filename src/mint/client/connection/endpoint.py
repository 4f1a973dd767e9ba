"""Which server to talk to, and the headers of every request. Opens no connection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import mint.wire as wire
from mint.config import EMBEDDED_URL
from mint.errors import InvalidRequestError
from mint.version import VERSION


@dataclass(frozen=True)
class Endpoint:
    """A server, the key for it, and further headers; `base_url` None means the service in this process."""

    base_url: str | None
    api_key: str | None = field(default=None, repr=False)
    extra_headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise InvalidRequestError(
                "is not the address of a server",
                field="base_url",
                value=self.base_url,
                remedy="Write http://HOST:PORT or https://HOST, with a path prefix where the server has one",
            )

    @property
    def url(self) -> str:
        """The URL that all routes are below; ends with a slash."""
        return (self.base_url or EMBEDDED_URL).rstrip("/") + wire.API_PREFIX + "/"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request, their names in lower case."""
        key = {"x-api-key": self.api_key} if self.api_key is not None else {}
        ours = {"content-type": wire.MEDIA_TYPE, "user-agent": f"mint/{VERSION}", "x-sdk-version": VERSION}
        return {**ours, **key, **{name.lower(): value for name, value in self.extra_headers.items()}}
