"""Layer 1. Steps: requests and their batch, the forward pass, sampling."""
