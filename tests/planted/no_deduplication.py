"""A bug: a request that comes again is refused as if it were another one."""

from mint.server.service import service

service.is_repeat = lambda *_: False
