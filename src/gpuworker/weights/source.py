"""Layer 1. Where a model comes from: its directory, description and parameters, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from gpuworker.config import ModelConfig
from gpuworker.errors import ConfigError, UnsupportedModel
from gpuworker.model.checkpoint import open_checkpoint, read_config, read_eos_token_ids
from gpuworker.model.description import ModelDescription, describe
from gpuworker.model.hub import resolve_model
from gpuworker.model.load_plan import plan_load
from gpuworker.model.loader import load
from gpuworker.model.manifest import is_ignorable, parameter_specs
from gpuworker.model.parameters import ParameterSpec
from gpuworker.weights.dummy import fill_dummy
from gpuworker.weights.store import Fill

__all__ = ["ModelSource", "open_source"]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded, and loaded again."""

    directory: Path
    description: ModelDescription
    dtype: torch.dtype
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    specs: tuple[ParameterSpec, ...]
    is_dummy: bool

    def plan(self, on_progress: Callable[[int, int], None] | None = None) -> Fill:
        """Check the checkpoint as it is now and return what reads it.

        That calls on_progress(done_bytes, total_bytes) as it gets on.

        Raises CheckpointError that lists every missing, unknown or wrongly shaped tensor.
        """
        if self.is_dummy:
            return Fill(lambda params: fill_dummy(self.specs, params))
        checkpoint = open_checkpoint(self.directory)
        plan = plan_load(
            checkpoint,
            self.specs,
            lambda name: is_ignorable(self.description, name),
            tied_head=self._tied_head(),
        )
        return Fill(
            lambda params: load(plan, params, on_progress=on_progress),
            (*checkpoint.warnings, *plan.warnings),
        )

    def _tied_head(self) -> tuple[str, str] | None:
        if not self.description.tie_word_embeddings:
            return None
        for prefix in self.description.checkpoint_prefixes:
            return (
                f"{prefix.removesuffix('model.')}lm_head.weight",
                f"{prefix}embed_tokens.weight",
            )
        return None


def open_source(config: ModelConfig) -> ModelSource:
    """Read and check what config.json says, without touching a weight.

    Raises CheckpointError for the directory and ConfigError for what was asked of it.
    """
    directory = resolve_model(config.model, config.revision)
    description = describe(read_config(directory))
    longest = description.max_position_embeddings
    max_model_len = config.max_model_len if config.max_model_len is not None else longest
    if max_model_len > longest:
        raise ConfigError(
            f"model.max_model_len {max_model_len} exceeds the {longest} positions of "
            f"{directory.name}; ask for at most {longest}"
        )
    name = config.dtype if config.dtype != "auto" else description.dtype_name or "float32"
    if name not in _DTYPES:
        raise UnsupportedModel(
            f"{directory.name} is stored as {name}; set model.dtype to one of {', '.join(_DTYPES)}"
        )
    dtype = _DTYPES[name]
    return ModelSource(
        directory=directory,
        description=description,
        dtype=dtype,
        max_model_len=max_model_len,
        eos_token_ids=read_eos_token_ids(directory) or description.eos_token_ids,
        specs=parameter_specs(description, dtype),
        is_dummy=config.load_format == "dummy",
    )
