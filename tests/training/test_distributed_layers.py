"""What layers, recordings and the weight cache do while FSDP2 holds the weights."""

import torch
from _sharded import batch, shard, tuned
from _two_processes import both

from peft_nvfp4 import enable_cuda_graphs, frozen_bytes, graph_status
from peft_nvfp4.training.distributed.hooks import plain_parameters


def sharded_model(rank: int):
    model, ids = tuned("nvfp4 transient"), batch()
    whole = frozen_bytes(model)
    enable_cuda_graphs(model)
    model.get_base_model().model.forward.recorder = None  # nothing may be recorded
    shard(model)
    model(input_ids=ids, labels=ids).loss.backward()
    reasons = list(graph_status(model).reasons)
    try:
        model.merge_adapter()
    except ValueError as error:
        return reasons, str(error), frozen_bytes(model) / whole


def test_what_cannot_be_done_while_sharded_is_said():
    for reasons, message, share in both(sharded_model):
        assert reasons == ["the parameters are sharded (FSDP2), and each step gathers them anew"]
        assert "merge there" in message and share == 0.5


def test_nf4_layer_with_a_plain_parameter():
    model = tuned("nf4").get_base_model()
    layer = model.model.layers[0].mlp.up_proj.base_layer
    before, x = layer.dequantize(), torch.randn(3, 64)
    y, snapshot = layer(x), layer.packed_tensors()
    assert len(plain_parameters(layer, torch.device("cpu"))) == 5 and type(layer.weight) is torch.nn.Parameter
    assert torch.equal(layer.dequantize(), before) and torch.equal(layer(x), y)
    assert all(torch.equal(t, snapshot[name]) for name, t in layer.packed_tensors().items())
    layer.requantize_(torch.zeros(layer.out_features, layer.in_features))
    assert not layer.dequantize().any()
