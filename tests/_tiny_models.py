"""A tiny random Llama with a tokenizer of its own, saved as a folder: what the command line is tried on. And archives."""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import transformers
from conftest import tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = "the a film story is was good bad fine awful great dull question answer what red blue green positive negative Label : ? ."
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m['role'] == 'user' else '<bot> ' }}{{ m['content'] }}{{ ' </s>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<bot> ' }}{% endif %}"
)


def images_or_skip():
    """PIL.Image, where transformers has what it wants for images: 5.12 asks for torchvision, in a class that does without."""
    image = pytest.importorskip("PIL.Image", reason="not run: Pillow is not installed")
    try:
        transformers.Idefics3ImageProcessorPil()
    except ImportError as error:
        pytest.skip(f"not run: {error}")
    return image


def tiny_tokenizer(template: str | None = TEMPLATE, words: Iterable[str] = WORDS.split()) -> PreTrainedTokenizerFast:
    words = ["<unk>", "<s>", "</s>", "<user>", "<bot>", *words]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def save_tiny(folder: Path, **overrides) -> Path:
    """Model and tokenizer in ``folder``."""
    tiny_llama(**{"vocab_size": 64, **overrides}).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_first_minute(folder: Path) -> Path:
    """What README's and the quick start's code reads, in ``folder``: the model "tiny", and rows to train on."""
    save_tiny(folder / "tiny")
    rows = [{"prompt": "question the film", "completion": "answer good"}, {"prompt": "the story", "completion": "dull and bad"}]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows * 4)))
    return folder


def tar_bytes(files: dict[str, bytes]) -> bytes:
    """An archive with these members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
