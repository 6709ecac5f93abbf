"""The folder of a trained adapter holds what a served model needs: tokenizer and chat template, where answers end, and the base
by the name that was loaded, with the revision if ``get_peft_model`` was told (a model does not know its own)."""

import json

import pytest
import transformers as hf
from _tiny_models import TEMPLATE, save_tiny, tiny_tokenizer
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from peft_nvfp4 import NVFP4LoraConfig, PactConfig, merge

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ENDS = [2, 4]  # </s> and <bot>
LORA = dict(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """``org/tiny`` in a cache of the Hub's layout."""
    repository = tmp_path / "cache" / "models--org--tiny"
    snapshot = repository / "snapshots" / COMMIT
    save_tiny(snapshot)
    GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=2).save_pretrained(snapshot)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.chdir(tmp_path)
    return dict(cache_dir=str(tmp_path / "cache"), local_files_only=True)


def settings_of(folder):
    return json.loads((folder / "adapter_config.json").read_text())


@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
def test_after_save_model(hub, packed, tmp_path):
    """Of transformers' Trainer, on a dense base that is frozen here, and on one that is packed while it is loaded."""
    how = {"quantization_config": PactConfig()} if packed else {}
    base = hf.AutoModelForCausalLM.from_pretrained("org/tiny", **hub, **how)
    model = get_peft_model(base, NVFP4LoraConfig(**LORA), revision=COMMIT)
    model.generation_config.eos_token_id = ENDS  # as a trainer does for a chat template's own end
    arguments = hf.TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none")
    hf.Trainer(model=model, args=arguments, processing_class=tiny_tokenizer()).save_model(str(tmp_path / "out"))
    saved = settings_of(tmp_path / "out")
    assert (saved["base_model_name_or_path"], saved["revision"]) == ("org/tiny", COMMIT)
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == TEMPLATE and tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.eos_token_id, generation.temperature) == (ENDS, 0.7)
    for file in (tmp_path / "out").glob("*.json"):
        assert str(tmp_path) not in file.read_text(), f"{file.name} names a path of this machine"


def test_stock_adapters_are_as_they_were(hub, tmp_path):
    """A plain LoraConfig on a dense base gets no file of this package."""
    base = hf.AutoModelForCausalLM.from_pretrained("org/tiny", **hub)
    get_peft_model(base, LoraConfig(**LORA)).save_pretrained(tmp_path / "out")
    assert not [file.name for file in (tmp_path / "out").iterdir() if "nvfp4" in file.name or "generation" in file.name]


def test_after_the_command(tmp_path, monkeypatch):
    """``peft-nvfp4 train``; chat and merge then take where answers end from the adapter's folder."""
    pytest.importorskip("trl")
    from typer.testing import CliRunner

    from peft_nvfp4 import cli
    from peft_nvfp4.cli._run import models

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    save_tiny(tmp_path / "model")
    row = {"messages": [{"role": "user", "content": "red ?"}, {"role": "assistant", "content": "blue"}]}
    (tmp_path / "data.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    command = ["train", str(tmp_path / "model"), str(tmp_path / "data.jsonl"), "-o", str(tmp_path / "out"), "--steps", "1"]
    result = CliRunner().invoke(cli.application(), [*command, "--batch", "2"])
    assert result.exit_code == 0, result.output
    assert settings_of(tmp_path / "out")["base_model_name_or_path"] == str(tmp_path / "model")
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE
    file = tmp_path / "out" / "generation_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "eos_token_id": ENDS}))
    model, _ = models.load_with_adapter(None, str(tmp_path / "out"), "fp32", None)
    assert model.generation_config.eos_token_id == ENDS
    merged, _ = merge(model, to="fp32")
    merged.save_pretrained(tmp_path / "merged")
    assert GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id == ENDS


def test_the_command_loads_the_revision_that_was_trained_on(hub, tmp_path, monkeypatch):
    """Not of a base that is named: that is another one."""
    from peft_nvfp4.cli._run import models

    base = hf.AutoModelForCausalLM.from_pretrained("org/tiny", **hub)
    get_peft_model(base, NVFP4LoraConfig(**LORA), revision=COMMIT).save_pretrained(tmp_path / "out")
    tiny_tokenizer().save_pretrained(tmp_path / "out")
    asked = []
    monkeypatch.setattr(models, "check_model", lambda name: None)
    monkeypatch.setattr(models, "load", lambda name, *args, **kwargs: (asked.append((name, kwargs.get("revision"))), None))
    models.load_base(str(tmp_path / "out"), None, "fp32", None)
    models.load_base(str(tmp_path / "out"), "other/base", "fp32", None)
    assert asked == [("org/tiny", COMMIT), ("other/base", None)]
