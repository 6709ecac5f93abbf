"""Embedding and head that are on the host while backward runs: the same gradients, and the same weights afterwards."""


import pytest
import torch
from _offloaded import batch, same
from test_host_checkpoints import checkpointed, gradients

from peft_nvfp4.training import checkpoint_transfers, resting_weights
from peft_nvfp4.training.host_checkpoints import _watching
from peft_nvfp4.training.host_pass import restart_pass


@pytest.fixture
def no_room(monkeypatch):
    monkeypatch.setattr(resting_weights, "free_bytes", lambda device: 0)


def ends(model):
    base = model.get_base_model()
    return base.get_input_embeddings().weight, base.get_output_embeddings().weight


def watched(model):
    """Where embedding and head are, each time that a gradient of the first layer is there."""
    places = []
    p = next(p for name, p in model.named_parameters() if p.requires_grad and "layers.0.self_attn.q_proj" in name)
    p.register_hook(lambda g: places.append([end.data_ptr() for end in ends(model)]))
    return places


def test_they_are_away_during_backward_and_come_back(no_room):
    model, plain = checkpointed(), checkpointed(host=False)
    places, before = watched(model), [end.clone() for end in ends(model)]
    homes = _watching(model).resting.homes
    for _ in range(2):
        loss, exact = gradients(plain)
        got_loss, got = gradients(model)
        assert got_loss == loss and same(got, exact)
        assert places.pop() == [homes[id(end)].values.data_ptr() for end in ends(model)]
        assert all(torch.equal(end, kept) for end, kept in zip(ends(model), before))
        assert not set(end.data_ptr() for end in ends(model)) & {home.values.data_ptr() for home in homes.values()}
    buffers = [home.buffer for home in homes.values()]
    assert _watching(model).resting.bytes == sum(end.nbytes for end in ends(model)) and len(buffers) == 2
    gradients(model)
    assert [home.buffer for home in homes.values()] == buffers, "copied once"


def test_they_are_away_in_forward_between_embedding_and_head(no_room):
    model, places = checkpointed(), []
    decoder = model.get_base_model().model
    place = lambda *args: places.append([end.data_ptr() for end in ends(model)])
    for layer in decoder.layers[1:]:
        layer.register_forward_pre_hook(place)
    decoder.register_forward_hook(place)
    loss = model(input_ids=batch(), labels=batch()).loss
    homes = [home.values.data_ptr() for home in _watching(model).resting.homes.values()]
    assert places[:-1] == [homes] * 2
    assert places[-1][0] == homes[0] and places[-1][1] not in homes, "the head is back, for the loss"
    loss.backward()
    assert not {end.data_ptr() for end in ends(model)} & set(homes)
    assert loss.item() == checkpointed(host=False)(input_ids=batch(), labels=batch()).loss.item()


def test_a_pass_that_is_begun_once_more(no_room, monkeypatch):
    """As after an error of memory that somebody has caught within it."""
    model, made, buffer = checkpointed(), [], resting_weights.HostBuffer
    decoder = model.get_base_model().model
    plain = type(decoder).forward

    def forward(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        assert _watching(model).resting.away
        restart_pass()
        assert not _watching(model).resting.away, "the embedding is needed once more"
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(type(decoder), "forward", forward)
    monkeypatch.setattr(resting_weights, "HostBuffer", lambda size: made.append(size) or buffer(size))
    loss, got = gradients(model)
    assert len(made) == 2, "what is away already is no new weight"
    homes = [home.values.data_ptr() for home in _watching(model).resting.homes.values()]
    assert not {end.data_ptr() for end in ends(model)} & set(homes)
    monkeypatch.undo()
    exact_loss, exact = gradients(checkpointed(host=False))
    assert loss == exact_loss and same(got, exact)


def test_with_room_they_stay():
    model = checkpointed()
    before = [end.data_ptr() for end in ends(model)]
    gradients(model)
    assert [end.data_ptr() for end in ends(model)] == before and not _watching(model).resting.homes


def test_without_room_on_the_host_they_stay(no_room, monkeypatch):
    model = checkpointed()
    before = [end.data_ptr() for end in ends(model)]
    monkeypatch.setattr(resting_weights, "free_host_bytes", lambda: (1 << 30) + 30_000)
    monkeypatch.setattr(checkpoint_transfers.Buffers, "prepare", lambda *args: None)
    gradients(model)
    assert [end.data_ptr() for end in ends(model)] == before


def test_changed_weights_are_copied_again(no_room):
    model, plain = checkpointed(), checkpointed(host=False)
    gradients(model)
    for m in (model, plain):
        with torch.no_grad():
            ends(m)[1].mul_(2)
    gradients(model)
    assert same(gradients(model)[1], gradients(plain)[1]) and torch.equal(ends(model)[1], ends(plain)[1])


def test_what_somebody_sets_meanwhile_stays(no_room):
    model = checkpointed()
    other = torch.randn_like(ends(model)[1])
    p = next(p for name, p in model.named_parameters() if p.requires_grad and "layers.0.self_attn.q_proj" in name)
    p.register_hook(lambda g: setattr(ends(model)[1], "data", other))
    gradients(model)
    assert ends(model)[1].data_ptr() == other.data_ptr()


def test_a_trained_head_stays(no_room):
    model = checkpointed()
    ends(model)[1].requires_grad_()
    gradients(model)
    assert list(_watching(model).resting.homes) == [id(ends(model)[0])] and ends(model)[1].grad is not None


def test_a_backward_that_fails(no_room):
    model = checkpointed()
    loss, exact = gradients(model)
    p = next(p for name, p in model.named_parameters() if p.requires_grad and "layers.0.self_attn.q_proj" in name)
    handle = p.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gradients(model)
    handle.remove()
    resting = _watching(model).resting
    values = [home.values.data_ptr() for home in resting.homes.values()]
    with torch.no_grad():
        model(input_ids=batch())
    assert not resting.away and not set(end.data_ptr() for end in ends(model)) & set(values)
    got_loss, got = gradients(model)
    assert got_loss == loss and same(got, exact)
