"""`np`: numpy where it is installed, else the part of it that values and messages need (`plain`).

The SDK does not require numpy, which would be half of what its install takes on the disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mint.errors import MissingExtraError

if TYPE_CHECKING:
    import numpy as np
else:
    try:
        import numpy as np
    except ModuleNotFoundError:
        from mint.types.arrays import plain as np

HAS_NUMPY: bool = np.__name__ == "numpy"

__all__ = ["HAS_NUMPY", "np", "require_numpy"]


def require_numpy(what: str) -> None:
    """Raises `MissingExtraError` if numpy, which `what` needs, is not installed."""
    if not HAS_NUMPY:
        raise MissingExtraError(f"{what} needs the package numpy, which is not installed", remedy="pip install numpy")
