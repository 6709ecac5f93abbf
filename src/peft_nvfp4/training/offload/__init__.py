"""Frozen weights in the host's memory: switching it on and off, the layers that fetch their weights, pinned memory."""
