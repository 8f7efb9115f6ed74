"""Configuration: every wrong value is a ConfigError that names field, value and way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuworker.config import (
    CacheConfig,
    DeviceConfig,
    LimitsConfig,
    ModelConfig,
    RankConfig,
    SupervisionConfig,
    WorkerConfig,
    load_config,
)
from gpuworker.errors import ConfigError


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ModelConfig(model=""), "model.model is empty"),
        (lambda: ModelConfig(model="m", dtype="float8"), "'float8'; choose one of auto, float32"),
        (lambda: ModelConfig(model="m", load_format="pt"), "model.load_format is 'pt'"),
        (lambda: ModelConfig(model="m", max_model_len=0), "max_model_len is 0"),
        (lambda: DeviceConfig(kind="tpu"), "device.kind is 'tpu'"),
        (lambda: DeviceConfig(memory_utilization=1.5), "must be in"),
        (lambda: DeviceConfig(num_threads=0), "num_threads is 0"),
        (lambda: CacheConfig(block_size=0), "block_size is 0"),
        (lambda: CacheConfig(kv_cache_memory_bytes=0), "leave it out to measure"),
        (lambda: LimitsConfig(max_num_seqs=0), "max_num_seqs is 0"),
        (lambda: LimitsConfig(max_num_seqs=9, max_num_batched_tokens=8), "needs a token"),
        (lambda: RankConfig(rank=1), "world_size=1"),
        (lambda: RankConfig(world_size=4, tp_size=3), "must equal"),
        (lambda: SupervisionConfig(step_limit_s=0), "must be positive"),
        (lambda: SupervisionConfig(mailbox_limit=0), "mailbox_limit is 0"),
    ],
)
def test_a_wrong_value_is_refused_by_name(build, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build()
    assert words in str(refusal.value)


def test_toml_and_json_files_give_the_same_configuration(tmp_path: Path) -> None:
    toml, json = tmp_path / "worker.toml", tmp_path / "worker.json"
    toml.write_text('[model]\nmodel = "m"\ndtype = "bfloat16"\n[limits]\nmax_num_seqs = 4\n')
    json.write_text('{"model": {"model": "m", "dtype": "bfloat16"}, "limits": {"max_num_seqs": 4}}')
    expected = WorkerConfig(
        model=ModelConfig(model="m", dtype="bfloat16"), limits=LimitsConfig(max_num_seqs=4)
    )
    assert load_config(toml) == load_config(json) == expected


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("w.toml", "model = 3", "Expected `object`, got `int` - at `$.model`"),
        ("w.toml", "[model", "w.toml"),
        ("w.json", '{"model": {"model": "m"}, "nonsense": 1}', "nonsense"),
        ("w.json", '{"model": {"model": "m", "dtype": "half"}}', "half"),
        ("w.json", "{}", "missing required field `model`"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        load_config(path)
    assert words in str(refusal.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")
