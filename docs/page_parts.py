"""Tables and paragraphs as the generated pages have them."""

import textwrap
from collections.abc import Iterable


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 150, break_long_words=False, break_on_hyphens=False)
