"""A recording that a CPU can play."""

from contextlib import contextmanager

import torch

from peft_nvfp4.autograd import seeds


@contextmanager
def replaying(tape):
    """Within the context the recorded function finds its seeds on the tape, in the order in which it was recorded."""
    places, order = dict(tape.places), iter(range(len(tape.places)))
    tape.draw = lambda: tape.buffer[next(order)].clone()
    seeds.TAPES.append(tape)
    try:
        yield
    finally:
        seeds.TAPES.pop()
        tape.places = places


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
        with replaying(self.tape), torch.enable_grad():
            self.y = self.run(**self.inputs)
        return self.y.detach().clone()

    def backward(self, dy):
        return list(torch.autograd.grad(self.y, self.parameters, dy, allow_unused=True))


class ForwardRehearsal:
    """The same without backward (:class:`peft_nvfp4.training.graph_recording.ForwardRecording`)."""

    def __init__(self, run, inputs, pool):
        self.run = run
        self.inputs = {name: t.clone() for name, t in inputs.items()}
        self.unrecorded = run(**self.inputs)
        (self.tape,) = seeds.TAPES

    def forward(self, inputs):
        torch._foreach_copy_(list(self.inputs.values()), [inputs[name] for name in self.inputs])
        with replaying(self.tape), torch.inference_mode(False), torch.no_grad():
            return self.run(**self.inputs).clone()
