"""An Ollama ``Modelfile`` beside a GGUF file: ``ollama create NAME`` in the folder makes a model that can be talked to.

Ollama writes a conversation by a template of Go, models have one of Jinja. The texts around a message are found by rendering
conversations, and the Go template that is made of them is used only if it writes the same text as the Jinja template for
conversations of several kinds. If it does not (a template that rewrites messages), none is written, and Ollama takes what it
finds in the GGUF file.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .tokenizer import adds_bos

_MARK = "\x02{}\x03"
"""A content that no template has."""


@dataclass(frozen=True)
class Turns:
    """The texts around messages, of a template that only joins them."""

    with_system: tuple[str, str]
    """Before and after the system's message."""
    without_system: str
    """At the start of a conversation that has none."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    prompt: str
    """After the last user's message, before the answer."""

    def render(self, messages: list[dict[str, str]]) -> str:
        """What :meth:`go` writes, for comparison."""
        system = next((m["content"] for m in messages if m["role"] == "system"), None)
        text = self.without_system if system is None else self.with_system[0] + system + self.with_system[1]
        for message in messages:
            if message["role"] != "system":
                before, after = getattr(self, message["role"])
                text += before + message["content"] + after
        return text + self.prompt

    def go(self) -> str:
        """The template of Ollama. A system's message is used where there is one, and it is not empty."""
        around = lambda turn, content: _go(turn[0]) + "{{ " + content + " }}" + _go(turn[1])
        return (
            "{{ if .System }}" + around(self.with_system, ".System") + "{{ else }}" + _go(self.without_system) + "{{ end }}"
            "{{ range .Messages }}"
            '{{ if eq .Role "user" }}' + around(self.user, ".Content") + ""
            '{{ else if eq .Role "assistant" }}' + around(self.assistant, ".Content") + "{{ end }}"
            "{{ end }}" + _go(self.prompt)
        )


def write_modelfile(
    folder: str | Path, tokenizer: Any, model: str, adapter: str | None = None, generation: Any = None
) -> str | None:
    """Write ``Modelfile`` into a folder.

    Args:
        tokenizer: with the chat template.
        model: what comes after ``FROM``: a GGUF file in the folder, or a name that Ollama knows.
        adapter: a GGUF adapter in the folder.
        generation: the model's ``generation_config``: where answers end, and how tokens are drawn.

    Returns:
        A sentence if the chat template could not be translated; else None.
    """
    turns, missing = turns_of(tokenizer), None
    lines = [f"FROM {model}", *([f"ADAPTER ./{adapter}"] if adapter else [])]
    if turns is not None:
        lines.append(f'TEMPLATE """{turns.go()}"""')
    elif getattr(tokenizer, "chat_template", None):
        missing = "The chat template does more than join messages: Modelfile leaves it to Ollama to recognise the model's"
    lines += [f'PARAMETER stop "{token}"' for token in _stops(tokenizer, generation)]
    if getattr(generation, "do_sample", False):
        for name, word in (("temperature",) * 2, ("top_p",) * 2, ("top_k",) * 2, ("repetition_penalty", "repeat_penalty")):
            if (value := getattr(generation, name, None)) is not None:
                lines.append(f"PARAMETER {word} {value}")
    (Path(folder) / "Modelfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return missing


def _stops(tokenizer: Any, generation: Any) -> list[str]:
    ids = getattr(generation, "eos_token_id", None)
    ids = [*(ids if isinstance(ids, list) else [] if ids is None else [ids]), tokenizer.eos_token_id]
    return list(dict.fromkeys(tokenizer.convert_ids_to_tokens(index) for index in ids if index is not None))


def turns_of(tokenizer: Any) -> Turns | None:
    """The texts around messages; None where there is no template, or one that does more than join messages."""
    if not isinstance(getattr(tokenizer, "chat_template", None), str):
        return None
    bos = tokenizer.bos_token if adds_bos(tokenizer) else ""

    def render(messages: list[dict[str, str]], prompt: bool = True) -> str:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return text.removeprefix(bos or "")  # which llama.cpp puts there

    system, user, answer, again = (
        {"role": role, "content": _MARK.format(number)}
        for number, role in enumerate(("system", "user", "assistant", "user"))
    )
    try:
        found = _found(render, system, user, answer, again)
        same = all(found.render(chat) == render(chat) for chat in _conversations())
    except Exception:  # what a template raises for roles and orders that it does not take is its own
        return None
    return found if same else None


def _found(render: Any, system: dict, user: dict, answer: dict, again: dict) -> Turns:
    """By the differences of a few texts. Raises ValueError where a message is not in the text as it was given."""
    start, rest = _around(render([user], prompt=False), user)
    prompt = render([user])[len(start + user["content"] + rest) :]
    _, tail = _around(render([user, answer, again]), user)
    between, tail = _around(tail, answer)
    after, _ = _around(tail, again)
    # "after user + before assistant" and "after assistant + before user" are cut where the shorter texts say
    user_after = rest
    assistant_before = between.removeprefix(user_after)
    before_system, tail = _around(render([system, user]), system)
    after_system, _ = _around(tail, user)
    user_before = _common_end(start, after_system, after).removeprefix(user_after)  # every message ends itself
    return Turns(
        (before_system, after_system.removesuffix(user_before)),
        start.removesuffix(user_before),
        (user_before, user_after),
        (assistant_before, after.removesuffix(user_before)),
        prompt,
    )


def _around(text: str, message: dict[str, str]) -> tuple[str, str]:
    before, found, after = text.partition(message["content"])
    if not found or message["content"] in after:
        raise ValueError(f"the template does not write the {message['role']}'s message once")
    return before, after


def _common_end(*texts: str) -> str:
    """The longest text with which all end."""
    count = 0
    while all(len(text) > count for text in texts) and len({text[-1 - count] for text in texts}) == 1:
        count += 1
    return texts[0][len(texts[0]) - count :]


def _conversations() -> list[list[dict[str, str]]]:
    """With and without a system's message, of one to three questions."""
    words = ("Hello there", "two\nlines, and {{ braces }}", "1 + 1?")
    chats = []
    for count, system in itertools.product((1, 2, 3), (False, True)):
        chat = [{"role": "system", "content": "You are brief."}] if system else []
        for number in range(count):
            chat.append({"role": "user", "content": words[number]})
            if number + 1 < count:
                chat.append({"role": "assistant", "content": f"answer {number}"})
        chats.append(chat)
    return chats


def _go(text: str) -> str:
    """A text in a template of Go, between the quotes of a Modelfile: what would be an action is written as a string."""
    return text.replace("{{", '{{ "{{" }}').replace('"""', '{{ "\\"\\"\\"" }}')
