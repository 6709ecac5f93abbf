"""What users hand to a calibration: conversations, tokenised rows, streams, arrays; and what is refused with a way out."""

import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch
from _calibrations import FAST, IDS
from conftest import tiny_llama
from torch import nn

from peft_nvfp4.autograd.frozen_linear import rounded_input
from peft_nvfp4.calibration.data import batches, count_tokens
from peft_nvfp4.calibration.gptq import gptq
from peft_nvfp4.calibration.moments import Moments
from peft_nvfp4.calibration.run import CalibrationOptions, apply_calibration, calibrate
from peft_nvfp4.quantization.freeze import frozen_layers

pytestmark = pytest.mark.filterwarnings("ignore:.*tokens of calibration for linears")
BOS, EOS, USER = 101, 102, 103


class Words:
    """A tokenizer: a token is a word's length. ``bos``: it begins texts with a token of its own."""

    bos_token_id, eos_token_id = BOS, EOS

    def __init__(self, bos: bool = False, ends: bool = False):
        self.bos, self.ends = bos, ends

    def __call__(self, text, add_special_tokens=True):
        ids = [BOS if word == "<bos>" else USER if word == "<user>" else len(word) for word in text.split()]
        special = add_special_tokens
        return SimpleNamespace(input_ids=[BOS] * (self.bos and special) + ids + [EOS] * (self.ends and special))

    def apply_chat_template(self, messages, tokenize):
        assert tokenize is False
        return " ".join(["<bos>", *(f"<user> {m['content']}" for m in messages)])


def joined(found) -> list[int]:
    return torch.cat([b["input_ids"].flatten() for b in found]).tolist()


TEXTS = ["a bb ccc", "dddd eeeee", "ffffff g hh iii"]


def test_every_sequence_begins_as_the_tokenizer_begins_texts():
    found = batches(TEXTS, Words(bos=True), samples=4, seq_len=4, seed=1)
    plain = joined(batches(TEXTS, Words(), samples=4, seq_len=3, seed=1))
    assert [b["input_ids"][0, 0].item() for b in found] == [BOS] * 4
    assert joined(found) == [t for i in range(0, 12, 3) for t in (BOS, *plain[i : i + 3])]
    assert BOS not in plain and plain.count(EOS) >= 2
    assert joined(batches(["a"], Words(bos=True), seq_len=10)) == [BOS, 1, EOS]  # less than a sequence
    ended = batches(TEXTS, Words(ends=True), samples=4, seq_len=3, seed=1)
    assert joined(ended) == plain  # a text that is ended already is not ended twice


def test_conversations():
    """Through the chat template, whose first token stands for the start of the text only where plain texts get one too."""
    talk = [{"role": "user", "content": "a bb"}, {"role": "assistant", "content": "ccc"}]
    datasets = pytest.importorskip("datasets")
    ways = ([talk], [{"messages": talk, "id": 7}], datasets.Dataset.from_list([{"messages": talk}]))
    for data in ways:
        assert joined(batches(data, Words(), seq_len=10)) == [BOS, USER, 1, 2, USER, 3, EOS]
        assert joined(batches(data, Words(bos=True), seq_len=10)) == [BOS, USER, 1, 2, USER, 3, EOS]
        long = batches(data, Words(bos=True), seq_len=3)
        assert joined(long) == [BOS, USER, 1, BOS, 2, USER, BOS, 3, EOS]


def test_rows_with_text_or_token_ids():
    rows = [{"text": text, "label": 0} for text in TEXTS]
    assert joined(batches(rows, Words(), seq_len=4)) == joined(batches(TEXTS, Words(), seq_len=4))
    padded = [{"input_ids": [1, 2, 3, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}, {"input_ids": [4, 5], "attention_mask": [1, 1]}]
    assert joined(batches(padded, seq_len=5)) == [1, 2, 3, 4, 5]
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_list(padded)
    assert joined(batches(dataset, seq_len=5)) == [1, 2, 3, 4, 5]
    assert joined(batches(dataset.with_format("torch"), seq_len=5)) == [1, 2, 3, 4, 5]
    assert joined(batches(IDS.numpy(), samples=2, seq_len=6)) == IDS[:2, :6].flatten().tolist()
    assert joined(batches(IDS[0], seq_len=24)) == IDS[0].tolist()
    assert joined(batches([row.numpy() for row in IDS[:2]], seq_len=24)) == IDS[:2].flatten().tolist()
    processor = SimpleNamespace(tokenizer=Words())
    assert joined(batches(TEXTS, processor, seq_len=4)) == joined(batches(TEXTS, Words(), seq_len=4))


def test_a_stream_is_read_as_far_as_needed():
    read = []

    def endless():
        for i in itertools.count():
            read.append(i)
            yield {"text": f"{'a' * (i % 7 + 1)} bb"}

    found = batches(endless(), Words(), samples=2, seq_len=6, seed=1)
    assert [b["input_ids"].shape for b in found] == [(1, 6)] * 2 and len(read) == 64
    datasets = pytest.importorskip("datasets")
    stream = datasets.IterableDataset.from_generator(endless)
    assert joined(batches(stream, Words(), samples=2, seq_len=6, seed=1)) == joined(found)


def test_ready_batches_stay_as_they_are():
    loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in IDS], batch_size=4)
    found = batches(loader, samples=2)
    assert len(found) == 2 and found[0]["input_ids"].shape == (4, 24) and "labels" in found[0]
    embeds = {"inputs_embeds": torch.zeros(1, 3, 8)}
    assert batches([embeds])[0]["inputs_embeds"] is embeds["inputs_embeds"]
    mask = (torch.arange(24) < 20).long().expand(8, 24)
    assert count_tokens([{"input_ids": IDS, "attention_mask": mask}, {"input_ids": IDS}, embeds]) == 8 * 20 + 8 * 24


