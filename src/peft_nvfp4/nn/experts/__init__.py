"""Frozen mixtures of experts: the module, how weights of all experts are packed into one tensor, and rows by expert."""
