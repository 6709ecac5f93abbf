"""The two products of shared-input groups, with adapters: operands, exact results, and how close a computed one must be."""

import torch

from peft_nvfp4.numerics import reference
from peft_nvfp4.numerics.formats import GRADIENT, WEIGHT, WEIGHT_BACKWARD
from peft_nvfp4.numerics.products import BackwardLinear, Dgrad, ForwardLinear, Fprop, LowRank

BF16 = torch.bfloat16
GROUPS = {  # outputs and ranks of every linear; K
    "one": ([(48, (4,))], 64),
    "qkv": ([(64, (4,)), (32, (4, 3)), (32, ())], 80),
    "odd": ([(7, (3,)), (21, (2,))], 10),
    "no-adapter": ([(32, ())], 64),
}


def random(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def group(name, terms, constant, m, device) -> tuple[Fprop, Dgrad]:
    """The products of one shared-input group."""
    linears, k = GROUPS[name]
    x = random(m, k, seed=1).to(BF16).to(device)
    forward, backward = [], []
    for i, (n, ranks) in enumerate(linears):
        w = reference.quantize(random(n, k, seed=2 + i, scale=0.1).to(device), WEIGHT)
        c = None if constant is None or i == 1 else random(n, seed=9).to(device, constant)
        adapters = [
            LowRank(random(m, r, seed=20 + i).to(BF16).to(device), random(n, r, seed=30 + i, scale=0.1).to(BF16).to(device))
            for r in ranks
        ]
        forward.append(ForwardLinear(w, c, 1.0, adapters))
        dy = random(m, 2 * n, seed=40 + i).to(BF16).to(device)[:, ::2]
        backward.append(BackwardLinear(dy, reference.quantize(reference.dequantize(w).T.contiguous(), WEIGHT_BACKWARD)))
    rank = sum(sum(ranks) for _, ranks in linears)
    g = random(m, rank, seed=50).to(BF16).to(device) if rank else None
    a = random(rank, k, seed=51).to(BF16).to(device) if rank else None
    return Fprop(reference.quantize_terms(x, None, terms), forward, BF16), Dgrad(backward, g, a)


def without_hidden(p: Fprop, a) -> Fprop:
    """The same product, which is to compute h itself."""
    linears = [item._replace(adapters=[adapter._replace(hidden=None) for adapter in item.adapters]) for item in p.linears]
    return p._replace(linears=linears, a=a)


def with_seeds(p: Dgrad) -> Dgrad:
    return p._replace(linears=[item._replace(seed=torch.tensor(i)) for i, item in enumerate(p.linears)])


def exact_fprop(p: Fprop, rounded: bool = False):
    """y in FP64, of the sum of an input's terms or (``rounded``) of that in BF16, and the sum of the magnitudes of what it is
    made of."""
    results = []
    for w, constant, _, adapters in p.linears:
        xs = [reference.dequantize_terms(p.terms, None, torch.bfloat16)] if rounded else map(reference.dequantize, p.terms)
        pairs = [(x.double(), reference.dequantize(w).double()) for x in xs]
        pairs += [(h.double(), up.double()) for h, up in adapters]
        c = 0.0 if constant is None else constant.double()
        results.append((sum(a @ b.T for a, b in pairs) + c, sum(a.abs() @ b.abs().T for a, b in pairs) + abs(c)))
    return results


def exact_dgrad(p: Dgrad):
    pairs = [
        (reference.dequantize(reference.quantize(dy, GRADIENT)).double(), reference.dequantize(w).double().T)
        for dy, w, _ in p.linears
    ]
    pairs += [] if p.g is None else [(p.g.double(), p.a.double())]
    return sum(x @ y for x, y in pairs), sum(x.abs() @ y.abs() for x, y in pairs)


def close(got, exact, magnitude, roundings):
    """BF16 (8 significant bits) rounds by at most 2**-8 of the value each time, partial sums by that of the magnitude; FP32
    accumulation of at most 400 summands by less than 2**-15 of their sum."""
    error = (got.double() - exact).abs()
    return bool((error <= 2.0**-8 * (exact.abs() + (roundings - 1) * magnitude) + 2.0**-15 * magnitude).all())
