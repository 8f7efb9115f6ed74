"""The verbs: output for programs, exit codes, errors in one line, torch only where needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuworker import messages as m
from gpuworker.cli import main
from gpuworker.cli.ask import build_request
from gpuworker.cli.options import size_bytes
from gpuworker.errors import ConfigError


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuworker", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def _json(*arguments: str) -> object:
    result = _run(*arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_states_prints_the_matrix_for_people_and_programs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["states"]) == 0
    assert "| `sleep` |" in capsys.readouterr().out
    assert main(["states", "--json"]) == 0
    matrix = json.loads(capsys.readouterr().out)
    assert matrix["uninit"] == {
        "init_device": "device_ready",
        "drop_requests": "uninit",
        "shutdown": "closed",
    }
    assert matrix["serving"]["execute_model"] == "serving"


def test_diagram_and_schema_print_what_docs_contains(capsys: pytest.CaptureFixture[str]) -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert main(["diagram"]) == 0
    assert capsys.readouterr().out in (docs / "lifecycle.md").read_text()
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        (docs / "messages.schema.json").read_text()
    )
    assert main(["docs", "--check", str(docs)]) == 0


def test_docs_check_names_what_is_out_of_date(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["docs", "--check", str(tmp_path)]) == 1
    assert "messages.md is out of date" in capsys.readouterr().err
    assert main(["docs", str(tmp_path)]) == 0
    assert main(["docs", "--check", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    "arguments", [["-h"], ["states"], ["schema"], ["diagram"], ["ask", "-l"], ["demo", "-h"]]
)
def test_a_verb_that_computes_nothing_does_not_load_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom gpuworker.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "verb",
    [
        "demo",
        "serve",
        "generate",
        "ask",
        "watch",
        "record",
        "replay",
        "keygen",
        "states",
        "schema",
        "diagram",
        "doctor",
        "docs",
    ],
)
def test_every_verb_teaches(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([verb, "-h"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert f"gpuworker {verb}" in text


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["serve"], 2, "no model is named"),
        (["serve", "--config", "/nowhere.toml"], 2, "cannot read /nowhere.toml"),
        (["serve", "--model", "m", "--max-num-seqs", "0"], 2, "limits.max_num_seqs is 0"),
        (["serve", "--model", "m", "--endpoint", "tcp://0.0.0.0:1"], 2, "needs keys"),
        (["ask", "ipc:///nowhere/w", "get_statos"], 2, "no message 'get_statos'"),
        (["ask", "ipc:///nowhere/w", "sleep", '{"depth": 1}'], 2, "sleep has no field depth"),
        (["generate", "/nowhere", "hello"], 1, "/nowhere"),
        (["demo", "--model", "/nowhere"], 1, "/nowhere"),
    ],
)
def test_a_mistake_is_a_line_on_stderr_and_an_exit_status(
    arguments: list[str], status: int, words: str
) -> None:
    result = _run(*arguments)
    assert result.returncode == status, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert "Traceback" in _run(*arguments, GPUWORKER_TRACEBACK="1").stderr


@pytest.mark.parametrize("arguments", [["serve", "--dtype", "float8"], ["nonsense"], []])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert _run(*arguments).returncode == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("1k", 1000), ("512M", 512_000_000), ("2GiB", 2 << 30), ("1.5Ki", 1536)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert size_bytes(text) == size


def test_a_request_is_built_by_field_name() -> None:
    assert build_request("sleep", "{}") == m.Sleep()
    assert build_request("resume_pools", '{"tags": ["weights"]}') == m.ResumePools(
        tags=("weights",)
    )


@pytest.mark.parametrize(
    ("tag", "fields", "words"),
    [
        ("resume_pools", "{}", "needs tags"),
        ("resume_pools", '{"tags": ["everything"]}', "everything"),
        ("sleep", '{"level": 3}', "level"),
        ("sleep", "[1]", "object"),
        ("sleep", "{", "not right"),
        ("allocate_kv_cache", '{"num_blocks": 0}', ">= 1"),
    ],
)
def test_wrong_fields_are_refused_before_anything_is_sent(
    tag: str, fields: str, words: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_request(tag, fields)
    assert words in str(refusal.value)


def test_doctor_finds_this_machine_good_enough() -> None:
    findings = _json("doctor", "--json")
    assert isinstance(findings, list)
    assert {"python", "torch", "memory", "ipc", "compute threads"} <= {f["what"] for f in findings}
    assert all(finding["verdict"] != "fail" for finding in findings)


@contextmanager
def _serving(*arguments: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuworker", "serve", "--json", "--num-threads", "1", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process:
        yield json.loads(process.stdout.readline())["endpoint"]
        process.terminate()
        assert process.wait(60) == 0


def test_serve_ask_and_generate_work_together(tiny_model: Path) -> None:
    model = str(tiny_model)
    with _serving("--model", model, "--max-num-seqs", "4", "--max-num-batched-tokens", "64") as at:
        status = _json("ask", at, "get_status", "--json")
        assert isinstance(status, dict)
        assert (status["state"], status["memory"]) == ("uninit", [])
        refused = _run("ask", at, "wake_up")
        assert refused.returncode == 1
        assert "accepted: init_device, drop_requests, shutdown" in refused.stderr
        options = ("--max-tokens", "12", "--json")
        remote = _json("generate", model, "hello", "--endpoint", at, *options)
        assert isinstance(remote, dict)
        assert len(remote["token_ids"]) in range(1, 13)
        again = _json("generate", model, "hello", "--endpoint", at, *options)
        embedded = _json("generate", model, "hello", *options)
        assert isinstance(again, dict)
        assert isinstance(embedded, dict)
        assert remote["token_ids"] == again["token_ids"] == embedded["token_ids"]
        serving = _json("ask", at, "get_status", "--json")
        assert isinstance(serving, dict)
        assert (serving["state"], serving["num_requests"]) == ("serving", 0)
        assert _run("ask", at, "sleep", '{"level": 2}').returncode == 0
        assert "weights_undefined" in _run("ask", at, "wake_up").stderr


def test_generate_streams_text_and_reads_prompts_from_stdin(tiny_model: Path) -> None:
    arguments = ["generate", str(tiny_model), "--max-tokens", "5", "--num-threads", "1"]
    one = _run(*arguments, "once")
    assert one.returncode == 0, one.stderr
    assert one.stdout.endswith("\n")
    many = subprocess.run(
        [sys.executable, "-m", "gpuworker", *arguments, "-", "--json"],
        input="once\n\ntwice\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
    )
    answers = [json.loads(line) for line in many.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["once", "twice"]
    assert answers[0]["text"] + "\n" == one.stdout


def test_the_demo_runs_without_any_network(tiny_model: Path) -> None:
    result = _run("demo", "--offline", "--max-tokens", "8", "--num-threads", "1")
    assert result.returncode == 0, result.stderr
    assert "tiny generated model" in result.stderr
    for words in ("init_device", "serving", "sleep level 1", "sleep level 2", "checks", "passed"):
        assert words in result.stdout
    document = _json("demo", "--model", str(tiny_model), "--max-tokens", "8", "--json")
    assert isinstance(document, dict)
    assert document["passed"] is True
    assert [row["state"] for row in document["states"]][-1] == "serving"
    first = document["first"]["token_ids"]
    for sleep in document["sleeps"]:
        assert sleep["answer"]["token_ids"] == first
        assert sleep["arena_bytes_asleep"] == 0 < sleep["arena_bytes_before"]
