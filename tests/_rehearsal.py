"""A recording that a CPU can play."""

import torch

from peft_nvfp4.autograd import seeds


class Rehearsal:
    """Keeps the recording's contract: its own copies of the inputs, gradients in memory of their own, places on the seed tape."""

    def __init__(self, run, inputs, parameters, shared):
        self.run, self.parameters = run, parameters
        self.inputs = {name: t.clone() for name, t in inputs.items()}
        y = run(**self.inputs)
        torch.autograd.grad(y, parameters, torch.ones_like(y), allow_unused=True)
        (self.tape,) = seeds.TAPES

    def forward(self, inputs):
        torch._foreach_copy_(list(self.inputs.values()), [inputs[name] for name in self.inputs])
        places = dict(self.tape.places)
        order = iter(range(len(places)))
        self.tape.draw = lambda: self.tape.buffer[next(order)].clone()
        seeds.TAPES.append(self.tape)
        try:
            with torch.enable_grad():
                self.y = self.run(**self.inputs)
        finally:
            seeds.TAPES.pop()
            self.tape.places = places
        return self.y.detach().clone()

    def backward(self, dy):
        return list(torch.autograd.grad(self.y, self.parameters, dy, allow_unused=True))
