"""Hook of hatchling: the README and the addresses of a package.

`REPOSITORY_URL` names the repository in which a release is published. With it the links of the README are absolute, and
the package names its pages. Without it the README is as it is in the checkout, and no address is invented.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

SCRIPTS = Path(__file__).parent


class PackageMetadata(MetadataHookInterface):
    """Fills in the fields that `pyproject.toml` calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the fields of `[project]`."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        url = os.environ.get("REPOSITORY_URL", "").rstrip("/")
        if url:
            absolute_links = runpy.run_path(str(SCRIPTS / "readme_links.py"))["absolute_links"]
            text = absolute_links(text, url, f"v{metadata['version']}")
            metadata["urls"] = {
                "Homepage": url,
                "Documentation": f"{url}/blob/v{metadata['version']}/docs/index.md",
                "Changelog": f"{url}/blob/v{metadata['version']}/CHANGELOG.md",
                "Issues": f"{url}/issues",
                "Source": url,
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
