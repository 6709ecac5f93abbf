"""The differentiable core: autograd Functions with their formulas, LoRA's arithmetic, the cache of quantised activations."""
