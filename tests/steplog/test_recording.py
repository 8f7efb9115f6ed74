"""A recorded worker: the order of what is written, and a log that cannot be written any more."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from gpuworker import messages as m
from gpuworker.errors import (
    ConfigError,
    IllegalMessage,
    MailboxFull,
    RequestCancelled,
    StepFailed,
)
from gpuworker.permit import Permit
from gpuworker.steplog import LogReader, LogWriter, RecordingWorker, header_of
from gpuworker.steplog.records import (
    FILE_HEAD,
    End,
    EpochChange,
    LoggedReply,
    LoggedRequest,
    Stopped,
    encode_record,
)
from gpuworker.testing import empty_step, fake_worker
from ipc_serving import Gate
from processes import fake_config
from real_worker import tiny_config
from step_logs import BRING_UP, FAKE, dialogue, new_log, recorded, records_of


async def test_requests_are_logged_when_accepted_and_answers_when_they_land(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    with new_log(path) as log:
        async with fake_worker() as worker:
            recorder = RecordingWorker(worker, log)
            for request in BRING_UP:
                await recorder.ask(request)
            gate = Gate(worker)
            first, second = recorder.submit(empty_step(1)), recorder.submit(empty_step(2))
            status = await recorder.ask(m.GetStatus())
            gate.open.set()
            outputs = [await first, await second]
    said = dialogue(path)
    assert [entry[:2] for entry in said[12:]] == [
        ("asked", 6),
        ("asked", 7),
        ("asked", 8),
        ("answered", 8),
        ("answered", 6),
        ("answered", 7),
    ]
    assert [said[12][2], said[13][2]] == [empty_step(1), empty_step(2)]
    assert [said[15][2], said[16][2], said[17][2]] == [status, *outputs]


async def test_an_answer_is_in_the_log_before_the_asker_has_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with recorded(path) as recorder:
        before = len(records_of(path))
        await recorder.ask(empty_step(1))
        assert [type(record) for record in records_of(path)[before:]] == [
            LoggedRequest,
            LoggedReply,
        ]
    end = records_of(path)[-1]
    assert isinstance(end, End)
    assert (end.num_requests, end.num_replies) == (7, 7)


async def test_refusals_and_failures_are_answers(tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with recorded(path) as recorder:
        with pytest.raises(IllegalMessage):
            await recorder.ask(m.WakeUp())
        permit = Permit()
        permit.revoke(RequestCancelled("withdrawn"))
        with pytest.raises(RequestCancelled):
            await recorder.submit(empty_step(1), permit=permit)
    failures = [message for _, _, message in dialogue(path) if isinstance(message, m.Failure)]
    assert [failure.code for failure in failures] == ["illegal_message", "cancelled"]
    assert failures[0].state == "serving"
    assert "sleep" in failures[0].accepted


async def test_what_the_worker_does_not_accept_is_not_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with new_log(path) as log:
        async with fake_worker(fake_config(mailbox_limit=1)) as worker:
            recorder = RecordingWorker(worker, log)
            for request in BRING_UP:
                await recorder.ask(request)
            gate = Gate(worker)
            reply = recorder.submit(empty_step(1))
            with pytest.raises(MailboxFull):
                recorder.submit(empty_step(2))
            gate.open.set()
            await reply
    assert [index for who, index, _ in dialogue(path) if who == "asked"] == list(range(7))
    assert recorder.statistics().num_requests == recorder.statistics().num_replies == 7


async def test_a_request_that_its_sender_withdrew_has_an_empty_answer(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with new_log(path) as log:
        async with fake_worker() as worker:
            recorder = RecordingWorker(worker, log)
            reply = recorder.submit(m.InitDevice())
            reply.cancel()
            await asyncio.wait([reply])
    assert dialogue(path)[1:] == [("answered", 0, None)]


async def test_an_error_that_is_no_worker_error_is_recorded_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with new_log(path) as log:
        async with fake_worker() as worker:
            recorder = RecordingWorker(worker, log)
            for request in BRING_UP:
                await recorder.ask(request)

            def fail(step: m.ExecuteModel) -> None:
                raise ZeroDivisionError("a fault of our own")

            worker._runtime.before_step = fail
            with pytest.raises(ZeroDivisionError):
                await recorder.ask(empty_step(1))
    failure = dialogue(path)[-1][2]
    assert isinstance(failure, m.Failure)
    assert (failure.code, failure.message) == (
        "worker_error",
        "ZeroDivisionError: a fault of our own",
    )


async def test_steps_are_numbered_within_the_session_that_speaks(tmp_path: Path) -> None:
    path = tmp_path / "log"
    epoch = 4
    with new_log(path) as log:
        async with fake_worker() as worker:
            recorder = RecordingWorker(worker, log, epoch=lambda: epoch)
            for request in BRING_UP:
                await recorder.ask(request)
            await recorder.ask(empty_step(1))
            await recorder.ask(empty_step(2))
            epoch = 9
            await recorder.ask(m.GetStatus())
            await recorder.ask(empty_step(1))
    records = records_of(path)
    assert isinstance(records[1], EpochChange)
    assert [r.epoch for r in records if isinstance(r, EpochChange)] == [4, 9]
    requests = [record for record in records if isinstance(record, LoggedRequest)]
    assert [(r.epoch, r.seq) for r in requests[-4:]] == [(4, 1), (4, 2), (9, 0), (9, 1)]
    assert all(request.seq == 0 for request in requests[:-4])
    offsets = [request.offset_s for request in requests]
    assert offsets == sorted(offsets)


def test_the_header_says_who_recorded_what(tmp_path: Path, tiny_model: Path) -> None:
    config = tiny_config(tiny_model)
    path = tmp_path / "log"
    with closing(LogWriter(path)) as log:
        log.begin(header_of(config, boot_id="0123456789abcdef"))
    header = LogReader(path).read_header()
    assert header.config == config
    assert header.boot_id == "0123456789abcdef"
    assert header.torch.startswith("2.")
    assert header.numpy
    assert header.model is not None
    assert len(header.model.config_sha256) == 64
    size = (tiny_model / "model.safetensors").stat().st_size
    assert header.model.weight_files == (("model.safetensors", size),)
    assert header_of(FAKE).model is None


# -- files ---------------------------------------------------------------------------------------


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        LogWriter(path)
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot create the step log"):
        LogWriter(tmp_path / "nowhere" / "log")


def test_only_the_owner_can_read_a_log(tmp_path: Path) -> None:
    with new_log(tmp_path / "log"):
        assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_a_log_that_never_began_leaves_no_file(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "log")
    assert (tmp_path / "log").exists()
    log.close()
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(("mode", "num_syncs"), [("always", 3), ("close", 0)])
def test_fsync_comes_when_it_was_asked_for(
    mode: str, num_syncs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    log = LogWriter(tmp_path / "log", fsync=mode)
    log.begin(header_of(FAKE))
    log.append(EpochChange(epoch=1, offset_s=0.0))
    log.append(EpochChange(epoch=2, offset_s=0.0))
    assert len(synced) == num_syncs
    log.close()


def test_with_an_interval_a_thread_syncs_and_its_failure_stops_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("gpuworker.steplog.writer._SYNC_INTERVAL_S", 0.0)
    monkeypatch.setattr(os, "fdatasync", fail)
    log = LogWriter(tmp_path / "log")
    log.begin(header_of(FAKE))
    assert log._syncer is not None
    log._syncer.join(20)
    log.append(EpochChange(epoch=1, offset_s=0.0))
    assert log.statistics().stopped == "Input/output error"
    assert len(caplog.records) == 1
    log.close()
    assert isinstance(LogReader(tmp_path / "log").read_header().config, type(FAKE))


def test_an_unknown_fsync_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose one of always, interval, close"):
        LogWriter(tmp_path / "log", fsync="never")
    assert not (tmp_path / "log").exists()


# -- a full disk ---------------------------------------------------------------------------------


class FullDisk:
    """Takes so many bytes and no more, as a file system does: the last write in part."""

    def __init__(self, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = num_bytes
        self._write, self._truncate = os.write, os.ftruncate
        self._size = 0
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "ftruncate", self.truncate)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(descriptor, data[: self.left])
        self.left -= written
        self._size += written
        return written

    def truncate(self, descriptor: int, size: int) -> None:
        self.left += self._size - size
        self._size = size
        self._truncate(descriptor, size)


async def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = tmp_path / "full"
    async with recorded(full) as recorder:
        for step_id in range(1, 6):
            await recorder.ask(empty_step(step_id))
    kinds = [type(record) for record in records_of(full)]
    header_bytes = FILE_HEAD.size + len(encode_record(records_of(full)[0]))
    for limit in range(header_bytes, full.stat().st_size, 37):
        path = tmp_path / f"log-{limit}"
        caplog.clear()
        with monkeypatch.context() as patch:
            disk = FullDisk(limit, patch)
            async with recorded(path) as recorder:
                outputs = [await recorder.ask(empty_step(step_id)) for step_id in range(1, 6)]
            assert [output.step_id for output in outputs] == [1, 2, 3, 4, 5]
            assert recorder.statistics().stopped == "No space left on device"
            assert disk.left >= 0
        assert len(caplog.records) == 1
        assert "the worker goes on: No space left on device" in caplog.text
        reader = LogReader(path)
        records = list(reader.records())
        assert reader.torn_bytes == 0
        said = [type(record) for record in records if not isinstance(record, Stopped)]
        assert said == kinds[: len(said)]
        assert len(said) >= len(records) - 1
        if reader.end is not None:
            assert reader.end == Stopped(reason="No space left on device")
        assert recorder.statistics().num_bytes == path.stat().st_size <= limit


def test_a_limit_of_the_system_is_handled_like_a_full_disk(tmp_path: Path) -> None:
    code = f"""
