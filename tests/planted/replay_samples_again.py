"""A bug: a sample that was lost in a crash, and is sent again, is drawn anew."""

import secrets

from mint.server.worker import sample_requests

sample_requests.sample_seed = lambda *_: secrets.randbits(63)
