"""The Modelfile of Ollama: the chat template in Go's words, where answers end, how tokens are drawn."""

import pytest
import transformers as hf
from _gguf_models import tokenizer

from peft_nvfp4.checkpoints.gguf import write_modelfile
from peft_nvfp4.checkpoints.gguf.modelfile import _conversations, turns_of

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}" + CHATML
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set s = '<<SYS>>' + messages[0]['content'] + '<</SYS>>' %}"
    "{% set messages = messages[1:] %}{% else %}{% set s = '' %}{% endif %}{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + (s if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
UPPER = CHATML.replace("m['content']", "m['content'] | upper")
REWRITES = "{{ messages | length }}" + CHATML


def go(template, messages):
    """What Go's text/template makes of the statements that a Modelfile has here."""
    system = next((m["content"] for m in messages if m["role"] == "system"), "")
    head, rest = template.split("{{ range .Messages }}")
    with_system, without = head.removeprefix("{{ if .System }}").removesuffix("{{ end }}").split("{{ else }}")
    body, prompt = rest.rsplit("{{ end }}{{ end }}", 1)
    user, assistant = body.removeprefix('{{ if eq .Role "user" }}').split('{{ else if eq .Role "assistant" }}')
    text = with_system.replace("{{ .System }}", system) if system else without
    for message in messages:
        part = {"user": user, "assistant": assistant, "system": ""}[message["role"]]
        text += part.replace("{{ .Content }}", message["content"])
    return (text + prompt).replace('{{ "{{" }}', "{{")


@pytest.mark.parametrize("template", (CHATML, DEFAULT_SYSTEM, LLAMA2), ids=("chatml", "default-system", "llama2"))
def test_the_template_writes_what_jinja_writes(template):
    own = tokenizer(chat_template=template)
    for chat in _conversations():
        expected = own.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert go(turns_of(own).go(), chat) == expected


def test_every_message_ends_itself():
    turns = turns_of(tokenizer(chat_template=DEFAULT_SYSTEM))
    assert (turns.user, turns.prompt) == (("<|im_start|>user\n", "<|im_end|>\n"), "<|im_start|>assistant\n")
    assert turns.assistant == ("<|im_start|>assistant\n", "<|im_end|>\n")
    assert turns.without_system == "<|im_start|>system\nBe kind.<|im_end|>\n"


def test_the_first_token_is_llama_cpps():
    """A start that the tokenizer puts before every text is not written twice; another template keeps it."""
    own = tokenizer(chat_template="{{ bos_token }}" + CHATML)
    assert turns_of(own).with_system[0] == "<|start|><|im_start|>system\n"
    from tokenizers.processors import TemplateProcessing

    own.backend_tokenizer.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 258)])
    assert turns_of(own).with_system[0] == "<|im_start|>system\n"


@pytest.mark.parametrize("template", (NO_SYSTEM, UPPER, REWRITES), ids=("no-system", "upper", "counts"))
def test_a_template_that_does_more_is_left_to_ollama(template, tmp_path):
    own = tokenizer(chat_template=template)
    words = write_modelfile(tmp_path, own, "./model.gguf")
    assert turns_of(own) is None and "does more than join messages" in words
    assert "TEMPLATE" not in (tmp_path / "Modelfile").read_text()


def test_a_modelfile(tmp_path):
    drawn = dict(do_sample=True, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
    settings = hf.GenerationConfig(eos_token_id=[259, 256], **drawn)
    assert write_modelfile(tmp_path, tokenizer(chat_template=CHATML), "./model.gguf", "a.gguf", settings) is None
    text = (tmp_path / "Modelfile").read_text()
    assert text.startswith('FROM ./model.gguf\nADAPTER ./a.gguf\nTEMPLATE """{{ if .System }}')
    assert text.endswith(
        'PARAMETER stop "<|end|>"\nPARAMETER stop "ll"\n'
        "PARAMETER temperature 0.6\nPARAMETER top_p 0.9\nPARAMETER top_k 20\nPARAMETER repeat_penalty 1.1\n"
    )
    greedy = hf.GenerationConfig(eos_token_id=259)
    assert write_modelfile(tmp_path, tokenizer(chat_template=None), "llama3.2", generation=greedy) is None
    assert (tmp_path / "Modelfile").read_text() == 'FROM llama3.2\nPARAMETER stop "<|end|>"\n'
