"""Mixtures whose experts stay dense, because they are of a kind that is not packed or by ``skip_modules``: they are named with
their share, and the rest works around them. (Packed experts: test_experts*.py.)"""

import pytest
from _mixtures import IDS, by_family, llama4
from peft import get_peft_model

from peft_nvfp4 import FrozenLinear, NVFP4LoraConfig, dense_share, freeze_model, merge
from peft_nvfp4.nn.experts.frozen_experts import frozen_experts


def test_dense_experts_are_named_with_their_share():
    """Counted by hand: all matrices but embedding and head; of those, what is a linear of the attention is packed."""
    model = llama4()
    total = {n: p.numel() for n, p in model.named_parameters() if p.ndim >= 2 and "embed" not in n and "lm_head" not in n}
    experts = {n: size for n, size in total.items() if ".experts." in n}
    experts = {n: size for n, size in experts.items() if model.get_parameter(n).ndim == 3}  # the others are biases
    share = sum(experts.values()) / sum(total.values())
    assert share > 0.5
    said = r"of the matrix weights stay dense.*Experts\.gate_up_proj \(3-D\).*experts interface.*target_parameters"
    with pytest.warns(UserWarning, match=said):
        freeze_model(model, progress=False)
    found = dense_share(model)
    assert sum(v for kind, v in found.items() if "(3-D)" in kind) == pytest.approx(share)
    assert list(found) == sorted(found, key=found.get, reverse=True)
    assert isinstance(model.model.layers[0].self_attn.q_proj, FrozenLinear) and not frozen_experts(model)
    left_out = dense_share(model, skip_modules=["feed_forward"])
    assert not [kind for kind in left_out if "(3-D)" in kind]


@pytest.mark.filterwarnings("ignore:.*stay dense")
@by_family
@pytest.mark.parametrize("to", ("bf16", "nvfp4"))
def test_attention_in_nvfp4_experts_dense_both_adapted(make, to):
    """LoRA on packed attention and, through target_parameters, on dense experts: gradients reach both, both are merged."""
    targets = dict(target_modules=["q_proj", "v_proj"], target_parameters=["experts.gate_up_proj"])
    config = NVFP4LoraConfig(r=2, **targets, init_lora_weights=False, skip_modules=["experts"])
    model = get_peft_model(make(), config)
    model(input_ids=IDS, labels=IDS).loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert {n.split(".layers.0.")[-1].split(".")[1] for n in grads if ".layers.0." in n} == {"q_proj", "v_proj", "experts"}
    assert all(g is not None and g.norm() > 0 for g in grads.values())
    merged, report = merge(model, to, probe=IDS)
    kinds = {layer.name.rpartition(".")[2]: layer.stored for layer in report.layers}
    assert kinds["q_proj"] == to and kinds["experts"] == ("bf16" if to == "bf16" else "fp32")
    assert report.probe.retained == pytest.approx(1, abs=0.2 if to == "bf16" else 0.6)
    assert not [n for n, _ in merged.named_parameters() if "lora" in n]
