"""Step logs of tiny workers, and what every test of them needs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from gpuworker import messages as m
from gpuworker.config import ModelConfig, WorkerConfig
from gpuworker.lifecycle import State
from gpuworker.steplog import LogReader, LogWriter, RecordingWorker, header_of
from gpuworker.steplog.compare import decode_reply
from gpuworker.steplog.records import LoggedReply, LoggedRequest, Record
from gpuworker.steplog.replay import decode_request
from gpuworker.testing import fake_worker
from real_worker import real_worker

FAKE = WorkerConfig(model=ModelConfig(model="fake"))
BRING_UP: tuple[m.Request[m.Reply], ...] = (
    m.InitDevice(),
    m.LoadModel(),
    m.ProfileMemory(),
    m.AllocateKVCache(num_blocks=32),
    m.WarmUp(),
    m.StartServing(),
)


@contextmanager
def new_log(path: Path, config: WorkerConfig = FAKE) -> Iterator[LogWriter]:
    log = LogWriter(path, fsync="close")
    log.begin(header_of(config))
    try:
        yield log
    finally:
        log.close()


@asynccontextmanager
async def recorded(
    path: Path, config: WorkerConfig | None = None
) -> AsyncIterator[RecordingWorker]:
    """Yield a recorded worker that serves: a fake one, or a real one when there is a config."""
    worker = fake_worker() if config is None else real_worker(config, State.UNINIT)
    with new_log(path, config or FAKE) as log:
        async with worker as entered:
            recorder = RecordingWorker(entered, log)
            for request in BRING_UP:
                await recorder.ask(request)
            yield recorder
        recorder.finish()


def records_of(path: Path) -> list[Record]:
    return list(LogReader(path).records())


def dialogue(path: Path) -> list[tuple[str, int, m.Request[m.Reply] | m.Reply | None]]:
    """Requests and answers as they stand in the log."""
    said: list[tuple[str, int, m.Request[m.Reply] | m.Reply | None]] = []
    for record in records_of(path):
        if isinstance(record, LoggedRequest):
            said.append(("asked", record.index, decode_request(record.body)))
        elif isinstance(record, LoggedReply):
            body = decode_reply(record.body) if record.body else None
            said.append(("answered", record.index, body))
    return said
