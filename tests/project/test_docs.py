"""The pages in docs/: links lead somewhere, code is Python, names exist, and what is generated is what the code says now."""

import ast
import importlib
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import peft_nvfp4
from peft_nvfp4 import api
from peft_nvfp4.memory import CARDS, Settings, estimate
from peft_nvfp4.memory.run import room

ROOT = Path(__file__).resolve().parents[2]
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


def test_tables_and_figures_are_those_of_results_files_and_estimator(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    module = script("make_readme_tables")
    assert module.ROOT / "README.md" in module.pages() and len(module.TABLES) > 5
    used = {name for page in module.pages() for _, name, _ in module.MARK.findall(page.read_text(encoding="utf-8"))}
    assert used == set(module.TABLES)
    for page in module.pages():
        text = page.read_text(encoding="utf-8")
        assert text == module.filled(text), f"{page.name}: run python docs/make_readme_tables.py"


def test_a_changed_result_changes_the_table(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    module = script("measured_tables")
    row = {"shape": "1b", "lengths": "fixed", "method": "qlora", "median_ms": 12.4, "mean_ms": 17.0, "peak_gb": 3.21}
    failed = {"shape": "1b", "lengths": "fixed", "method": "nvfp4", "error": "out of memory"}
    (tmp_path / "dropin_h200.json").write_text(json.dumps({"rows": [row, failed]}))
    more = [{**row, "method": word} for word in ("unsloth", "unsloth-bf16", "unsloth-bf16-ckpt", "new-ckpt")]
    (tmp_path / "unsloth_h200.json").write_text(json.dumps({"rows": more}))
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    table = module.dropin()
    assert "| Unsloth, QLoRA |" in table and "| Unsloth, BF16 |" in table and table.count("Unsloth") == 2
    assert module._method("unsloth-bf16-ckpt") == "Unsloth, BF16, `gradient_checkpointing=True`"
    assert module._method("new-ckpt") == "`new`, `gradient_checkpointing=True`"
    assert "| PEFT + bitsandbytes, QLoRA | 12 (17) ms | 3.2 GB |" in table and "nvfp4" not in table


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120 and len(text.split()) <= 1000


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md" and f"]({page.name})" not in index]
    assert not missing
    navigation = re.findall(r"- (?:[\w ]+: )?([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(navigation) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_page_of_the_api_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: peft_nvfp4\.api\.(\w+)$", text, re.M)) == sorted(api.__all__)


def test_commands_that_are_shown_exist_with_their_options():
    typer = pytest.importorskip("typer")
    from peft_nvfp4.cli import application

    known = typer.main.get_command(application()).commands
    options = {name: {flag for p in c.params for flag in (*p.opts, *p.secondary_opts)} for name, c in known.items()}
    shown = 0
    for page in (*PAGES, ROOT / "RELEASING.md"):
        text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
        for line in re.findall(r"(?:^|`)peft-nvfp4 ((?:[a-z]+)(?: [^`\n#&|;]*)?)", text, re.M):
            words = shlex.split(line)
            assert words[0] in known, f"{page.name}: peft-nvfp4 {line}"
            flags = {word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)}
            assert flags <= options[words[0]] | {"--help"}, f"{page.name}: peft-nvfp4 {line}"
            shown += 1
    assert shown > 30


def test_the_configuration_page_is_what_the_code_says():
    module = script("make_configuration")
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run python docs/make_configuration.py"


@pytest.mark.parametrize("family", ("llama", "qwen3_next", "gpt_oss"))
def test_the_page_of_models_says_what_they_do(family, monkeypatch):
    """What is frozen and fused is a matter of structure, the rest of arithmetic that a CPU may round in its own way."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    module = script("make_models")
    results = json.loads(module.RESULTS.read_text(encoding="utf-8"))
    assert module.PAGE.read_text(encoding="utf-8") == module.page(results), "run python docs/make_models.py"
    if results["versions"]["transformers"] != transformers.__version__:
        return  # another version has other families, and other modules in them
    assert results["families"].keys() == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    row, now = results["families"][family], module.measure(family)
    assert module.fault(now) is None, now["failures"]
    for what in ("class", "dense", "fused", "not fused"):
        assert now[what] == row[what], f"run python docs/make_models.py {family}"
    for backend in ("bf16", "nvfp4", "nf4"):
        assert now[backend] == pytest.approx(row[backend], rel=0.2, abs=1e-4)


def test_the_plan_of_a_70b_is_the_estimators():
    page = (ROOT / "docs" / "several-gpus.md").read_text(encoding="utf-8")
    config = json.loads(re.search(r"```json\n(.*?)```", page, re.S)[1])
    ways = ({"memory": "small"}, {"memory": "fast"}, {"backend": "nf4"}, {"backend": "bf16"})
    cards = sorted(CARDS.values(), key=lambda card: card.memory)
    found = []
    for n in (1, 2, 4, 8):
        plans = [Settings(sequence=2048, batch=1, checkpointing=True, cards=n, strategy="fsdp2", **way) for way in ways]
        peaks = [estimate(config, plan).peak for plan in plans]
        smallest = next(card.name for card in cards if room(plans[0], card.memory) >= peaks[0])
        found.append(f"| {' | '.join([str(n), *(f'{peak / 2**30:.1f}' for peak in peaks), smallest])} |")
    assert "\n".join(found) in page, "\n".join(found)
