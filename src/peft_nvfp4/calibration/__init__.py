"""Calibration: GPTQ weights, centres and terms of the inputs from a few texts (or images), before training starts.

This package imports nothing heavy; its parts, each knowing only those before it, are

* :mod:`~peft_nvfp4.calibration.hessian`: second moments of a linear's input;
* :mod:`~peft_nvfp4.calibration.levels`: number formats as the solver sees them, NVFP4 and NF4;
* :mod:`~peft_nvfp4.calibration.gptq`: the solver;
* :mod:`~peft_nvfp4.calibration.data`: what users have, as batches;
* :mod:`~peft_nvfp4.calibration.structure`: a model's layers, what they are called with, which linears read one input;
* :mod:`~peft_nvfp4.calibration.store`: finished layers on disk;
* :mod:`~peft_nvfp4.calibration.layer`: one layer's forward layouts;
* :mod:`~peft_nvfp4.calibration.terms`: the choice of its inputs' terms;
* :mod:`~peft_nvfp4.calibration.backward`: its backward layouts;
* :mod:`~peft_nvfp4.calibration.passes`, :mod:`~peft_nvfp4.calibration.report`: layer after layer, and what came out;
* :mod:`~peft_nvfp4.calibration.run`: the entry points, ``calibrate`` and ``apply_calibration``.
"""
