"""A bug: a process that lives is taken for dead. Its sessions are served by another one, and it goes on writing."""

from mint.server.store.instances import Instance

Instance.is_held = lambda *_: False
