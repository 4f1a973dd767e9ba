"""A bug: a request that can never succeed is refused with 409, after which public SDKs send it again, for hours."""

from mint.errors import ConflictError

ConflictError.status = 409
