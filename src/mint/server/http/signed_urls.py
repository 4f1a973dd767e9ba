"""Signs addresses: whoever has one can fetch one file of one checkpoint for an hour, without a key.

The secret stays in the data directory.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from mint.errors import AuthenticationError
from mint.models.tensor_files import write_file

SECRET_FILE = "url_secret"
LIFETIME_S = 3600
_SECRET_BYTES = 32


class Signer:
    """Signs and checks with the secret of one data directory."""

    def __init__(self, data_dir: Path) -> None:
        """Reads the secret, or creates one that only this user can read; processes with the same folder share it."""
        path = data_dir / SECRET_FILE
        if not path.is_file():
            fresh = path.with_name(f".{SECRET_FILE}.{secrets.token_hex(8)}")
            write_file(fresh, [secrets.token_bytes(_SECRET_BYTES)])  # mode 0600, like every temporary file
            try:
                os.link(fresh, path)
            except FileExistsError:
                pass  # another process was first: its secret is used
            finally:
                fresh.unlink()
        self._secret = path.read_bytes()

    def sign(self, *parts: str, expires_at: int) -> str:
        """The signature over `parts`, in hexadecimal, good until `expires_at` (seconds since the epoch)."""
        text = "\n".join([*parts, str(expires_at)])
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def check(self, *parts: str, expires_at: str, signature: str, now: float) -> None:
        """Checks that the signature is right and has not expired.

        Raises:
            AuthenticationError: it is not.
        """
        fine = expires_at.isascii() and expires_at.isdigit() and len(expires_at) <= 12
        wanted = self.sign(*parts, expires_at=int(expires_at) if fine else 0)
        if not (hmac.compare_digest(wanted.encode(), signature.encode()) and fine):
            raise AuthenticationError("the address is not one that this server has signed", remedy="Ask for a new one")
        if now >= int(expires_at):
            raise AuthenticationError("the address has expired", remedy="Ask for a new one")
