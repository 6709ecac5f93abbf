"""What helps around training: :mod:`doctor`."""
