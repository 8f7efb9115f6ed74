"""Layer 1. What a rank owns: a thread, a device, address ranges, bytes."""
