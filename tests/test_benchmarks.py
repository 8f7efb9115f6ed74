"""Every benchmark runs and prints lines that a program can read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import BENCHMARKS
from benchmarks.report import interleave, percentile

ROOT = Path(__file__).parents[1]
NEEDS_A_MODEL = ("bring_up", "sleep_wake", "generation")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_prints_one_json_line_per_figure(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "results" / "lines.jsonl"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--output", str(output)]
    if name in NEEDS_A_MODEL:
        command += ["--model", str(tiny_model), "--num-threads", "1"]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110,
        env={**os.environ, "PYTHONPATH": f"src{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert output.read_text() == result.stdout
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines
    for line in lines:
        assert line["benchmark"] == name
        assert isinstance(line["value"], int | float)
        for key in ("figure", "unit", "date", "machine", "python", "torch", "gpuworker"):
            assert line[key], key
        assert line["command"].startswith(f"python -m benchmarks.{name} --quick")


def test_every_module_that_measures_is_in_the_list() -> None:
    with_main = {
        path.stem for path in (ROOT / "benchmarks").glob("*.py") if "def main()" in path.read_text()
    }
    assert with_main - {"__main__"} == set(BENCHMARKS)


def test_variants_are_measured_in_turns() -> None:
    order: list[str] = []

    def note(name: str) -> float:
        order.append(name)
        return 1.0

    rounds = interleave({"a": lambda: note("a"), "b": lambda: note("b")}, 2)
    assert order == ["a", "b", "a", "b"]
    assert rounds == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_percentiles_are_interpolated() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([1.0, 2.0], 90) == pytest.approx(1.9)
    assert percentile([5.0], 10) == 5.0
