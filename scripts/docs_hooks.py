"""Hooks of mkdocs: pages that are not in docs/ or are made of the code, and links between them.

GitHub shows the same files in their folders. So links are written for the repository and changed here for the site:
a link to another page leads to that page; a link to a source file leads to the repository, or is plain text where no
`repo_url` is set.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference_pages import command_line, http_api  # beside this file

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "benchmarks/LOG.md",
    "benchmarks/README.md",
    "benchmarks/RESULTS.md",
    "examples/README.md",
)
"""Files of the repository that are pages of the site under the same path."""

GENERATED = {"api/command_line.md": command_line, "api/http.md": http_api}
"""Pages of the site and what writes them."""

LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from outside docs/, and those that are made of the code."""
    for path, page in GENERATED.items():
        files.append(File.generated(config, path, content=page()))
    for path in PAGES:
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Rewrites the links of one page."""
    uri = page.file.src_uri
    folder = posixpath.dirname(uri if uri in PAGES else f"docs/{uri}")

    def rewrite(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link["path"]))
        page_uri = target.removeprefix("docs/")
        if files.get_file_from_path(page_uri) is not None:
            relative = posixpath.relpath(page_uri, posixpath.dirname(uri) or ".")
            return f"[{link['text']}]({relative}{link['anchor'] or ''})"
        if not (ROOT / target).exists():
            return link[0]  # mkdocs reports it
        return f"[{link['text']}]({config.repo_url}/blob/main/{target})" if config.repo_url else link["text"]

    return LINK.sub(rewrite, markdown)
