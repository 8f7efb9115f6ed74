"""gpuworker watch: a line for every event, for people and for programs, until the worker goes."""

from __future__ import annotations

import asyncio
import json

import pytest

from gpuworker import events as e
from gpuworker import messages as m
from gpuworker.cli import main, watch
from gpuworker.ipc.subscriber import Gap, Heard
from gpuworker.lifecycle import State
from gpuworker.testing import fake_worker, walk_to
from ipc_serving import served

DEADLINE_S = 20.0


async def _watched(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[str], str]:
    """Watch a worker that falls asleep and goes away; returns status, lines and errors."""
    text = ""

    async def until(words: str) -> None:
        nonlocal text
        async with asyncio.timeout(DEADLINE_S):
            while words not in text:
                text += capsys.readouterr().out
                await asyncio.sleep(0.01)

    async with fake_worker() as worker:
        async with served(worker) as (_, endpoint):
            await walk_to(worker, State.SERVING)
            watching = asyncio.create_task(asyncio.to_thread(main, ["watch", endpoint, *options]))
            await until("serving")
            await worker.ask(m.Sleep())
            await until("sleeping")
        async with asyncio.timeout(DEADLINE_S):
            status = await watching
    captured = capsys.readouterr()
    return status, (text + captured.out).splitlines(), captured.err


async def test_a_program_reads_an_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, errors = await _watched(capsys, "--json", "--topics", "state")
    first, second = map(json.loads, lines)
    assert first == {
        "topic": "state", "event": "state_changed", "seq": 5, "snapshot": True,
        "state": "serving", "previous": "",
    }  # fmt: skip
    assert (second["seq"], second["snapshot"], second["state"]) == (6, False, "sleeping")
    assert status == 1
    assert errors.startswith("gpuworker: ConnectionLost: the worker at ipc://")


async def test_people_see_every_topic(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = await _watched(capsys)
    assert {line.split()[0] for line in lines} >= {"state", "kv_epoch", "health", "metrics"}
    assert any(line.endswith("state=sleeping previous=serving") for line in lines)


async def test_a_gap_is_a_line_and_so_is_an_event_with_line_breaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rude = e.HealthChanged(health="faulted", reason="a\nb\x1b[31m")

    class Scripted:
        async def __aenter__(self) -> Scripted:
            self._items = [Gap("health", 3), Heard(rude, 9, False)]
            return self

        async def __aexit__(self, *_: object) -> None: ...

        def __aiter__(self) -> Scripted:
            return self

        async def __anext__(self) -> Heard | Gap:
            if not self._items:
                raise StopAsyncIteration
            return self._items.pop(0)

    monkeypatch.setattr(watch, "watch", lambda *_, **__: Scripted())
    assert await asyncio.to_thread(main, ["watch", "ipc:///x"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "health   gap num_missed=3",
        r"health   health_changed seq=9 snapshot=False health=faulted reason='a\nb\x1b[31m'",
    ]
