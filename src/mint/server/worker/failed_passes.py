"""Which data must be sent again before a step, after a pass of a model has failed. Pure: digests in, a decision out.

A step must never apply half of a gradient. After a failed pass it is refused, unless the same data were sent again and
succeeded. What a client had sent behind the failed pass does not count: it may be the rest of the same call, which the
client will repeat as a whole. So from a failure on, the gradient of a pass is dropped, and its data are wanted again,
until a pass has data that are wanted: with it, the client has begun to repeat.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import mint.wire as wire
from mint.errors import InvalidRequestError
from mint.wire.requests import ForwardBackwardInput, ForwardBackwardRequest


def data_digest(content: ForwardBackwardInput) -> str | None:
    """A hash of the data of a pass, without its loss; None if they hold a number that no pass can have."""
    request = ForwardBackwardRequest(
        model_id="", seq_id=0, forward_backward_input=ForwardBackwardInput(data=content.data, loss_fn="")
    )
    try:
        return hashlib.sha256(wire.encode(request, wire.Encoding.PROTO)).hexdigest()
    except InvalidRequestError:
        return None


@dataclass
class FailedPasses:
    """The passes of one model since its last step or load, which begins with a new one of these.

    `wanted` are the digests of the data that must be sent again. `retried` are those of passes that are in the gradient
    and began as such a repetition; `others` counts the passes in the gradient whose data are not known any more.
    `is_lost`: data that nobody can recognise are missing, so that the next step is refused in any case.
    """

    wanted: list[str] = field(default_factory=list)
    retried: list[str] = field(default_factory=list)
    others: int = 0
    is_lost: bool = False

    @property
    def wants_data(self) -> bool:
        """Whether the step would be refused now."""
        return self.is_lost or bool(self.wanted)

    def note_failure(self, digest: str | None) -> None:
        """A pass has failed, and the whole gradient was cleared; `digest` None: its data are not known."""
        self.is_lost = self.is_lost or self.others > 0 or digest is None
        self.wanted += self.retried
        if digest is not None and digest not in self.wanted:  # a repetition that fails, too, is wanted once
            self.wanted.append(digest)
        self.retried = []
        self.others = 0

    def note_success(self, digest: str | None) -> bool:
        """A pass has succeeded; whether its gradient counts. `digest` is needed while `wants_data`."""
        if not self.wants_data or digest is None:
            self.others += 1
            return True
        if digest in self.wanted:
            self.wanted.remove(digest)
        elif not self.retried:
            self.wanted.append(digest)
            return False
        self.retried.append(digest)
        return True
