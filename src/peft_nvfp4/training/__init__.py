"""How a training step runs: CUDA graphs, weights in the host's memory, several processes, Trainer callbacks."""
