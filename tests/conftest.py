"""Shared by all tests: the tiny model directory, made once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a vocabulary of bytes."""
    from gpuworker.cli.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(autouse=True, scope="session")
def _one_compute_thread() -> None:
    import torch

    torch.set_num_threads(1)
