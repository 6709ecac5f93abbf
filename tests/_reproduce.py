"""What the tests of ``benchmarks/reproduce`` share: made-up rows in the files' real layouts, and a tokenizer of letters."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from reproduce import sources

WORDS = "good bad fine awful great dull red blue green film story".split()


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data folder with rows for every task."""
    monkeypatch.setenv("PEFT_NVFP4_DATA", str(tmp_path))
    write_rows(tmp_path / "reproduce")
    return tmp_path


def lettered(options: list[str]) -> str:
    return "\n".join(f"{letter}. {text}" for letter, text in zip("ABCDE", options))


def write_rows(folder: Path, rows: int = 30) -> None:
    """All files of the sources, with made-up rows; no two of a group are alike."""
    folder.mkdir(parents=True)
    put = lambda name, items: (folder / name).write_text("\n".join(json.dumps(item) for item in items))
    texts = [f"the {WORDS[i % 11]} story {i}" for i in range(rows)]
    (folder / "movies.txt").write_text("\n".join(f"{i}\t{2 if i % 2 else -2}\t{t}" for i, t in enumerate(texts)))
    yes_no = [{"question": f"is it {t}", "passage": f"{t} . " * 40, "label": i % 3 == 0} for i, t in enumerate(texts)]
    put("boolq_combined.jsonl", [*yes_no, {"question": "is it unlabelled", "passage": "no"}])
    put("boolq_dev.jsonl", [{"question": r["question"], "passage": r["passage"], "answer": "True"} for r in yes_no[:8]])
    for name, count in (("piqa", 2), ("siqa", 3), ("commonsenseqa", 5), ("openbookqa", 4), ("disambiguation_qa", 3)):
        choices = [[f"{WORDS[(i + c) % 11]} {'film ' * c}{i}" for c in range(count)] for i in range(rows)]
        found = [{"question": f"{name} {t} ?", "options": lettered(c), "answer": f"B. {c[1]}"} for t, c in zip(texts, choices)]
        put(f"{name}.jsonl", [*found, {"question": "?", "options": "A. x\nB. y", "answer": "C. z"}])
    put("asdiv.jsonl", [{"passage": t, "question": "how many ?", "answer": f"{i} red"} for i, t in enumerate(texts)])
    put("disfl_qa.jsonl", [{"passage": t + " .", "question": "what ?", "answer": t.split()[1]} for t in texts])
    put("xsum.jsonl", [{"document": f"{t} " * 30, "summary": t} for t in texts])
    (folder / "alpaca.json").write_text(json.dumps([{"instruction": t, "input": "", "output": t[::-1]} for t in texts]))
    lines = []
    for lemma in range(rows):
        lines += [f"noun{lemma}{sense}\tword{lemma}\tthe word{lemma} is {sense} {k}" for sense in "ab" for k in range(2)]
    (folder / sources.EXAMPLES).write_text("\n".join(lines))
    long = [" ".join(WORDS[(i + j) % 11] for j in range(60)) for i in range(30)]
    put("c4_demo.jsonl", [{"text": t} for t in long])
    (folder / "wiki_demo.txt").write_text("\n".join(f"again {t}" for t in long))


class Letters:
    """A token is a letter's number."""

    eos_token_id, pad_token_id = 1, 1

    def __call__(self, text, add_special_tokens=False):
        read = lambda text: [2 + ord(c) % 100 for c in text]
        return SimpleNamespace(input_ids=read(text) if isinstance(text, str) else [read(t) for t in text])
