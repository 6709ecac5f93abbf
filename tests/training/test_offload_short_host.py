"""Offload on a host that has no room for the weights: they stay in the files that a packed base was loaded from, and a thread
reads them a layer ahead. The same bits, the same copies. On a CPU the thread reads into what layers compute with; the test marked
gpu checks the streams."""

import copy
import sys
import threading

import pytest
import torch
from _offloaded import at_rest, batch, load_other_weights, packed, same, steps, tuned
from conftest import tiny_llama
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from peft_nvfp4 import NVFP4LoraConfig, PactConfig
from peft_nvfp4.training.offload import layers, read_ahead
from peft_nvfp4.training.offload.enable import _owner, disable_offload, enable_offload, offload_status, offloaded
from peft_nvfp4.training.offload.host_memory import LEFT_TO_OTHERS, HostMemoryShort
from peft_nvfp4.training.steps import slow_down_steps

LAYERS = 4


@pytest.fixture
def room(monkeypatch):
    """Bytes of the host that are free; none."""
    free = [0]
    monkeypatch.setattr(layers, "free_host_bytes", lambda: LEFT_TO_OTHERS + free[0])
    return free


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A base, saved packed."""
    folder = tmp_path_factory.mktemp("packed")
    tiny_llama(num_hidden_layers=LAYERS).save_pretrained(folder / "dense")
    base = AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=PactConfig(memory="smallest"))
    base.save_pretrained(folder / "packed")
    return folder / "packed"


def loaded(folder, device="cpu"):
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=PactConfig(memory="smallest"), device_map="cpu")
    torch.manual_seed(0)
    config = NVFP4LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, memory="smallest", lora_dropout=0.1)
    model = get_peft_model(base, config)
    slow_down_steps(model)
    return model.to(device).train()


def in_files(model, folder) -> list[bool]:
    """Of the codes of every layer, whether they are memory-mapped from the folder's files."""
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if str(folder) in line]
    spans = [range(int(start, 16), int(end, 16)) for start, end in spans]
    found = (layer.mlp.up_proj.base_layer.weight.data_ptr() for layer in model.get_base_model().model.layers)
    return [any(address in span for span in spans) for address in found]


@pytest.mark.parametrize("checkpointing", [None, False], ids=["plain", "checkpointing"])
def test_training_is_bit_equal_and_weights_stay_in_their_files(saved, room, monkeypatch, checkpointing):
    model = loaded(saved)
    got, trained = steps(model, checkpointing=checkpointing)
    short = offload_status(model)
    assert short.host_bytes == 0 and short.left_bytes > 0 and f"{short.left_bytes / 1e9:.2f} GB where they were" in str(short)
    assert at_rest(model) and (sys.platform != "linux" or all(in_files(model, saved)))
    monkeypatch.undo()
    plain = loaded(saved)
    losses, adapters = steps(plain, checkpointing=checkpointing)
    with_room = offload_status(plain)
    assert got == losses and same(trained, adapters)
    assert with_room.left_bytes == 0 and with_room.host_bytes == short.left_bytes
    assert (short.copies, short.ahead, short.moved_bytes) == (with_room.copies, with_room.ahead, with_room.moved_bytes)
    assert sys.platform != "linux" or not any(in_files(plain, saved))


def test_as_many_layers_as_there_is_room_for_are_gathered(saved, room, monkeypatch):
    model = loaded(saved)
    size = offload_status(model).left_bytes // LAYERS
    made, buffer = [], layers.HostBuffer
    monkeypatch.setattr(layers, "HostBuffer", lambda bytes_: made.append(bytes_) or buffer(bytes_))
    monkeypatch.setattr(layers, "free_host_bytes", lambda: LEFT_TO_OTHERS + 2 * size - sum(made))
    some = loaded(saved)
    status = offload_status(some)
    assert (status.host_bytes, status.left_bytes) == (2 * size, (LAYERS - 2) * size)
    assert steps(some)[0] == steps(model)[0]