def test_refusals_of_data():
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})})
    images = datasets.Dataset.from_dict({"input_ids": [[1, 2]], "pixel_values": [[0.5]]})
    for wrong, message in (
        (splits, "several datasets; give one of them.*'train'"),
        (images, "dataset with images.*DataLoader"),
        ([{"input_ids": [1, 2], "pixel_values": torch.zeros(1)}], "return_tensors='pt'"),
        ([{"label": 1}], "input_ids, messages, text; this one has label"),
        (datasets.Dataset.from_dict({"label": [1]}), "column.*'text'; this one has label"),
        (TEXTS, "tokenizer"),
        ("a text", "tokenizer"),
        (IDS.float(), "integers, got torch.float32"),
        ([[0.5, 1.5]], "integers, got torch.float32"),
        ([["a"]], "integers"),
        ([[1, 2], "a text"], "some of each"),
        (None, "got a NoneType"),
        ([3], "got a int"),
        (torch.zeros(0, 4, dtype=torch.long), "no calibration data"),
        ([[]], "no token is left"),
        (iter(()), "no calibration data"),
    ):
        with pytest.raises(ValueError, match=message):
            batches(wrong)
    with pytest.raises(ValueError, match="all texts are empty"):
        batches(["", ""], Words())


def test_refusals_of_calibrate():
    with pytest.raises(ValueError, match="token id 2.. .*128 embeddings: the tokenizer"):
        calibrate(tiny_llama(), IDS + 127, **FAST)
    with pytest.raises(ValueError, match=r"24 tokens for a model of 16 positions: CalibrationOptions\(seq_len=16\)"):
        calibrate(tiny_llama(max_position_embeddings=16), IDS, **FAST)
    with pytest.raises(TypeError, match="options=..."):
        calibrate(tiny_llama(), IDS, CalibrationOptions(), **FAST)
    numbers = (dict(samples=0), dict(seq_len=1), dict(batch_size=0), dict(backward_batches=0), dict(report_tokens=-1))
    words = (dict(method="best"), dict(accuracy="best"), dict(budget=2.0), dict(backward="best"), dict(weight_layouts="best"))
    for wrong in (*numbers, *words):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CalibrationOptions(**wrong)
    with pytest.raises(ValueError, match="cached"):
        CalibrationOptions(backward="gptq", weight_layouts="transient")
    model = tiny_llama()
    calibrate(model, IDS, **FAST)
    with pytest.raises(ValueError, match="frozen already"):
        calibrate(model, IDS, **FAST)


def test_offsets_that_have_nowhere_to_go_are_warned_of():
    with pytest.warns(UserWarning, match="say accuracy='balanced' or 'paper', or a budget"):
        CalibrationOptions(offset=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CalibrationOptions(offset=True, accuracy="balanced"), CalibrationOptions(offset=True, budget=0.3)


def test_a_linear_that_only_a_later_batch_reaches():
    """It gets its moments from that batch."""
    batches_ = [{"input_ids": IDS[:3]}, {"input_ids": IDS[3:6, :20]}, {"input_ids": IDS[6:]}]

    def model():
        made = tiny_llama()
        mlp = made.model.layers[0].mlp
        torch.manual_seed(1)
        mlp.spare = nn.Linear(64, 64)
        inner = mlp.forward
        mlp.forward = lambda x: inner(x) + (mlp.spare(x) if x.shape[1] == 20 else 0)
        return made

    got, dense = model(), model()
    report = calibrate(got, batches_, options=CalibrationOptions(report_tokens=0), **FAST)
    assert report.layers["model.layers.0"]["not_reached"] == []
    moments = Moments(64)
    # what reaches it has gone through quantised inputs and dense weights of the layer
    for m in dense.model.layers[0].self_attn.modules():
        if isinstance(m, nn.Linear):
            m.register_forward_pre_hook(lambda m, args: (rounded_input(args[0], 2),))
    dense.model.layers[0].mlp.spare.register_forward_pre_hook(lambda m, args: moments.add(rounded_input(args[0], 2)))
    with torch.no_grad():
        dense(IDS[3:6, :20])
    expected = gptq([dense.model.layers[0].mlp.spare.weight], moments)[0]
    assert torch.equal(got.model.layers[0].mlp.spare.weight, expected.codes)


def test_a_layer_that_is_skipped_stays_dense(tmp_path):
    """It has no site; the folder of its neighbours can be resumed and applied all the same."""
    options = CalibrationOptions(backward="gptq", report_tokens=8)
    model, other = tiny_llama(), tiny_llama()
    report = calibrate(model, IDS, options=options, skip_modules="layers.1", output_dir=tmp_path, **FAST)
    assert report.tokens == IDS.numel() and f"{IDS.numel()} tokens" in str(report)
    assert {name.split(".")[2] for name, _ in frozen_layers(model)} == {"0"}
    assert len(apply_calibration(other, tmp_path)) == 7
    resumed = tiny_llama()
    calibrate(resumed, IDS, options=options, skip_modules=["layers.1"], output_dir=tmp_path, **FAST)
    with torch.no_grad():
        expected = model(IDS).logits
        assert torch.equal(other(IDS).logits, expected) and torch.equal(resumed(IDS).logits, expected)
