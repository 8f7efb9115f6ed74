"""Layer 1. One operation per module: a torch reference, later a fast form per device."""