import resource
from gpuworker.steplog import LogWriter, header_of
from gpuworker.steplog.records import EpochChange
from step_logs import FAKE
from pathlib import Path
log = LogWriter(Path({str(tmp_path / "log")!r}))
log.begin(header_of(FAKE))
resource.setrlimit(resource.RLIMIT_FSIZE, (log.statistics().num_bytes + 200,) * 2)
num = 0
while not log.is_stopped:
    log.append(EpochChange(epoch=num, offset_s=0.0))
    num += 1
print(num, log.statistics().stopped)
log.close()
"""
    tests = Path(__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    assert result.returncode == 0, result.stderr
    number, reason = result.stdout.split(maxsplit=1)
    assert reason.strip() == "File too large"
    assert result.stderr.count("recording to") == 1
    reader = LogReader(tmp_path / "log")
    changes = [record for record in reader.records() if isinstance(record, EpochChange)]
    assert len(changes) == int(number) - 1
    assert reader.torn_bytes == 0
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_log_that_cannot_even_begin_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogWriter(tmp_path / "log")
    with monkeypatch.context() as patch:
        FullDisk(50, patch)
        with pytest.raises(ConfigError, match="No space left on device"):
            log.begin(header_of(FAKE))
    log.close()
    assert not (tmp_path / "log").exists()


async def test_a_request_that_has_no_bytes_ends_the_recording(tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with recorded(path) as recorder:
        odd = m.ExecuteModel(step_id=2**70, kv_epoch=0, num_rows=0)
        await recorder.ask(odd)
        assert "ExecuteModel cannot be encoded" in recorder.statistics().stopped
    end = LogReader(path)
    assert isinstance(list(end.records())[-1], Stopped)


async def test_a_failing_step_is_recorded_with_those_it_aborts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with new_log(path) as log:
        async with fake_worker() as worker:
            recorder = RecordingWorker(worker, log)
            for request in BRING_UP:
                await recorder.ask(request)

            def fail(step: m.ExecuteModel) -> None:
                if step.step_id == 1:
                    raise StepFailed("for a reason")

            worker._runtime.before_step = fail
            replies = [recorder.submit(empty_step(number)) for number in (1, 2)]
            await asyncio.wait(replies)
            await recorder.ask(m.ResumeSteps(step_id=1))
            await recorder.ask(empty_step(3))
    answers = [message for who, _, message in dialogue(path) if who == "answered"][6:]
    codes = [answer.code for answer in answers[:2] if isinstance(answer, m.Failure)]
    assert codes == ["step_failed", "aborted"]
    assert [type(answer) for answer in answers[2:]] == [m.StepsResumed, m.StepOutput]
