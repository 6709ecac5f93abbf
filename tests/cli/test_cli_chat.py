"""``peft-nvfp4 chat``: a tiny model that was trained a moment ago, without a terminal, and at one."""

import io
import json
import os
import signal

import pytest
import torch
from _tiny_models import save_tiny, tiny_tokenizer
from conftest import tiny_llama
from peft import get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from peft_nvfp4 import NVFP4LoraConfig, cli
from peft_nvfp4.cli import chat as command
from peft_nvfp4.cli._run.chatting import Chat


@pytest.fixture(scope="module")
def app():
    return cli.application()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """The folder of an adapter that changes answers."""
    folder = tmp_path_factory.mktemp("chat")
    torch.manual_seed(0)
    save_tiny(folder / "model", max_position_embeddings=64)
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    config = NVFP4LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(folder / "adapter")
    tiny_tokenizer().save_pretrained(folder / "adapter")
    return folder / "adapter"


def talk(app, adapter, text, *options, code=0):
    words = ["chat", str(adapter), "--max-new-tokens", "6", "--temperature", "0", *options]
    result = CliRunner().invoke(app, words, input=text)
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def messages_of(result):
    return json.loads(result.stdout)["messages"]


def test_lines_are_questions_of_one_conversation(app, adapter):
    """Until /quit; empty lines are none. What is printed are the answers, and nothing else."""
    text = "the film is good\n\nwhat colour ?\n/quit\nnot asked\n"
    messages = messages_of(talk(app, adapter, text, "--system", "answer good", "--json", "-"))
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in messages[:4:2]] == ["answer good", messages[2]["content"]] and messages[2]["content"]
    printed = talk(app, adapter, text, "--system", "answer good").stdout
    assert printed == "".join(f"{m['content']}\n" for m in messages if m["role"] == "assistant")


def test_reset_forgets_all_but_the_system_message(app, adapter):
    alone = messages_of(talk(app, adapter, "red ?\n", "--system", "answer good", "--json", "-"))
    after = messages_of(talk(app, adapter, "the film is bad\n/reset\nred ?\n", "--system", "answer good", "--json", "-"))
    assert after == alone


def test_the_adapter_answers(app, adapter):
    """A model's folder is talked to as well; its answers are others."""
    with_adapter = talk(app, adapter, "the film is\n").stdout
    assert talk(app, adapter.parent / "model", "the film is\n").stdout != with_adapter
    assert talk(app, adapter, "the film is\n", "-m", str(adapter.parent / "model")).stdout == with_adapter


def test_a_conversation_that_is_too_long_is_an_error_without_a_terminal(app, adapter):
    result = talk(app, adapter, "the film is good " * 20 + "\n", code=1)
    assert "the model was made for 64" in result.output and "/reset" in result.output


def test_without_a_chat_template_every_question_is_a_prompt():
    model, tokenizer = tiny_llama(vocab_size=64), tiny_tokenizer(template=None)
    plain = Chat(model, tokenizer, max_new_tokens=4, do_sample=False)
    first, again = (plain.answer("the film", lambda text: None) for _ in range(2))
    assert first.text == again.text and plain.messages == [] and not plain.remembers
    with pytest.raises(ValueError, match="no chat template"):
        Chat(model, tokenizer, system="a", max_new_tokens=4)
    trained = Chat(model, tokenizer, template="the story is {text} .", max_new_tokens=4)
    expected = tokenizer("the story is good .").input_ids
    assert trained._encoded([], "good")[0].tolist() == expected


def test_a_template_that_refuses_leaves_the_conversation_as_it_was():
    tokenizer = tiny_tokenizer("{% for m in messages %}{{ raise_exception('no ' + m['content']) }}{% endfor %}")
    talking = Chat(tiny_llama(vocab_size=64), tokenizer, max_new_tokens=4)
    with pytest.raises(ValueError, match="refuses the conversation: no red"):
        talking.answer("red", lambda text: None)
    assert talking.messages == []


def test_ctrl_c_stops_an_answer_and_not_the_program():
    """The signal comes with the first piece; the conversation keeps what was said until then, and goes on."""
    talking = Chat(tiny_llama(vocab_size=64), tiny_tokenizer(), max_new_tokens=40, do_sample=False, eos_token_id=63)
    before = signal.getsignal(signal.SIGINT)
    pieces = []

    def interrupted(text):
        pieces.append(text)
        if len(pieces) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    answer = talking.answer("the film is", interrupted)
    assert answer.stopped and answer.tokens < 40 and signal.getsignal(signal.SIGINT) is before
    assert talking.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    assert not talking.answer("red ?", lambda text: None).stopped

    def twice(text):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        talking.answer("blue ?", twice)
    assert signal.getsignal(signal.SIGINT) is before


def test_at_a_terminal(monkeypatch):
    """Ctrl-C forgets the line, Ctrl-D leaves."""
    out, typed = Console(file=io.StringIO()), iter(["red ?", KeyboardInterrupt, " ", "blue ?", EOFError])

    def type_line(prompt):
        if isinstance(line := next(typed), str):
            return line
        raise line

    monkeypatch.setattr(out, "input", type_line)
    assert list(command._questions(out, interactive=True)) == ["red ?", "blue ?"]
