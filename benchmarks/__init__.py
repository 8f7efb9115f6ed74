"""Measurements: one JSON line per figure, everything that is compared measured in one run."""
