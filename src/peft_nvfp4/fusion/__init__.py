"""PACT's data flow: norms and gated MLPs that emit NVFP4, and the attaching of both to a model."""
