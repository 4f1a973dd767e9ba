"""A checkpoint's path: its parts, and how it is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, PlainSerializer

from mint.errors import InvalidRequestError

_PATH = re.compile(
    r"(?:mint|tinker)://(?P<model_id>[^/]+)/(?P<kind>weights|sampler_weights|external_weights)/(?P<name>[^/]+)"
)


def _shown(path: str) -> str:
    return "mint://" + path.removeprefix("tinker://") if path.startswith("tinker://") else path


def _sent(path: str) -> str:
    return "tinker://" + path.removeprefix("mint://") if path.startswith("mint://") else path


CheckpointUri = Annotated[str, AfterValidator(_shown), PlainSerializer(_sent)]
"""A checkpoint's path: `mint://…` in Python, `tinker://…` on the wire, as every client of this protocol reads it."""


def is_checkpoint_path(text: str) -> bool:
    """Whether the text is written as the path of a checkpoint is; any other text may name a base model."""
    return _PATH.fullmatch(text) is not None


@dataclass(frozen=True)
class CheckpointPath:
    """A checkpoint's path in its parts."""

    model_id: str
    kind: str
    name: str

    @property
    def uri(self) -> str:
        """The path as sent to clients; the SDK shows `mint://`."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    @property
    def archive_name(self) -> str:
        """The file that a download is written to where only a folder is named: of this checkpoint and no other."""
        return f"{self.model_id}-{self.kind}-{self.name}.tar.gz".replace(":", "-")  # some file systems have no colon

    @classmethod
    def parse(cls, path: str) -> CheckpointPath:
        """The parts of `mint://…` or `tinker://…`.

        Raises:
            InvalidRequestError: the text is not such a path.
        """
        match = _PATH.fullmatch(path)
        if match is None:
            raise InvalidRequestError(
                "is not a checkpoint path",
                field="path",
                value=path,
                remedy="Pass what save_state or save_weights_for_sampler returned: mint://MODEL_ID/weights/NAME",
            )
        return cls(**match.groupdict())