def test_evaluation_generation_and_what_reads_weights(saved, room, monkeypatch):
    model = loaded(saved).eval()
    monkeypatch.undo()
    plain, ids = loaded(saved).eval(), batch()
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    made = [m.generate(input_ids=ids, max_new_tokens=3, do_sample=False) for m in (model, plain)]
    assert torch.equal(*made) and same(model.state_dict(), plain.state_dict()) and same(packed(model), packed(plain))
    other = copy.deepcopy(model)
    model.merge_adapter(), plain.merge_adapter()
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    plain.unmerge_adapter()
    assert torch.equal(other(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_files_that_are_deleted_meanwhile(tmp_path, saved, room):
    """The system keeps what is mapped."""
    base = AutoModelForCausalLM.from_pretrained(saved, device_map="cpu")
    base.save_pretrained(tmp_path / "own")
    wanted = steps(loaded(saved))[0]
    model = loaded(tmp_path / "own")
    for file in (tmp_path / "own").iterdir():
        file.unlink()
    assert steps(model)[0] == wanted


def test_weights_of_this_process_stay_in_its_memory(room):
    model = tuned("nvfp4 transient", "cpu")
    assert offload_status(model).left_bytes > 0
    assert steps(model)[0] == steps(tuned("nvfp4 transient", None))[0]


def test_what_is_written_to_weights_is_read_again(room):
    model, plain = tuned("nvfp4 cached", "cpu"), tuned("nvfp4 cached", None)
    with torch.no_grad():
        model(input_ids=batch())
    load_other_weights(model, plain)
    with torch.no_grad():
        assert torch.equal(model(input_ids=batch()).logits, plain(input_ids=batch()).logits)


def test_a_layer_is_read_while_the_one_before_it_computes(room, monkeypatch):
    """In the other thread: the first layer's MLP sees the second one's bytes arrive."""
    model = tuned("nvfp4 cached", "cpu")
    read, gather, arrived = threading.Event(), read_ahead.gather, []

    def watched(layer, buffer):
        gather(layer, buffer)
        if layer.index == 1:
            assert threading.current_thread() is not threading.main_thread()
            read.set()

    monkeypatch.setattr(read_ahead, "gather", watched)
    first = model.get_base_model().model.layers[0].mlp
    first.register_forward_pre_hook(lambda module, args: arrived.append(read.wait(60)))
    with torch.no_grad():
        model(input_ids=batch())
    assert arrived == [True]


def test_a_read_that_fails(room, monkeypatch):
    """Whoever is about to compute with the bytes gets the error; the next one reads again."""
    model = tuned("nvfp4 cached", "cpu", 4)
    wanted = model(input_ids=batch()).logits
    gather = read_ahead.gather

    def failing(layer, buffer):
        if layer.index == 1:
            raise OSError(5, "Input/output error")
        gather(layer, buffer)

    monkeypatch.setattr(read_ahead, "gather", failing)
    with pytest.raises(OSError, match="Input/output error"), torch.no_grad():
        model(input_ids=batch())
    monkeypatch.setattr(read_ahead, "gather", gather)
    assert at_rest(model) and torch.equal(model(input_ids=batch()).logits, wanted)


def test_the_end_of_offload(room):
    model = tuned("nvfp4 cached", "cpu")
    steps(model, 1)
    disable_offload(model)
    plain = tuned("nvfp4 cached", None)
    steps(plain, 1)
    assert not offloaded(model) and steps(model)[0] == steps(plain)[0]


def test_weights_that_are_not_on_the_host_need_room_there(room):
    """On "meta", as on a GPU: a buffer of theirs is made, or the model stays as it is."""
    model = tuned("nvfp4 cached", None).to("meta")
    with pytest.raises(HostMemoryShort, match=r"decoder layer 0 take .* GB of the host's memory.*peft-nvfp4 quantize"):
        enable_offload(model)
    assert not offloaded(model)


@pytest.mark.gpu
@pytest.mark.parametrize("left", [0, 2], ids=["none in memory", "two in memory"])
def test_on_a_gpu(saved, room, monkeypatch, left):
    wanted, adapters = steps(loaded(saved, "cuda"), 3, checkpointing=False)
    if left:
        sizes = iter([LEFT_TO_OTHERS + (1 << 30)] * left + [0] * 1000)
        monkeypatch.setattr(layers, "free_host_bytes", lambda: next(sizes))
    model = loaded(saved, "cuda")
    got, trained = steps(model, 3, checkpointing=False)
    status = offload_status(model)
    assert got == wanted and same(trained, adapters) and status.left_bytes > 0
    assert all(slot.staging is None or slot.staging.pinned for slot in _owner(model).slots) and status.overlap >= 0
