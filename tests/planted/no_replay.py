"""A bug: a restored model lacks what was done after its snapshot."""

from mint.server.worker.recovery import Recovery

Recovery._replay = lambda *_: None
