"""Layer 1. Models: described by their config, computed by one decoder."""
