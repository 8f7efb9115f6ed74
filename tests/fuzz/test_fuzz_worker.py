"""Public case B20 at length: a live worker process under damaged messages by the hundred thousand.

A failure names its seed: GPUWORKER_FUZZ_SEED runs that one again. GPUWORKER_FUZZ_SCALE=10 sends ten
times as much; give pytest a longer --timeout then.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

from fake_serve import fake_serve
from fuzzer import Fuzzer
from gpuworker import messages as m
from gpuworker.errors import WorkerError
from gpuworker.ipc import BlockingClient
from gpuworker.launch import WorkerProcess
from gpuworker.testing import empty_step
from processes import TO_SERVING, WALK, fake_config

SEED = int(os.environ.get("GPUWORKER_FUZZ_SEED", "20"))
NUM_MESSAGES = 200_000 * int(os.environ.get("GPUWORKER_FUZZ_SCALE", "1"))
BETWEEN_LOOKS = 5_000
MAX_GROWTH_BYTES = 16 << 20
ANSWERS = {
    *("malformed_message", "message_too_large", "unknown_message", "unsupported_version"),
    *("invalid_request", "illegal_message", "no_session", "stale_epoch", "fenced"),
    *("out_of_order", "duplicate_expired", "busy", "mailbox_full", "deadline_exceeded"),
    *("cancelled", "aborted", "stale_kv_epoch", "weights_undefined", "insufficient_kv_memory"),
}
"""Every code that the sender of a damaged message may see."""


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _serve_again(client: BlockingClient) -> None:
    """Lead the worker back to serving from wherever the damage has led it."""
    state = client.ask(m.GetStatus()).state
    if state == "sleeping":
        client.ask(m.ResumePools(tags=("weights",)))
        client.ask(m.ReloadWeights())
        client.ask(m.WakeUp())
    elif state != "serving":
        for request in WALK[:TO_SERVING]:
            try:
                client.ask(request)
            except WorkerError as error:
                assert error.code == "illegal_message"  # it was further than this  # noqa: PT017


def _look(endpoint: str) -> None:
    """Ask as an observer, take the worker over, and run a real step."""
    with BlockingClient(endpoint, observe=True, timeout_s=20) as observer:
        assert observer.ask(m.GetHealth()).health == "ok"
    with BlockingClient(endpoint, client="look", timeout_s=20) as client:
        _serve_again(client)
        health = client.ask(m.GetHealth())
        assert health.ready, health
        kv_epoch = client.ask(m.GetLimits()).kv_epoch
        assert client.ask(empty_step(7, kv_epoch)).step_id == 7
        assert client.ask(m.GetHealth()).num_steps == health.num_steps + 1


def _attack(endpoint: str, pid: int) -> Fuzzer:
    resident: list[int] = []
    sizes = random.Random(SEED)
    with Fuzzer(endpoint, SEED) as fuzzer:
        while fuzzer.num_messages < NUM_MESSAGES:
            _look(endpoint)
            sent = fuzzer.num_messages
            while fuzzer.num_messages - sent < BETWEEN_LOOKS:
                fuzzer.batch(sizes.choice((1, 5, 20, 60, 300)))
            assert fuzzer.suspects == []
            resident.append(_resident_bytes(pid))
        _look(endpoint)
    assert max(resident[-3:]) - resident[len(resident) // 4] < MAX_GROWTH_BYTES, resident
    return fuzzer


async def test_a_worker_process_survives_damaged_messages() -> None:
    print(f"seed {SEED}")
    async with WorkerProcess(fake_config(), command=fake_serve("plain")) as process:
        fuzzer = await asyncio.to_thread(_attack, process.endpoint, process.pid)
        assert process.returncode is None
        words = process.last_words()
    assert "Traceback" not in words
    failures = {code for code in fuzzer.codes if code in ANSWERS}
    replies = {m.message_tag(reply.__name__) for reply in m.REPLY_OF.values()}
    assert {*fuzzer.codes} <= failures | replies, fuzzer.codes
    assert len(failures) >= 10, fuzzer.codes  # the damage has reached all that much
    assert process.returncode == 0
    print(f"{fuzzer.num_messages} messages, {fuzzer.num_frames} frames: {fuzzer.codes}")
