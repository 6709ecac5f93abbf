"""Hooks of the site (``mkdocs.yml``): files outside of this folder that pages link to, and names in docstrings.

Pages are read on GitHub, too, so they link to ``../benchmarks/REPORT.md`` as it lies in the repository. The site
gets those files.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("benchmarks/*.md", "benchmarks/results/**/*.*", "examples/**/*.py")
ROLE = re.compile(r":(?:py:)?(?:func|class|mod|meth|attr|data|obj):<code>~?([^<]+)</code>")
"""Sphinx's way to name something, as Markdown makes HTML of it."""


def on_files(files: Files, config: Any) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            if path.suffix not in (".pyc",) and path.is_file():
                files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links out of ``docs``, and into it, are links within the site."""
    if page.file.src_uri.startswith("benchmarks/"):
        return markdown.replace("](../docs/", "](../")
    return re.sub(r"\]\(\.\./(benchmarks|examples)/", r"](\1/", markdown)


def on_page_content(html: str, **_: Any) -> str:
    return ROLE.sub(r"<code>\1</code>", html)
