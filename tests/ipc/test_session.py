"""Sessions: the newest epoch wins, the old ones are told, strangers only ask."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuworker import messages as m
from gpuworker.errors import (
    ConfigError,
    Fenced,
    InvalidRequest,
    NoSession,
    OutOfOrder,
    RequestCancelled,
    SessionError,
    StaleEpoch,
)
from gpuworker.ipc.epoch_file import EpochFile, epoch_path
from gpuworker.ipc.session import OBSERVER_REQUESTS, SessionBook
from gpuworker.ipc.wire import Kind, RequestHeader


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _book(path: Path | None = None, clock: _Clock | None = None) -> SessionBook:
    return SessionBook(EpochFile(path), 2, clock or _Clock())


def _hello(epoch: int, lease_ms: int = 0, client: str = "") -> m.Hello:
    return m.Hello(min_version=1, max_version=1, epoch=epoch, client=client, lease_ms=lease_ms)


def _join(book: SessionBook, peer: bytes, epoch: int, lease_ms: int = 0) -> None:
    session = book.claim(peer, _hello(epoch, lease_ms))
    book.record(session)
    book.welcome(session)


def _header(epoch: int, seq: int = 0, corr: int = 1) -> RequestHeader:
    return RequestHeader(Kind.REQUEST, corr, epoch, seq)


def test_a_stranger_may_only_ask() -> None:
    book = _book()
    for message in m.REQUESTS:
        if message in m.SESSION_REQUESTS:
            continue
        if message in OBSERVER_REQUESTS:
            assert book.accept(b"x", _header(0), message).session is None
        else:
            with pytest.raises(NoSession, match="say hello"):
                book.accept(b"x", _header(0), message)


def test_an_epoch_that_is_not_newer_is_fenced_and_changes_nothing() -> None:
    book = _book()
    _join(book, b"a", 5)
    for epoch in (5, 4, 1):
        with pytest.raises(Fenced, match="not above 5"):
            book.claim(b"b", _hello(epoch))
    assert book.accept(b"a", _header(5, 1), m.ExecuteModel).seq == 1
    assert book.health().highest_epoch == 5


def test_a_newer_scheduler_revokes_what_the_old_one_queued() -> None:
    book = _book()
    _join(book, b"a", 1)
    started, queued = (
        book.accept(b"a", _header(1, seq, corr=seq), m.ExecuteModel) for seq in (1, 1)
    )
    book.begin(started)
    started.permit.start()
    queued = book.accept(b"a", _header(1, 2, corr=2), m.ExecuteModel)
    book.begin(queued)
    claimant = book.claim(b"b", _hello(2, client="the new one"))
    with pytest.raises(StaleEpoch, match="the new one with epoch 2"):
        queued.permit.start()
    for header in (_header(1, 3), _header(2, 1)):  # nobody speaks until the new one is welcome
        with pytest.raises(SessionError):
            book.accept(b"a", header, m.ExecuteModel)
        with pytest.raises(SessionError):
            book.accept(b"b", header, m.ExecuteModel)
    assert isinstance(book.end(started), StaleEpoch)  # its result is not for the old one any more
    book.welcome(claimant)
    with pytest.raises(StaleEpoch):
        book.accept(b"a", _header(1, 3), m.ExecuteModel)
    assert book.accept(b"b", _header(2, 1), m.ExecuteModel).seq == 1  # numbers begin anew


def test_a_claimant_that_is_overtaken_is_told() -> None:
    book = _book()
    first = book.claim(b"a", _hello(1))
    second = book.claim(b"b", _hello(2))
    with pytest.raises(Fenced, match="overtaken by epoch 2"):
        book.welcome(first)
    book.welcome(second)


def test_an_epoch_of_another_connection_is_of_no_use() -> None:
    book = _book()
    _join(book, b"a", 3)
    with pytest.raises(NoSession, match="another connection"):
        book.accept(b"b", _header(3, 1), m.ExecuteModel)
    with pytest.raises(StaleEpoch):
        book.accept(b"b", _header(2, 1), m.ExecuteModel)
    with pytest.raises(StaleEpoch, match="names epoch 2"):
        book.accept(b"a", _header(2, 1), m.ExecuteModel)


def test_silence_beyond_the_lease_ends_the_session_and_any_question_renews_it() -> None:
    clock = _Clock()
    book = _book(clock=clock)
    _join(book, b"a", 1, lease_ms=1000)
    clock.now += 0.9
    book.accept(b"a", _header(1), m.GetHealth)
    clock.now += 0.9
    book.accept(b"a", _header(1), m.Sleep)
    assert book.health().live
    clock.now += 1.1
    assert not book.health().live
    with pytest.raises(NoSession, match="lease"):
        book.accept(b"a", _header(1), m.Sleep)
    with pytest.raises(Fenced):
        book.claim(b"a", _hello(1))  # it does not come back under its old number
    _join(book, b"a", 2)


def test_numbers_are_for_steps_only_and_steps_need_one() -> None:
    book = _book()
    _join(book, b"a", 1)
    for message in (m.Sleep, m.GetHealth):
        with pytest.raises(InvalidRequest, match="only steps are numbered"):
            book.accept(b"a", _header(1, 1), message)
    with pytest.raises(InvalidRequest, match="needs a number"):
        book.accept(b"a", _header(1, 0), m.ExecuteModel)
    with pytest.raises(OutOfOrder):
        book.accept(b"a", _header(1, 2), m.ExecuteModel)
    call = book.accept(b"a", _header(1, 0, corr=9), m.Sleep)
    book.begin(call)
    with pytest.raises(InvalidRequest, match="corr 9 is under way"):
        book.accept(b"a", _header(1, 0, corr=9), m.WakeUp)


def test_only_what_has_not_started_is_withdrawn_and_only_by_its_sender() -> None:
    book = _book()
    _join(book, b"a", 1)
    started = book.accept(b"a", _header(1, 1, corr=1), m.ExecuteModel)
    book.begin(started)
    started.permit.start()
    queued = book.accept(b"a", _header(1, 2, corr=2), m.ExecuteModel)
    book.begin(queued)
    assert book.cancel(b"a", 1) == "started"
    assert book.cancel(b"b", 2) == "unknown"
    assert book.cancel(b"a", 2) == "withdrawn"
    with pytest.raises(RequestCancelled):
        queued.permit.start()
    book.end(started)
    assert book.cancel(b"a", 1) == "unknown"


def test_the_highest_epoch_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "worker.epoch"
    _join(_book(path), b"a", 41)
    book = _book(path)
    assert book.health().highest_epoch == 41
    with pytest.raises(Fenced, match="not above 41"):
        book.claim(b"b", _hello(41))
    _join(book, b"b", 42)
    assert path.read_text() == "42\n"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "9" * 40, str(2**53)])
def test_an_epoch_file_that_holds_no_epoch_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "worker.epoch"
    path.write_text(text)
    with pytest.raises(ConfigError, match="does not hold an epoch"):
        EpochFile(path)


def test_an_epoch_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = EpochFile(None)
    file._path = tmp_path / "file" / "worker.epoch"
    with pytest.raises(ConfigError, match="cannot write the epoch file"):
        file.raise_to(1)
    assert file.highest == 0


def test_the_place_of_the_file_follows_from_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert epoch_path("ipc:///run/w/rank0") == Path("/run/w/rank0.epoch")
    assert epoch_path("ipc:///tmp/gpuworker-0123456789ab/worker") is None
    assert epoch_path("tcp://127.0.0.1:*") is None
    assert epoch_path("tcp://127.0.0.1:5555") == Path("/state/gpuworker/tcp-127.0.0.1-5555.epoch")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["claim", "welcome", "say"]), st.sampled_from([b"a", b"b"]),
            st.integers(1, 8),
        ),
        max_size=60,
    )
)  # fmt: skip
def test_at_most_one_connection_ever_speaks_and_it_has_the_highest_epoch(
    events: list[tuple[str, bytes, int]],
) -> None:
    book = _book()
    claimed: list[tuple[bytes, m.Hello, object]] = []
    highest = 0
    for kind, peer, epoch in events:
        if kind == "claim":
            if epoch <= highest:
                with pytest.raises(Fenced):
                    book.claim(peer, _hello(epoch))
            else:
                claimed.append((peer, _hello(epoch), book.claim(peer, _hello(epoch))))
                highest = epoch
        elif kind == "welcome" and claimed:
            book.welcome(claimed[-1][2])  # type: ignore[arg-type]
        elif kind == "say":
            try:
                book.accept(peer, _header(epoch), m.Sleep)
            except SessionError:
                pass
            else:
                assert (peer, epoch) == (claimed[-1][0], highest)
