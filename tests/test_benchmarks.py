"""Every benchmark runs and prints lines that a program can read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import report, step_parts
from benchmarks.__main__ import BENCHMARKS
from benchmarks.report import OtherLoad, Report, interleave, percentile
from benchmarks.step_parts import BETWEEN, StepClock

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
    if name == "generation":
        command += ["--profile", "--dtype", "float32"]
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

    if name == "generation":
        check_generation(lines)


def check_generation(lines: list[dict[str, object]]) -> None:
    for batch in (1, 2):
        mine = [line for line in lines if line["batch"] == batch]
        rates = {line["variant"] for line in mine if line["figure"] == "decode"}
        assert {"gpuworker", "matmuls alone", "matmuls as the engine does them"} < rates
        assert any(str(variant).startswith("transformers") for variant in rates)
        parts = {str(line["part"]): line for line in mine if line["figure"] == "part of a step"}
        assert {"attention", "norms", "rope", "sampler", "step preparation", "head"} < set(parts)
        shares = [share for line in parts.values() if isinstance(share := line["share"], float)]
        assert sum(shares) == pytest.approx(1.0, abs=0.01)


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


def test_a_machine_without_git_still_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    Report("none", None).figure("speed", 1.0, "m/s")
    assert json.loads(capsys.readouterr().out)["commit"] == ""


def test_a_ratio_is_the_median_of_the_ratios_of_the_rounds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rounds = {"slow": [1.0, 10.0, 2.0], "fast": [2.0, 20.0, 8.0]}
    Report("none", None).compare("speed", rounds, "m/s", baseline="slow")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["ratio_to_baseline"] for line in lines] == [1.0, 2.0]
    assert [line["value"] for line in lines] == [2.0, 8.0]


def test_what_others_compute_is_told_from_what_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    others_s = iter([100.0, 103.0])
    moments = iter([10.0, 12.0])
    monkeypatch.setattr(OtherLoad, "_others_s", staticmethod(lambda: next(others_s)))
    monkeypatch.setattr(report.time, "perf_counter", lambda: next(moments))
    assert OtherLoad().cores() == 1.5


def test_a_part_of_a_step_is_not_charged_for_what_runs_inside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(step_parts.time, "perf_counter", lambda: now)
    clock = StepClock()
    for _ in range(2):
        now += 5.0  # between steps
        clock.enter("step")
        now += 1.0
        clock.enter("head")
        now += 2.0
        clock.enter("matmuls")  # of the head
        now += 4.0
        clock.leave()
        clock.leave()
        now += 8.0
        clock.leave()
        clock.end_step(num_rows=3)
    assert clock.steps == [(3, {BETWEEN: 5.0, "step": 9.0, "head": 6.0})]


def test_parts_are_averaged_over_the_quieter_half_of_the_steps_of_that_size() -> None:
    clock = StepClock()
    clock.steps += [(1, {"a": 1.0}), (2, {"a": 0.1}), (1, {"a": 9.0}), (1, {"a": 2.0, "b": 1.0})]
    clock.steps.append((1, {"a": 7.0}))
    assert clock.mean_by_part(num_rows=1, num_steps=4) == {"a": 1.5, "b": 0.5}
