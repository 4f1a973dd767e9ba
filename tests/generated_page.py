"""Parts of a Markdown page that tests write, between two comments."""

from __future__ import annotations

from pathlib import Path


def read_part(page: Path, part: str) -> str:
    """What stands between the comments `part: generated` and `end of part`."""
    return _split(page, part)[1].strip()


def replace_part(page: Path, part: str, text: str) -> None:
    """Writes what stands between the comments `part: generated` and `end of part`."""
    before, _, after = _split(page, part)
    page.write_text(f"{before}\n\n{text.strip()}\n\n{after}")


def _split(page: Path, part: str) -> tuple[str, str, str]:
    """What comes before the part, with its first comment; the part; what comes after it, with its second comment."""
    begin, end = f"<!-- {part}: generated -->", f"<!-- end of {part} -->"
    before, found, rest = page.read_text().partition(begin)
    inside, ended, after = rest.partition(end)
    assert found and ended, f"{page} has no part {part!r}"
    return before + begin, inside, end + after
