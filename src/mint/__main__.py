"""`mint` and `python -m mint`: the command line, or what to install where its packages are missing.

The base install is the SDK, which needs no command line; `mint[cli]` and all that includes it have one.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from mint.extras import install_command
from mint.version import VERSION

PACKAGES = frozenset({"rich", "typer"})
INTERRUPTED = 130


def main() -> None:
    try:
        from mint.cli.main import app  # deferred: its packages may be missing, and Ctrl-C may come while they load
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        _stop_without(error.name)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    app()


def _stop_without(package: str) -> NoReturn:
    """Answers `--version`, and says for everything else which extra has a command line."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"mint {VERSION}\n")
        sys.exit()
    choices = {
        "local": "to train or serve on this machine",
        "rl": "to train on a server",
        "cli": "for the models and checkpoints of a server",
    }
    lines = [f"    {install_command(extra)}    # {purpose}" for extra, purpose in choices.items()]
    told = f"MissingExtraError: the command line needs the package {package}, which is not installed. Choose one:"
    sys.exit("\n".join([told, *lines]))


if __name__ == "__main__":
    main()
