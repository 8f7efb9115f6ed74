"""A log sent again: equal where nothing changed, and the first difference where something did."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.config import DeviceConfig, WorkerConfig
from gpuworker.engine import Engine
from gpuworker.engine import bring_up as bring_up_engine
from gpuworker.errors import ConfigError, DeadlineExceeded, StepFailed, WorkerError
from gpuworker.ipc import RemoteWorker, connect
from gpuworker.launch import WorkerProcess
from gpuworker.lifecycle import State
from gpuworker.permit import Permit
from gpuworker.step import NewRequest, SamplingParams, StepRow, pack_step
from gpuworker.steplog import LogReader, RecordingWorker, ReplayReport, replay
from gpuworker.steplog.records import FILE_HEAD, End, EpochChange, LoggedReply, encode_record
from gpuworker.steplog.replay import replay_config
from gpuworker.testing import FakeRuntime, empty_step, fake_worker
from ipc_serving import Gate
from processes import has_ended, until
from real_worker import GREEDY, Hand, real_worker, tiny_config
from step_logs import BRING_UP, FAKE, new_log, recorded, records_of

SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=1234, logprobs=4)
UNSEEDED = SamplingParams(temperature=1.1, logprobs=2)
PROMPT = (5, 60, 7, 80)


def perturbed(model: Path, directory: Path) -> Path:
    """Copy a model and change one element of one tensor."""
    shutil.copytree(model, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.weight"][3] += 0.5
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def fake_replay(path: Path, **options: object) -> ReplayReport:
    return await replay(path, runtime=FakeRuntime, **options)


# -- real models ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> WorkerConfig:
    return tiny_config(tiny_model)


@pytest.fixture(scope="module")
def real_log(config: WorkerConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Greedy, seeded and unseeded sampling, a refused request, a failed step, sleep, reload."""
    path = tmp_path_factory.mktemp("logs") / "log"

    async def drive() -> None:
        async with recorded(path, config) as worker:
            hand = Hand(worker)
            await hand.run(PROMPT, 6)
            await hand.run(PROMPT, 8, sampling=SEEDED)
            await hand.run(PROMPT, 8, sampling=UNSEEDED, finish=False)
            new = NewRequest(
                request_id="bad", slot=1, num_prompt_tokens=4, sampling=SamplingParams(top_p=-1)
            )
            output = await hand.step(
                [StepRow(0, 1, 11), StepRow(1, 4, 0, (20,))], new=[new], tokens=PROMPT
            )
            assert [refusal.request_id for refusal in output.refusals] == ["bad"]
            with pytest.raises(WorkerError):
                await hand.step([StepRow(0, 1, 12)], kv_epoch=99)
            with pytest.raises(WorkerError, match="resume_steps"):
                await hand.step([StepRow(0, 1, 12)])
            hand.step_id -= 1
            await hand.resume()
            await worker.ask(m.Sleep(level=2))
            await worker.ask(m.ResumePools(tags=("weights",)))
            await worker.ask(m.ReloadWeights())
            await worker.ask(m.WakeUp())
            await worker.ask(m.DropRequests())
            hand.step_id = 0
            await hand.run(PROMPT, 6, sampling=UNSEEDED)
            await worker.ask(m.Shutdown())

    asyncio.run(drive())
    return path


async def test_every_answer_of_a_real_worker_comes_again_bit_by_bit(real_log: Path) -> None:
    report = await replay(real_log, tolerance=0.0)
    assert report.first is None
    assert report.num_different == report.num_unanswered == 0
    assert report.num_tokens == 6 + 8 + 8 + 1 + 6
    assert report.num_steps == report.num_compared_steps == 7 + 9 + 8 + 1 + 2 + 7
    assert report.log_end == "orderly"
    assert report.origin_changes == ()
    statuses = report.num_skipped
    requests = [record for record in records_of(real_log) if isinstance(record, LoggedReply)]
    assert report.num_requests + statuses == len(requests)


async def test_a_changed_weight_is_found(real_log: Path, tiny_model: Path, tmp_path: Path) -> None:
    report = await replay(real_log, model=str(perturbed(tiny_model, tmp_path / "other")))
    assert report.num_different > 0
    assert report.first is not None
    assert report.first.message == "execute_model"
    assert report.first.step is not None
    assert report.first.step_id is not None
    assert report.first.mismatch.row == 0
    assert report.first.mismatch.expected != report.first.mismatch.got
    assert report.origin_changes == ()  # the same sizes and config.json


