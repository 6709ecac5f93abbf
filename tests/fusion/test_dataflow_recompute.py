"""What fused producers keep for backward: no norm inputs, no gate, up and product in full; and ``recompute_mlp``, which does not
keep the product of an MLP either but makes it anew from the codes of gate and up."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from _dataflow_models import IDS, bytes_for_backward, kept_bytes, loss_and_gradients, tuned
from torch.utils.checkpoint import checkpoint

from peft_nvfp4 import NVFP4LoraConfig, attach
from peft_nvfp4.autograd import activation_cache
from peft_nvfp4.fusion.probe import base_of
from peft_nvfp4.numerics import fused_reference, reference
from peft_nvfp4.numerics.formats import ACTIVATION, padded_k
from peft_nvfp4.numerics.reference import mm


def test_the_residual_stream_and_gate_up_are_not_kept():
    """Without fusing, norm inputs, gate, up and their product are saved dense. What does not grow with the tokens (copies of
    the adapters in the activations' dtype) is taken off: a sequence of 12 tokens in a batch of two against two such batches."""
    sizes = {}
    for fuse in (False, True):
        model = tuned("Llama", accuracy="paper")
        if fuse:
            attach(model)
        sizes[fuse] = kept_bytes(model, IDS.repeat(2, 1)) - kept_bytes(model, IDS)
    assert sizes[True] < 0.45 * sizes[False], sizes  # 1488 and 3760 bytes a token and layer in FP32


LEAST_COSINE = 0.95
"""Of down's dA with h~ made anew to that with h~ kept. h~ kept is 9.5 % off (one term, Gaussian data), h~ made anew by that three
times over, from gate, up and itself: 19 % apart, a cosine of 0.98; a sum over 24 tokens that partly cancel may lose more."""


def cosine(a, b) -> float:
    return F.cosine_similarity(a.flatten().float(), b.flatten().float(), 0).item()


@pytest.mark.parametrize("accuracy, targets", [("paper", "all-linear"), ("high", "all-linear"), ("paper", ["down_proj"])])
def test_recomputing_the_product_keeps_its_codes_no_more(accuracy, targets):
    """Less is kept by exactly the codes, block scales and global scales of h~ (f wide), and only down's dA differs. Where nothing
    before an MLP is trained, gate and up are not kept, so h~ is: the first layer with adapters on down alone."""
    runs, sizes = {}, {}
    for recompute in (False, True):
        model = tuned("Llama", accuracy=accuracy, target_modules=targets)
        attach(model, recompute_mlp=recompute)
        sizes[recompute] = kept_bytes(model, IDS.repeat(2, 1)) - kept_bytes(model, IDS)
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        assert activation_cache.live() == 0  # an entry of h would hold its codes until backward
        loss.backward()
        runs[recompute] = loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    terms = 2 if accuracy == "high" else 1
    f, layers = model.config.intermediate_size, [1] if targets == ["down_proj"] else [0, 1]
    assert sizes[False] - sizes[True] == len(layers) * IDS.numel() * terms * (padded_k(f) * 9 // 16 + 4)
    (loss, kept), (again, made) = runs[False], runs[True]
    assert loss == again
    differing = {name for name in kept if not torch.equal(kept[name], made[name])}
    assert differing == {name for name in kept if any(f"layers.{i}.mlp.down_proj.lora_A" in name for i in layers)}
    assert all(cosine(kept[name], made[name]) > LEAST_COSINE for name in differing)


@pytest.mark.parametrize(
    "family, accuracy, centred",
    [("Llama", "paper", False), ("Llama", "high", True), ("Gemma2", "high", False), ("Phi3", "balanced", True)],
)
def test_recomputed_gradient(family, accuracy, centred):
    """dA of down is that of D(h~) made from D(gate) and D(up): g.T @ D(h~), with g = dy @ (s * B). The same bits."""
    model, offset = tuned(family, accuracy=accuracy), None
    if centred:
        offset = torch.linspace(-1, 1, model.config.intermediate_size)
        base_of(model.base_model.model.model.layers[-1].mlp.down_proj).set_offset(offset)
    attach(model, recompute_mlp=True)
    mlp, seen = model.base_model.model.model.layers[-1].mlp, {}
    for name in mlp.parts.first:
        getattr(mlp, name).register_forward_hook(lambda m, args, y, name=name: seen.update({name: y.detach().flatten(0, -2)}))

    def keep_gradient(module, args, y):
        y.register_hook(lambda dy: seen.update(dy=dy.flatten(0, -2)))

    mlp.register_forward_hook(keep_gradient)  # not down's: it would see h
    loss_and_gradients(model)
    pair = [seen[name] for name in mlp.parts.first] if len(mlp.parts.first) == 2 else seen["gate_up_proj"].chunk(2, dim=-1)
    assert mlp.parts.gate == 0
    gate, up = (reference.quantize(t, ACTIVATION) for t in pair)
    terms = 2 if accuracy == "high" else 1
    h = fused_reference.gated_values(gate, up, offset, mlp.parts.act, terms, torch.float32)
    a, b = mlp.down_proj.lora_A["default"].weight, mlp.down_proj.lora_B["default"].weight
    assert torch.equal(a.grad, mm(mm(seen["dy"], b * mlp.down_proj.scaling["default"]).T, h))


WAYS = {
    "bfloat16": {},
    "autocast": {},
    "checkpointing": {},
    "reentrant checkpointing": {},
    "dropout": {"lora_dropout": 0.3},
    "two adapters": {},
    "merged and unmerged": {},
    "hooked": {},
    "DoRA": {"use_dora": True},
    "no adapter on down": {"target_modules": ["q_proj", "gate_proj"]},
}


@pytest.mark.parametrize("how", WAYS)
def test_recomputing_together_with(how):
    """The same forward, only down's dA differs and little, an empty table; where it cannot apply the gradients are those of
    keeping."""
    runs = []
    for recompute in (False, True):
        model = tuned("Llama", **WAYS[how]).train()
        if how == "two adapters":
            model.add_adapter("other", NVFP4LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, lora_alpha=3))
            model.base_model.set_adapter(["default", "other"])
        attach(model, recompute_mlp=recompute)
        if how == "bfloat16":
            model.bfloat16()
        elif how == "hooked":
            model.base_model.model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda module, args: None)
        elif "checkpointing" in how:
            reentrant = how == "reentrant checkpointing"
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        merged = None
        if how == "merged and unmerged":
            model.merge_adapter()
            merged = model(input_ids=IDS, labels=IDS).loss.item()
            model.unmerge_adapter()
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            loss, _ = loss_and_gradients(model)
        runs.append(((loss, merged), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (losses, kept), (again, made) = runs
    assert losses == again and activation_cache.live() == 0
    falls_back = how in ("DoRA", "no adapter on down")
    expected = set() if falls_back else {name for name in kept if "down_proj.lora_A" in name}
    if how == "hooked":  # down quantises what it is given, and keeps that
        expected = {name for name in expected if "layers.0." not in name}
    assert {name for name in kept if not torch.equal(kept[name], made[name])} == expected
    assert len(expected) == (0 if falls_back else {"two adapters": 4, "hooked": 1}.get(how, 2))
    assert all(cosine(kept[name], made[name]) > LEAST_COSINE for name in expected)


@pytest.mark.parametrize("accuracy", ["paper", "high"])
def test_a_last_linear_that_is_checkpointed_twice_over(accuracy):
    """The second run of the inner checkpoint has h alone, as a new tensor: codes of h, which must not be taken for gate and up's
    (with two terms they are as many tensors, of the same shapes)."""
    gradients = []
    for checkpoints in (0, 2):
        model = tuned("Llama", accuracy=accuracy)
        attach(model, recompute_mlp=True)
        down = model.base_model.model.model.layers[0].mlp.down_proj
        for _ in range(checkpoints):
            down.forward = partial(checkpoint, down.forward, use_reentrant=False)
        loss_and_gradients(model)
        gradients.append(down.lora_A["default"].weight.grad)
    assert cosine(*gradients) > LEAST_COSINE


def test_recomputing_in_a_compiled_model():
    """One graph, which keeps less too, and the gradients of eager code: FP32 sums in another order are far less than what
    recomputing changes."""
    eager, compiled, sizes = {}, {}, {}
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    for recompute in (False, True):
        model = tuned("Llama", accuracy="paper")
        attach(model, recompute_mlp=recompute)
        mlp = model.base_model.model.model.layers[0].mlp
        torch._dynamo.reset()
        for results, call in ((eager, mlp), (compiled, torch.compile(mlp, backend="aot_eager", fullgraph=True))):
            mlp.zero_grad()
            y, sizes[recompute] = bytes_for_backward(model, lambda call=call: call(x.clone().requires_grad_()))
            y.square().sum().backward()
            results[recompute] = y.detach(), mlp.down_proj.lora_A["default"].weight.grad.clone()
    torch._dynamo.reset()
    assert torch.equal(compiled[True][0], compiled[False][0])
    change = (eager[True][1] - eager[False][1]).norm()
    assert 0 < change and (compiled[True][1] - eager[True][1]).norm() < 1e-3 * change
    assert sizes[False] - sizes[True] == len(x) * (padded_k(model.config.intermediate_size) * 9 // 16 + 4)


def test_a_recomputed_product_stays_within_fp16():
    """256 and 255 become 264 at 4 bits, whose product is past FP16's end (65504), where that of the two was not."""
    for recompute in (False, True):
        model = tuned("Llama", accuracy="paper")
        attach(model, recompute_mlp=recompute)
        mlp = model.half().base_model.model.model.layers[0].mlp
        for layer, value in ((mlp.gate_proj, 256.0), (mlp.up_proj, 255.0)):
            first = F.pad(torch.tensor([value]), (0, 175)).half()
            layer.register_forward_hook(lambda m, args, y, first=first: torch.where(first > 0, first, y))
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
        (mlp(x).float() * 1e-4).sum().backward()
        assert torch.isfinite(mlp.down_proj.lora_A["default"].weight.grad).all()
