"""Calibration: GPTQ weights, offsets and terms of the inputs from a few texts (or images), before training starts.

This package imports nothing heavy; its parts, each knowing only those before it, are

* :mod:`~peft_nvfp4.calibration.data`: what users have, as batches;
* :mod:`~peft_nvfp4.calibration.structure`: a model's layers, what they are called with, which linears read one input;
* :mod:`~peft_nvfp4.calibration.moments`: second moments of a linear's input, and of its gradient;
* :mod:`~peft_nvfp4.calibration.levels`, :mod:`~peft_nvfp4.calibration.gptq`: the solver, and NVFP4 as it needs it;
* :mod:`~peft_nvfp4.calibration.store`: finished layers on disk;
* :mod:`~peft_nvfp4.calibration.layer`: one layer: terms of its inputs, forward and backward layouts, errors;
* :mod:`~peft_nvfp4.calibration.passes`: layer after layer;
* :mod:`~peft_nvfp4.calibration.run`: the entry points, ``calibrate`` and ``apply_calibration``, and the report.
"""
