"""From what a user calls a model to a directory."""

from __future__ import annotations

import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from gpuworker.errors import CheckpointNotFound
from gpuworker.model.hub import resolve_model


def test_a_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path), "any") == tmp_path
    (tmp_path / "own" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("own/model") == Path("own/model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/own") == tmp_path / "own"


@pytest.mark.parametrize(
    "model", ["/no/such/dir", "./relative", "a/b/c", "../up", "owner/na me", "owner/", "a..b/c"]
)
def test_what_is_neither_directory_nor_id_is_refused(model: str) -> None:
    with pytest.raises(CheckpointNotFound, match="no directory and no repo id"):
        resolve_model(model)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointNotFound, match="hub extra"):
        resolve_model("owner/name")


def test_a_repo_is_fetched_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["config.json", "model-00001-of-00002.safetensors", "pytorch_model.bin"]
    files += ["original/consolidated.safetensors", "tokenizer.model", "README.md", "run.py"]
    calls = []

    def download(
        repo_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        calls.append((repo_id, revision))
        wanted = huggingface_hub.utils.filter_repo_objects(
            files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        calls.append(sorted(wanted))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/some-model.v1", "abc") == tmp_path
    assert calls == [
        ("owner/some-model.v1", "abc"),
        ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model"],
    ]


def test_a_repo_that_cannot_be_had_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_args: object, **_options: object) -> str:
        raise LocalEntryNotFoundError("outgoing traffic is disabled\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointNotFound) as caught:
        resolve_model("owner/name")
    assert "'owner/name' at revision main: outgoing traffic is disabled; " in caught.value.message
