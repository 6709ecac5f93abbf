"""Native FP4 products: the CUDA library, PyTorch's scaled_mm, tile tables, and known products that a GPU must get right."""
