"""Layer 1. The bytes of the weights: their layout in the arena and how they get there."""
