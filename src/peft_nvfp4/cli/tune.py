"""``peft-nvfp4 tune``: measures the tiles of the FP4 extension on the GPU at hand."""

from .common import Outcome, command


@command
def tune() -> Outcome:
    """Measure the tiles of the FP4 extension on this GPU, and keep the fastest of each shape for training."""
    import torch

    from ..kernels import implementations
    from ..kernels.fp4 import cutlass
    from ._run import tuning

    try:
        if not torch.cuda.is_available():
            raise implementations.Unavailable("no CUDA device")
        implementations.working_gemms("cutlass", torch.device("cuda", torch.cuda.current_device()))
    except implementations.Unavailable as reason:
        raise ValueError(
            f"Nothing to tune: {reason}. Tiles belong to the FP4 extension for RTX 50xx; training works without it, and what "
            "runs instead is shown by: peft-nvfp4 doctor"
        ) from reason
    return Outcome(tuning.measure(torch.cuda.get_device_name(), cutlass.load(), tuning.usual_problems()))
