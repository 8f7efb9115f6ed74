"""Layer 1. From what a user calls a model to a directory."""

from __future__ import annotations

import re
from pathlib import Path

from gpuworker.errors import CheckpointNotFound

__all__ = ["resolve_model"]

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_NOT_WANTED = ["*/*"]


def resolve_model(model: str, revision: str | None = None) -> Path:
    """Return a model's directory; a Hugging Face repo id is fetched into the hub's own cache.

    An existing directory is itself (a leading ~ is the home directory) and revision does not
    matter then. Of a repo only JSON, safetensors and tokenizer files of the top level are
    fetched. Raises CheckpointNotFound when the name is neither, the `hub` extra is missing, or
    the repo cannot be had.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    if not _REPO_ID.fullmatch(model) or ".." in model or "--" in model:
        raise CheckpointNotFound(
            f"model {model!r} is no directory and no repo id (owner/name); check the path"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError as error:
        raise CheckpointNotFound(
            f"model {model!r} is no directory; to fetch it as a repo id install gpuworker with "
            "its hub extra"
        ) from error
    try:
        fetched = snapshot_download(
            model, revision=revision, allow_patterns=_WANTED, ignore_patterns=_NOT_WANTED
        )
    except (OSError, HFValidationError) as error:
        # The hub's HTTP, offline and missing-entry errors all are OSErrors.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointNotFound(
            f"cannot fetch model {model!r} at revision {revision or 'main'}: {reason}; check the "
            "id and the network, or give a directory"
        ) from error
    return Path(fetched)
