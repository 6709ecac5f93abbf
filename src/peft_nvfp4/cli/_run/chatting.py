"""A conversation with a model: questions and answers under its chat template, answers in pieces as they come.

The whole conversation is given to ``generate`` for every answer; its decode steps are recorded where there is a GPU
(:mod:`peft_nvfp4.training.decoding`).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import StoppingCriteria, TextStreamer

from .models import positions


class Answer(NamedTuple):
    """``tokens`` are those that were made, with the one that ended the answer."""

    text: str
    tokens: int
    seconds: float
    stopped: bool


class Pieces(TextStreamer):
    """Whole words of an answer, to a function."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show, self.text = show, ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text
        self.show(text)


class StopWhenAsked(StoppingCriteria):
    """Ends an answer. As a context: a first SIGINT asks for it, a second raises KeyboardInterrupt."""

    asked = False

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), self.asked, dtype=torch.bool, device=input_ids.device)

    def _ask(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __enter__(self) -> StopWhenAsked:
        main = threading.current_thread() is threading.main_thread()  # nobody sends signals to another one
        self.before = signal.signal(signal.SIGINT, self._ask) if main else None
        return self

    def __exit__(self, *error: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)


class Chat:
    """A conversation.

    Args:
        system: the system's message.
        template: of a prompt, with ``{text}`` where the question goes, for a tokenizer without a chat template. Then every
            question is a prompt of its own.
        how: settings of ``generate``, instead of the model's.

    Attributes:
        messages: so far, in the form of chat templates.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, system: str | None = None, template: str | None = None, **how: Any
    ):
        self.model, self.tokenizer, self.template, self.how = model.eval(), tokenizer, template, how
        self.remembers = bool(getattr(tokenizer, "chat_template", None))
        if system is not None and not self.remembers:
            raise ValueError("this tokenizer has no chat template, so there is no place for a system's message")
        self.first = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system's message."""
        self.messages = list(self.first)

    def answer(self, question: str, show: Callable[[str], None]) -> Answer:
        """Ask. ``show`` gets the answer in pieces.

        Raises:
            ValueError: the conversation is longer than the model was made for, or its template refuses it. It is as before then.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        ids = self._encoded(asked, question)
        length, limit = ids.shape[1], positions(self.model.config)
        if limit is not None and length >= limit:
            raise ValueError(f"the conversation has {length} tokens, the model was made for {limit}: /reset starts a new one")
        how = dict(self.how)
        if limit is not None:
            how["max_new_tokens"] = min(how["max_new_tokens"], limit - length)
        pieces, start = Pieces(self.tokenizer, show), time.perf_counter()
        with StopWhenAsked() as stop, torch.no_grad():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                pad_token_id=self.tokenizer.pad_token_id,
                streamer=pieces,
                stopping_criteria=[stop],
                **how,
            )
        if self.remembers:
            self.messages = [*asked, {"role": "assistant", "content": pieces.text}]
        return Answer(pieces.text, out.shape[1] - length, time.perf_counter() - start, stop.asked)

    def _encoded(self, messages: list[dict[str, str]], question: str) -> Tensor:
        """Token ids, (1, length)."""
        if not self.remembers:
            text = question if self.template is None else self.template.replace("{text}", question)
            ids = self.tokenizer(text, return_tensors="pt").input_ids
            return ids.to(self.model.device)
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it wants
            raise ValueError(f"the chat template refuses the conversation: {' '.join(str(error).split())}") from error
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids.to(self.model.device)
