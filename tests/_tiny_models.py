"""A tiny random Llama with a tokenizer of its own, saved as a folder: what the command line is tried on."""

from pathlib import Path

from conftest import tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = "the a film story is was good bad fine awful great dull question answer what red blue green positive negative Label : ? ."
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' if m['role'] == 'user' else '<bot> ' }}{{ m['content'] }}{{ ' </s>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<bot> ' }}{% endif %}"
)


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = ["<unk>", "<s>", "</s>", "<user>", "<bot>", *WORDS.split()]
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