async def test_another_seed_of_the_worker_changes_unseeded_requests_only(
    tiny_model: Path, tmp_path: Path
) -> None:
    for sampling, is_equal in ((SEEDED, True), (GREEDY, True), (UNSEEDED, False)):
        path = tmp_path / f"log-{sampling.seed}-{sampling.temperature}"
        config = tiny_config(tiny_model)
        async with recorded(path, config) as worker:
            await Hand(worker).run(PROMPT, 12, sampling=sampling)
        header, *others = records_of(path)
        changed = FILE_HEAD.pack(*FILE_HEAD.unpack(path.read_bytes()[: FILE_HEAD.size]))
        header = msgspec.structs.replace(
            header,
            config=msgspec.structs.replace(config, device=DeviceConfig(num_threads=1, seed=7)),
        )
        path.write_bytes(changed + b"".join(map(encode_record, [header, *others])))
        report = await replay(path)
        assert (report.num_different == 0) is is_equal


async def test_another_model_ends_the_replay_where_it_does_not_fit(
    real_log: Path, tmp_path: Path
) -> None:
    report = await replay(real_log, model=str(tmp_path / "nowhere"))
    assert report.first is not None
    assert report.first.message == "load_model"
    assert report.first.mismatch.expected == "model_loaded"
    assert report.first.mismatch.got.startswith("checkpoint_not_found")
    assert (report.num_requests, report.num_steps) == (2, 0)


