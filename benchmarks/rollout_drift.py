"""How far sampled tokens' log-probabilities are from those that training gives them, when one base serves both and when not.

A policy samples continuations of film reviews (SmolLM2-135M, temperature 1, nothing cut off). Then the trained model scores the
same tokens in one forward. Reinforcement learning takes both for the same numbers; where they differ, it is off-policy:

* one frozen base for rollouts and training (`nvfp4`, `nf4`, `bf16`): rounding, and codes that rounding moves;
* rollouts on the dense BF16 base, or on the adapter merged into it, and training on NF4 or NVFP4: what a serving engine beside a
  4-bit trainer amounts to.

    python benchmarks/rollout_drift.py --adapter grpo-out                CPU, some minutes; an adapter that examples/grpo.py saved
    python benchmarks/rollout_drift.py --layers 2 --rows 2 --new 4       mechanics only, and an adapter that is zero

Writes rollout_drift_DEVICE.json. KL is that of each token's whole distribution, rollout to training, mean over tokens; k3 its
estimate from the sampled tokens alone, as TRL logs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import common
import torch
from common import smollm2_reviews as data
from peft import PeftModel, get_peft_model
from torch import Tensor

from peft_nvfp4 import NVFP4LoraConfig, merge

PAIRS = (  # rollouts on, trained on
    ("nvfp4", "nvfp4"), ("nf4", "nf4"), ("bf16", "bf16"),
    ("bf16", "nf4"), ("merged", "nf4"), ("bf16", "nvfp4"), ("merged", "nvfp4"),
)  # fmt: skip


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--adapter", help="folder of a saved adapter (default: a fresh one, which changes nothing)")
    parser.add_argument("--rows", type=int, default=8, help="continuations (%(default)s)")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--new", type=int, default=32, help="tokens sampled for each (%(default)s)")
    parser.add_argument("--accuracy", default="high", choices=["high", "balanced", "paper"], help="of nvfp4 (%(default)s)")
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16"], help="of activations (%(default)s)")
    parser.add_argument("--layers", type=int, help="keep so many layers (to try the script)")
    return parser.parse_args(argv)


def policy(args: argparse.Namespace, base: str):
    """The adapted model on a frozen base of this word, or the dense model with the adapter merged into it."""
    dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16
    model, _ = data.load_smollm2(dtype, args.layers)
    model = model.to(args.device)
    backend = "bf16" if base == "merged" else base
    settings = {"accuracy": args.accuracy} if base == "nvfp4" else {}
    config = NVFP4LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", backend=backend, **settings)
    if args.adapter is None:
        model = get_peft_model(model, config)
    else:
        model = PeftModel.from_pretrained(model, args.adapter, config=config)
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name)
    return merge(model, to=args.dtype)[0] if base == "merged" else model


@torch.no_grad()
def rollouts(model, prompts: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """(sequences (B, prompt + new), log-probabilities of all tokens at each new position (B, new, V), FP32)."""
    torch.manual_seed(0)
    found = model.eval().generate(
        input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
        max_new_tokens=new, min_new_tokens=new, output_logits=True, return_dict_in_generate=True, pad_token_id=0,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits, 1).float().log_softmax(-1)


def training_logps(model, sequences: Tensor, new: int) -> Tensor:
    """The same of the forward that a trainer differentiates."""
    logits = model.train()(input_ids=sequences, attention_mask=torch.ones_like(sequences), logits_to_keep=new + 1).logits
    return logits[:, :-1].detach().float().log_softmax(-1)


def drift(rolled: Tensor, trained: Tensor, tokens: Tensor) -> dict[str, float]:
    """Of the sampled tokens (B, new): nats; and the KL of whole distributions."""
    delta = (trained - rolled).gather(-1, tokens[..., None])[..., 0].double()
    kl = (rolled.double().exp() * (rolled.double() - trained.double())).sum(-1)
    return {
        "max": float(delta.abs().max()),
        "mean": float(delta.abs().mean()),
        "kl": float(kl.mean()),
        "k3": float((delta.expm1() - delta).mean()),
    }


def main(argv: Sequence[str] | None = None) -> list[dict]:
    args = parse(argv)
    _, tokenizer = data.load_smollm2(layers=0)
    texts = [ids for ids in (tokenizer(example.text).input_ids for example in data.movie_reviews()[1]) if len(ids) >= args.prompt]
    prompts = torch.tensor([ids[: args.prompt] for ids in texts[: args.rows]], device=args.device)
    models = {base: policy(args, base) for base in dict.fromkeys(base for pair in PAIRS for base in pair)}
    rolled = {base: rollouts(models[base], prompts, args.new) for base in dict.fromkeys(source for source, _ in PAIRS)}
    rows = []
    for source, trained in PAIRS:
        sequences, logps = rolled[source]
        found = drift(logps, training_logps(models[trained], sequences, args.new), sequences[:, args.prompt :])
        rows.append({"rollouts": source, "trained": trained, **found})
        print(rows[-1], flush=True)
    common.write_json(args.out / f"rollout_drift_{args.dtype}_{args.device.type}.json", {**common.head(args), "rows": rows})
    return rows


if __name__ == "__main__":
    main()
