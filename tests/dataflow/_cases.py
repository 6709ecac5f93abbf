"""What one case of the conformance machine is, how hypothesis draws it, and its form as Python and as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields

from _parts import ATTENTIONS, MLPS, NORMS, RESIDUALS
from hypothesis import strategies as st


@dataclass(frozen=True)
class Act:
    """One intervention of a user: what is done to which module, and how. See ``_interventions.py``."""

    kind: str
    place: str
    how: str = ""

    def __repr__(self) -> str:
        return f"Act({', '.join(repr(v) for v in (self.kind, self.place, self.how) if v)})"


@dataclass(frozen=True)
class Case:
    """A decoder, a way to freeze and run it, and interventions. The first value of each field is the simplest."""

    layers: int = 1
    norm: str = "rms"
    mlp: str = "silu"
    attention: str = "mha"
    residual: str = "pre"
    experts: bool = False
    bias: bool = False
    tied: bool = False
    casts: bool = False  # the MLP casts its input to its weights' dtype
    reader: str = ""  # how else the first norm's output is read: mT, data, real, function
    dtype: str = "float32"
    backend: str = "nvfp4"
    accuracy: str = "high"
    memory: str = "fast"
    adapters: int = 1
    dropout: float = 0.0
    mode: str = "train"  # train, eval (with gradients), no_grad, inference_mode, autocast
    leaf: bool = False  # the decoder reads the tensor that is differentiated itself, as after enable_input_require_grads()
    repeated: bool = False  # the decoder runs its layers twice
    loss: str = "output"  # output, inner (on the first layer's parts alone), both
    inner: str = "norm1"  # the part for the latter
    uncalled: str = ""  # a linear of attention
    twice: str = ""
    rescaled: str = ""  # by the model's code: the adapter of a linear of attention, before it is called
    edited: str = ""  # by the model's code: a part's output, or the input of attention before a linear
    run: str = "plain"  # of RUNS, or compile
    around: str = "layers.0"  # what is checkpointed or compiled; "" is the whole model
    acts: tuple[Act, ...] = ()
    seed: int = 0

    def __repr__(self) -> str:
        changed = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Case({', '.join(changed)})"

    @property
    def trains(self) -> bool:
        return self.mode not in ("no_grad", "inference_mode")

    def as_json(self) -> dict:
        default = dataclasses.asdict(Case())
        return {name: value for name, value in dataclasses.asdict(self).items() if value != default[name]}

    @classmethod
    def of_json(cls, content: dict) -> Case:
        return cls(**{**content, "acts": tuple(Act(**act) for act in content.get("acts", ()))})

    @property
    def tokens(self) -> frozenset[str]:
        """What is not as simple as can be; of an intervention its kind and the kind of its place."""
        plain = {f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default}
        plain = {token for token in plain if not token.startswith(("acts=", "seed="))}
        return frozenset(plain | {f"{act.kind} {act.how} {kind_of_place(act.place)}" for act in self.acts})


def kind_of_place(place: str) -> str:
    """A linear, a part below it, a norm, a block."""
    for name in ("base_layer", "lora_A", "lora_B", "lora_dropout", "act_fn", "norm", "down_proj", "proj"):
        if name in place.rpartition("layers.")[2]:
            return name
    return "block"


# ---------------------------------------------------------------------------------------------- where interventions may be

HOOKS = ("forward", "pre", "backward", "backward_pre", "tensor", "capture", "instance", "wrapped", "global")


def linears(case: Case) -> list[str]:
    """Dotted names below a layer."""
    attention = {"none": [], "fused": ["qkv_proj", "o_proj"]}.get(case.attention, ["q_proj", "k_proj", "v_proj", "o_proj"])
    first = {"plain": ["up_proj"], "fused": ["gate_up_proj"]}.get(case.mlp, ["gate_proj", "up_proj"])
    mlps = ["mlp.experts.0", "mlp.experts.1"] if case.experts else ["mlp"]
    return [f"attn.{name}" for name in attention] + [f"{mlp}.{name}" for mlp in mlps for name in (*first, "down_proj")]


def norms(case: Case) -> list[str]:
    return [f"norm{i + 1}" for i in range({"sandwich": 4, "parallel": 1}.get(case.residual, 2))]


def blocks(case: Case) -> list[str]:
    return ["mlp"] + ["attn"] * (case.attention != "none")


@st.composite
def acts(draw, case: Case) -> Act:
    layer = f"layers.{draw(st.integers(0, case.layers - 1))}"
    linear, norm = draw(st.sampled_from(linears(case))), draw(st.sampled_from(norms(case)))
    act_fn = "mlp.experts.0.act_fn" if case.experts else "mlp.act_fn"
    below = draw(st.sampled_from(["base_layer", "lora_A.default", "lora_B.default", "lora_dropout.default"]))
    block = draw(st.sampled_from(blocks(case)))
    places = {"norm": norm, "linear": linear, "below": f"{linear}.{below}", "act": act_fn, "block": block}
    place = draw(st.sampled_from(["norm", "linear", "below", "act", "block", "layer"]))
    kinds = {
        "norm": (*HOOKS, *HOOKS, "replaced", "eps", "weight", "trained", "parametrised"),
        "linear": (*HOOKS, *HOOKS, "replaced", "checkpointed", "scaling", "scales", *(["base"] if case.backend != "nf4" else [])),
        "below": (*HOOKS, "parametrised") if below[:6] in ("lora_A", "lora_B") else HOOKS,
        "act": (*HOOKS, "replaced"),
        "block": (*HOOKS, "checkpointed"),
    }.get(place, HOOKS)
    kind = draw(st.sampled_from(kinds))
    how = draw(st.sampled_from(["returned", "in place", "detached"])) if kind in ("forward", "pre") else ""
    if kind in ("tensor", "checkpointed", "wrapped"):
        how = draw(st.sampled_from(["", "input"] if kind == "tensor" else ["", "reentrant"]))
    return Act(kind, layer if place == "layer" else f"{layer}.{places[place]}", how)


# ---------------------------------------------------------------------------------------------- cases


def often(first, *others, times: int = 3):
    """The first value ``times`` times as often as each of the others."""
    return st.sampled_from([first] * times + list(others))


RARE = ["threads", "offload_threads", "functional", "interleaved", "retained", "saved"]
RUNS = ["plain"] * 16 + ["checkpoint"] * 3 + ["reentrant"] * 3 + ["offload"] * 3 + RARE
COMPILE = 80
"""One case of so many is compiled: it takes as long as twenty others."""


@st.composite
def cases(draw, most_acts: int = 3) -> Case:
    backend = draw(often("nvfp4", "nf4", "bf16", times=4))
    case = Case(
        layers=draw(often(1, 2)),
        norm=draw(often(*NORMS)),
        mlp=draw(often(*MLPS)),
        attention=draw(often(*ATTENTIONS)),
        residual=draw(often(*RESIDUALS)),
        experts=draw(often(False, True, times=7)),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        casts=draw(often(False, True, times=15)),
        reader=draw(often("", "mT", "data", "real", "function", times=50)),
        dtype=draw(often("float32", "bfloat16", times=2)),
        backend=backend,
        accuracy=draw(often("high", "balanced", "paper")) if backend == "nvfp4" else "high",
        memory=draw(st.sampled_from(["fast", "small"])),
        adapters=draw(often(1, 2)),
        repeated=draw(often(False, True, times=9)),
        mode=draw(often("train", "eval", "no_grad", "inference_mode", "autocast", times=2)),
    )
    case = dataclasses.replace(case, acts=tuple(draw(st.lists(acts(case), max_size=most_acts))))
    if any(act.how == "detached" for act in case.acts):
        # PyTorch crashes: y = F.linear(x, w, b); y.detach().mul_(2); y.register_hook(...), with x of three dimensions
        case = dataclasses.replace(case, acts=tuple(act for act in case.acts if act.kind != "tensor"))
    changes: dict = {"run": draw(st.sampled_from(RUNS))}
    if draw(st.integers(0, COMPILE)) == COMPILE:
        changes["run"] = "compile"
    if changes["run"] in ("threads", "offload_threads") and any(act.how == "reentrant" for act in case.acts):
        changes["run"] = "plain"  # their gradients are those of autograd.grad, which reentrant checkpointing refuses
    if changes["run"].startswith("offload"):
        changes["layers"] = draw(st.sampled_from([3, 4]))
        changes["acts"] = tuple(act for act in case.acts if act.kind != "base")  # bytes on the host are not to be edited
    if changes["run"] in ("checkpoint", "reentrant", "compile"):
        whole = [""] if changes["run"] == "compile" else []
        parts = [f"layers.0.{part}" for part in ("norm1", *blocks(case))]
        changes["around"] = draw(st.sampled_from([*whole, "layers.0", *parts]))
    if case.mode == "train":
        changes["dropout"] = draw(often(0.0, 0.25))
    outside = changes["run"] in ("compile", "threads", "offload_threads", "functional") or changes.get("around") == "layers.0"
    if case.trains and not outside:
        changes["loss"] = draw(often("output", "inner", "both"))
        changes["inner"] = draw(st.sampled_from(["norm1", *blocks(case)]))
    if case.trains and case.mode != "autocast":  # of leaves autocast shares the copy that it makes
        changes["leaf"] = draw(often(False, True, times=7))
    if case.attention in ("mha", "gqa", "qk_norm"):
        name = st.sampled_from(["q_proj", "k_proj", "v_proj"])
        changes["uncalled"] = draw(often("", draw(name), times=8))
        changes["twice"] = draw(often("", draw(name), times=8))
        changes["rescaled"] = draw(often("", draw(name), times=8))
    places = [*norms(case), *blocks(case), *(name for name in ("q_proj", "k_proj", "v_proj") if f"attn.{name}" in linears(case))]
    changes["edited"] = draw(often("", draw(st.sampled_from(places)), times=4))
    return dataclasses.replace(case, **changes)
