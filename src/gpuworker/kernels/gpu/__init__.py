"""Layer 1. Kernels in Triton; only what runs on a GPU imports them."""
