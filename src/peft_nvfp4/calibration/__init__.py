"""Calibration: GPTQ weights, offsets and terms of the inputs from a few texts (or images), before training starts.

Its modules, each knowing only those before it: ``data``, ``structure``, ``moments``, ``gptq``, ``store``, ``layer``,
``passes``, ``run`` (the entry points). This package imports nothing by itself.
"""
