"""Documented training recipes learn where a text ends: padding is often the same token."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from _tiny_models import tiny_tokenizer

datasets = pytest.importorskip("datasets", reason="not run: datasets is not installed")
ROOT = Path(__file__).parents[2]
TEXTS = ["the film is good", "the story was dull and bad indeed"]
RECIPES = ["docs/quickstart.md", "examples/finetune_trainer.py", "examples/multi_gpu/train.py"]


def source(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    return text if name.endswith(".py") else re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)


def prepared(name: str) -> tuple:
    """(tokenizer, rows, collator) as a recipe makes them: its statements that mention the tokenizer's padding, ``encode`` or
    ``data``, and the arguments of its Trainer."""
    tokenizer, data = tiny_tokenizer(), datasets.Dataset.from_dict({"text": TEXTS})
    stub = lambda *args, split=None, **kwargs: data if split else {"train": data}
    scope = {"tokenizer": tokenizer, "texts": TEXTS, "load_dataset": stub}
    scope["args"] = SimpleNamespace(max_length=64, data="data.jsonl")
    tree = ast.parse(source(name))
    for node in tree.body:
        targets = [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
        imports = isinstance(node, ast.ImportFrom) and node.module == "transformers"
        if imports or isinstance(node, ast.FunctionDef) or {"tokenizer.pad_token", "data"} & set(targets):
            exec(compile(ast.Module([node], []), name, "exec"), scope)
    (call,) = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "Trainer"]
    arguments = {k.arg: eval(ast.unparse(k.value), scope) for k in call.keywords if k.arg in ("train_dataset", "data_collator")}
    return tokenizer, list(arguments["train_dataset"]), arguments["data_collator"]


@pytest.mark.parametrize("name", RECIPES)
def test_the_end_of_a_text_is_learned_and_padding_is_not(name):
    tokenizer, rows, collate = prepared(name)
    assert tokenizer.pad_token == tokenizer.eos_token
    batch = collate(rows)
    for labels, mask, text in zip(batch["labels"], batch["attention_mask"], TEXTS):
        learned = labels[labels != -100]
        assert len(learned) == mask.sum() == len(text.split()) + 1 and learned[-1] == tokenizer.eos_token_id


def test_no_recipe_masks_padding_by_its_token():
    files = [path for pattern in ("*.md", "docs/*.md", "examples/**/*.py", "notebooks/*.ipynb") for path in ROOT.glob(pattern)]
    named = {str(f.relative_to(ROOT)) for f in files if "DataCollatorForLanguageModeling(" in f.read_text(encoding="utf-8")}
    assert not named and len(files) > 20
