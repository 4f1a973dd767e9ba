"""The links of README.md as a package page needs them: absolute, at the tag of a release."""

from __future__ import annotations

import re

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def absolute_links(text: str, repository_url: str, ref: str) -> str:
    """The text with each relative link under `repository_url`, at the tag, branch or commit `ref`.

    Links to other hosts and to headings of the page itself stay. The addresses are GitHub's: `blob` for a page, `raw`
    for a picture.
    """

    def absolute(link: re.Match[str]) -> str:
        if re.match(r"[a-z][a-z0-9+.-]*:|#", link["target"]):
            return link[0]
        view = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({repository_url}/{view}/{ref}/{link['target']})"

    return _LINK.sub(absolute, text)
