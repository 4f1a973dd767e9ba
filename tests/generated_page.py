"""Parts of a Markdown page that tests write, between two comments."""

from __future__ import annotations

from pathlib import Path


def replace_part(page: Path, part: str, text: str) -> None:
    """Writes what stands between the comments `part: generated` and `end of part`."""
    begin, end = f"<!-- {part}: generated -->", f"<!-- end of {part} -->"
    before, found, rest = page.read_text().partition(begin)
    assert found and end in rest, f"{page} has no part {part!r}"
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{rest.partition(end)[2]}")
