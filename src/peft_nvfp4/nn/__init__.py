"""Frozen modules: one base class, a subclass for each storage format (nvfp4, nf4, bf16), a registry, and mixtures of experts."""
