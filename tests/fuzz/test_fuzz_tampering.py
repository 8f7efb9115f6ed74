"""Somebody between client and worker changes a byte, at every stage of a connection.

Both sides end what they cannot follow, with typed errors; the worker serves on. With keys a
changed byte never becomes another answer.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import zmq

from gpuworker import messages as m
from gpuworker.errors import ClientError, WorkerError
from gpuworker.ipc import connect
from gpuworker.ipc.curve import ClientKeys, ServerKeys
from gpuworker.lifecycle import State
from gpuworker.testing import empty_step, fake_worker, walk_to
from ipc_serving import served

SEED = int(os.environ.get("GPUWORKER_FUZZ_SEED", "24"))
NUM_TRIALS = 240 * int(os.environ.get("GPUWORKER_FUZZ_SCALE", "1"))
AT_A_TIME = 24
CONNECT_LIMIT_S = 0.5
DEADLINE_S = 20.0
LAST_BYTE = {False: 400, True: 900}
"""About how much each side says, without keys and with them."""


class Tamperer:
    """Passes bytes on between a client and a worker, and changes one place in each connection."""

    def __init__(self, target: str, rng: random.Random, last_byte: int) -> None:
        self.num_changes = 0
        self._target = target
        self._rng = rng
        self._last_byte = last_byte

    async def __call__(
        self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        from_worker, to_worker = await asyncio.open_unix_connection(self._target)
        places = [self._rng.randrange(self._last_byte), 1 << 30]
        self._rng.shuffle(places)
        await asyncio.gather(
            self._pass_on(from_client, to_worker, places[0]),
            self._pass_on(from_worker, to_client, places[1]),
        )

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: int
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(4096):
                if place < len(data):
                    data, place = self._changed(data, place), 1 << 30
                    self.num_changes += 1
                place -= len(data)
                writer.write(data)
                await writer.drain()
        writer.close()

    def _changed(self, data: bytes, at: int) -> bytes:
        match self._rng.randrange(5):
            case 0:
                return data[:at] + data[at + 1 :]
            case 1:
                return data[:at] + self._rng.randbytes(3) + data[at:]
            case 2:
                return data[:at]
            case _:
                return data[:at] + bytes([data[at] ^ 1 << self._rng.randrange(8)]) + data[at + 1 :]


@asynccontextmanager
async def _tampered(tamperer: Tamperer, path: Path) -> AsyncIterator[str]:
    server = await asyncio.start_unix_server(tamperer, path)
    try:
        yield f"ipc://{path}"
    finally:
        server.close()


@pytest.mark.parametrize("has_keys", [False, True])
async def test_a_changed_byte_ends_a_connection_at_most(has_keys: bool, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    tmp_path.chmod(0o700)
    server_keys = client_keys = None
    if has_keys:
        (public, secret), (client_public, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        server_keys = ServerKeys(public, secret, frozenset({client_public}))
        client_keys = ClientKeys(client_public, client_secret, public)
    outcomes: Counter[str] = Counter()

    async def try_once(endpoint: str) -> None:
        outcome = "as it was"
        try:
            async with (
                asyncio.timeout(DEADLINE_S),
                connect(
                    endpoint,
                    observe=True,
                    keys=client_keys,
                    timeout_s=CONNECT_LIMIT_S,
                    connect_timeout_s=CONNECT_LIMIT_S,
                ) as observer,
            ):
                for _ in range(4):
                    spec = await observer.ask(m.GetKVCacheSpec())
                    if spec != expected:
                        outcome = "another answer"
        except (WorkerError, ClientError) as error:
            outcome = type(error).__name__
        outcomes[outcome] += 1

    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        expected = await worker.ask(m.GetKVCacheSpec())
        async with served(worker, keys=server_keys) as (_, endpoint):
            path = endpoint.removeprefix("ipc://")
            tamperer = Tamperer(path, random.Random(SEED), LAST_BYTE[has_keys])
            async with _tampered(tamperer, tmp_path / "between") as changed:
                for _ in range(NUM_TRIALS // AT_A_TIME):
                    await asyncio.gather(*(try_once(changed) for _ in range(AT_A_TIME)))
                    async with connect(
                        endpoint, keys=client_keys, timeout_s=DEADLINE_S
                    ) as scheduler:
                        assert (await scheduler.ask(empty_step(1))).step_id == 1
    assert tamperer.num_changes > NUM_TRIALS // 2
    assert outcomes["ConnectionLost"] > NUM_TRIALS // 4
    if has_keys:
        assert "another answer" not in outcomes
        assert {*outcomes} <= {"as it was", "ConnectionLost", "RequestTimeout"}, outcomes
    print(outcomes)