async def test_the_pool_has_the_recorded_size_although_it_was_measured(
    tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    config = tiny_config(tiny_model)
    assert config.cache.kv_cache_memory_bytes is None
    async with recorded(path, config) as worker:
        limits = await worker.ask(m.GetLimits())
    assert limits.num_blocks == 32 < limits.max_num_blocks
    replayed = replay_config(LogReader(path))
    async with real_worker(replayed, State.PROFILED) as worker:
        assert (await worker.ask(m.GetLimits())).max_num_blocks == 32
        assert (await worker.ask(m.AllocateKVCache(num_blocks=32))).num_blocks == 32
    assert (await replay(path)).first is None


async def test_a_machine_without_the_memory_says_so(real_log: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    records = records_of(real_log)
    large = m.KVCacheAllocated(num_blocks=1 << 30, block_size=4, kv_cache_bytes=1 << 50, kv_epoch=0)
    frames = []
    for record in records:
        if isinstance(record, LoggedReply) and record.index == 3:
            record = msgspec.structs.replace(record, body=msgspec.msgpack.encode(large))
        frames.append(encode_record(record))
    path.write_bytes(real_log.read_bytes()[: FILE_HEAD.size] + b"".join(frames))
    report = await replay(path)
    assert report.first is not None
    assert report.first.message == "profile_memory"
    assert "exceeds the" in report.first.mismatch.got
    assert "free memory" in report.first.mismatch.got
    assert report.num_steps == 0


# -- what timing decided ---------------------------------------------------------------------------


async def test_pipelined_steps_that_failed_or_were_withdrawn_end_the_same_way(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    with new_log(path) as log:
        async with fake_worker() as worker:
            recorder = RecordingWorker(worker, log)
            for request in BRING_UP:
                await recorder.ask(request)
            gate = Gate(worker)
            late = Permit(budget_s=0.0)
            replies = [
                recorder.submit(empty_step(1)),
                recorder.submit(empty_step(2), permit=late),
                recorder.submit(empty_step(3)),
            ]
            move = recorder.submit(m.Sleep())
            revoked = Permit()
            waiting = recorder.submit(m.WakeUp(), permit=revoked)
            assert revoked.revoke(DeadlineExceeded("withdrawn"))
            gate.open.set()
            await asyncio.wait([*replies, move, waiting])
            await recorder.ask(m.WakeUp())
            epoch = (await recorder.ask(m.GetStatus())).kv_epoch
            await recorder.ask(m.ResumeSteps(step_id=2))
            await recorder.ask(empty_step(4, epoch))
    report = await fake_replay(path)
    assert report.first is None
    assert report.num_compared_steps == 4
    assert report.log_end == "unfinished"


async def test_a_step_that_fails_only_in_the_replay_is_the_first_difference(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    async with recorded(path) as recorder:
        for step_id in (10, 11, 12):
            await recorder.ask(empty_step(step_id))

    class Failing(FakeRuntime):
        def execute_model(self, step: m.ExecuteModel) -> m.StepOutput:
            if step.step_id == 11:
                raise StepFailed("a reason")
            return super().execute_model(step)

    report = await replay(path, runtime=Failing)
    assert report.num_different == 2  # the last one is aborted
    assert report.first is not None
    assert (report.first.step, report.first.step_id) == (2, 11)
    assert report.first.mismatch.got == "step_failed: a reason"


async def test_requests_without_an_answer_are_sent_and_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with recorded(path) as recorder:
        await recorder.ask(empty_step(1))
        await recorder.ask(empty_step(2))
    records = [record for record in records_of(path) if not isinstance(record, End)]
    data = path.read_bytes()[: FILE_HEAD.size] + b"".join(map(encode_record, records[:-1]))
    path.write_bytes(data + b"\0\0\0")
    report = await fake_replay(path)
    assert report.first is None
    assert (report.num_steps, report.num_compared_steps, report.num_unanswered) == (2, 1, 1)
    assert report.torn_bytes == 3


async def test_what_its_sender_withdrew_is_not_sent_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with new_log(path) as log:
        async with fake_worker() as worker:
            recorder = RecordingWorker(worker, log)
            withdrawn = recorder.submit(m.InitDevice())
            withdrawn.cancel()
            await recorder.ask(m.InitDevice())
    report = await fake_replay(path)
    assert report.first is None
    assert report.num_unanswered == 1


async def test_messages_queued_at_the_end_are_closed_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with new_log(path) as log:
        async with fake_worker() as worker:
            recorder = RecordingWorker(worker, log)
            for request in BRING_UP:
                await recorder.ask(request)
            gate = Gate(worker)
            step = recorder.submit(empty_step(1))
            replies = [recorder.submit(m.Shutdown()), recorder.submit(empty_step(2))]
            gate.open.set()
            await asyncio.wait([step, *replies])
    report = await fake_replay(path)
    assert report.first is None
    assert report.num_compared_steps == 2


async def test_part_of_a_log_can_be_compared(tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with recorded(path) as recorder:
        for step_id in range(1, 8):
            await recorder.ask(empty_step(step_id))
    report = await fake_replay(path, first_step=3, last_step=5)
    assert (report.num_steps, report.num_compared_steps) == (5, 3)
    assert (await fake_replay(path, last_step=1)).num_compared == len(BRING_UP) + 1
    with pytest.raises(ConfigError, match="holds 7 steps; there is no step 8"):
        await fake_replay(path, first_step=8)
    with pytest.raises(ConfigError, match="steps 4 to 3 are none"):
        await fake_replay(path, first_step=4, last_step=3)


def test_directories_of_the_recording_machine_are_not_needed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    config = msgspec.structs.replace(
        tiny_config("somewhere", trace_dir=tmp_path / "traces"),
        sleep=msgspec.structs.replace(FAKE.sleep, spill_dir=str(tmp_path / "nowhere")),
    )
    with new_log(path, config):
        pass
    replayed = replay_config(LogReader(path), model="here")
    assert replayed.model.model == "here"
    assert replayed.sleep.spill_dir is None
    assert replayed.supervision.trace_dir is None


# -- the commands --------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuworker", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def recording(path: Path, config: WorkerConfig) -> WorkerProcess:
    return WorkerProcess(
        config, command=(sys.executable, "-m", "gpuworker", "record", "--log", str(path))
    )


async def bring_up(worker: RemoteWorker) -> None:
    for request in BRING_UP:
        await worker.ask(request, timeout_s=60)


def decode_step(step_id: int, num_computed: int) -> m.ExecuteModel:
    """The next token of the request in slot 0."""
    return m.ExecuteModel(
        step_id=step_id, kv_epoch=0, num_rows=1, buffer=pack_step([StepRow(0, 1, num_computed)])
    )


async def test_a_recording_process_killed_between_steps_leaves_a_log_that_replays(
    config: WorkerConfig, tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with recording(path, config) as process, connect(process.endpoint) as worker:
        await bring_up(worker)
        hand = Hand(worker)
        await hand.run(PROMPT, 5, sampling=SEEDED)
        new = NewRequest(request_id="y", slot=0, num_prompt_tokens=4, sampling=UNSEEDED)
        await hand.step([StepRow(0, 4, 0, range(1, 17))], new=[new], tokens=PROMPT)
        num_computed = 4
        pending = []
        for _ in range(20):  # two in flight all the time, and the process dies behind them
            hand.step_id += 1
            pending.append(worker.submit(decode_step(hand.step_id, num_computed)))
            num_computed += 1
            if len(pending) == 2:
                await pending.pop(0)
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: has_ended(process.pid))
        await asyncio.wait(pending)
        for reply in pending:
            reply.exception()
    reader = LogReader(path)
    assert any(isinstance(record, EpochChange) for record in reader.records())
    assert reader.end is None
    header = reader.read_header()
    assert header.config == config
    assert len(header.boot_id) == 16
    equal = await asyncio.to_thread(command, "replay", str(path), "--json", "--tolerance", "0")
    assert equal.returncode == 0, equal.stdout + equal.stderr
    report = json.loads(equal.stdout)
    assert report["num_compared_steps"] >= 6 + 1 + 19
    assert report["num_compared_steps"] >= report["num_steps"] - 2
    assert report["num_different"] == 0
    assert report["log_end"] == "unfinished"
    other = perturbed(tiny_model, tmp_path / "other")
    changed = await asyncio.to_thread(command, "replay", str(path), "--model", str(other))
    assert changed.returncode == 1, changed.stdout + changed.stderr
    assert "different" in changed.stdout
    assert "execute_model, step " in changed.stdout


async def test_an_orderly_recording_ends_in_order_and_is_not_overwritten(
    config: WorkerConfig, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    async with recording(path, config) as process:
        async with connect(process.endpoint) as worker:
            await bring_up(worker)
            await Hand(worker).run(PROMPT, 3)
        async with connect(process.endpoint) as worker:
            await Hand(worker).run(PROMPT, 3)
        assert await process.stop() == 0
    records = records_of(path)
    assert isinstance(records[-1], End)
    epochs = [record.epoch for record in records if isinstance(record, EpochChange)]
    assert [epoch for epoch in epochs if epoch] == [1, 2]
    size = path.stat().st_size
    again = await asyncio.to_thread(
        command, "record", "--log", str(path), "--model", config.model.model
    )
    assert again.returncode == 2
    assert "exists and is not overwritten" in again.stderr
    assert path.stat().st_size == size
    text = await asyncio.to_thread(command, "replay", str(path))
    assert text.returncode == 0, text.stderr
    assert "every answer is the recorded one" in text.stdout


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: None, "cannot read"),
        (lambda path: path.write_bytes(b""), "before the header is complete"),
        (lambda path: path.write_text("not a log"), "is no step log"),
    ],
)
def test_an_unusable_log_exits_with_2(
    prepare: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    prepare(tmp_path / "log")
    result = command("replay", str(tmp_path / "log"))
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("verb", ["record", "replay"])
def test_the_verbs_teach(verb: str) -> None:
    text = command(verb, "-h").stdout
    assert "examples:" in text
    assert f"gpuworker {verb}" in text


def test_a_recording_that_cannot_start_leaves_no_file(tmp_path: Path) -> None:
    result = command("record", "--log", str(tmp_path / "log"))
    assert result.returncode == 2
    assert "no model is named" in result.stderr
    assert not (tmp_path / "log").exists()


async def test_a_recorded_engine_that_pipelines_and_preempts_replays_bit_by_bit(
    tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    config = tiny_config(tiny_model)
    with new_log(path, config) as log:
        async with GPUWorker(config) as worker:
            recorder = RecordingWorker(worker, log)
            await bring_up_engine(recorder, num_blocks=12)

            async def generate(engine: Engine, seed: int) -> None:
                sampling = SamplingParams(seed=seed if seed % 2 else None, logprobs=seed % 3)
                prompt = [seed + position for position in range(10)]
                async for _ in engine.generate(
                    prompt, sampling=sampling, max_tokens=14, stop_token_ids=()
                ):
                    pass

            async with Engine(recorder) as engine:
                await asyncio.gather(*(generate(engine, seed) for seed in range(6)))
                assert engine.statistics().num_preemptions > 0
    report = await replay(path, tolerance=0.0)
    assert report.first is None
    assert report.num_tokens >= 6 * 14
    assert report.num_unanswered == 0
