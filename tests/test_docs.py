"""The pages in docs/: links lead somewhere, code is Python, names exist, and what is generated is what the code says now."""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import peft_nvfp4

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}; there are {sorted(anchors(file))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_is_python_and_imports_what_exists(page):
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("peft_nvfp4"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), f"{page.name}: {ast.unparse(node)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_and_names_that_are_mentioned_exist(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:benchmarks|examples|docs|csrc|tests)/[\w./*-]+)`", text):
        assert list(ROOT.glob(path)), f"{page.name} speaks of {path}"
    for name in re.findall(r"`peft_nvfp4\.([A-Za-z_0-9]+)", text):
        found = hasattr(peft_nvfp4, name) or importlib.util.find_spec(f"peft_nvfp4.{name}")
        assert found, f"{page.name} speaks of peft_nvfp4.{name}"


def test_the_configuration_page_is_what_the_code_says():
    module = script("make_configuration")
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run python docs/make_configuration.py"
