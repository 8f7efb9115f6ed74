"""Layer 0. The protocol as a page: what is said here once, and tables from the code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from gpuworker.events import EVENTS, TOPIC_OF
from gpuworker.ipc.endpoint import EPOCH_SUFFIX, EVENTS_SUFFIX, MAX_IPC_PATH_BYTES
from gpuworker.ipc.failures import error_classes, number_of_step
from gpuworker.ipc.ledger import MAX_REPLAY_BYTES, NUM_REPLAYS
from gpuworker.ipc.ring import COUNTERS_BYTES
from gpuworker.ipc.session import OBSERVER_REQUESTS
from gpuworker.ipc.wire import (
    MAX_BODY_BYTES,
    MAX_BUDGET_US,
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    MAX_REASON,
    VERSION,
)
from gpuworker.messages import REQUESTS, message_tag

__all__ = ["protocol_page"]

_PAGE = """# The protocol, version {version}

Generated from the code and its constants; `make docs` renews it. Byte examples of every message
are in [protocol.vectors.json](protocol.vectors.json), the fields in [messages.md](messages.md)
and [messages.schema.json](messages.schema.json), who accepts what in [lifecycle.md](lifecycle.md).
[A scheduler in JavaScript](../examples/javascript/scheduler.mjs) follows this page and nothing
else.

## Sockets and frames

A worker binds a ZeroMQ ROUTER; a client connects a DEALER. It sets no identity and does not
reconnect by itself: who answers next may be another worker. A message is two frames:

| frame | contents |
|---|---|
| header | `47 57` ("GW"), one byte major version, then a msgpack array |
| body | one msgpack array: the message's tag, then its fields in order |

| header of | fields |
|---|---|
| a request | `[1, corr, epoch, seq, budget_us]` |
| a reply | `[2, corr, epoch, seq, boot_id]` |
| an event | `[3, seq, is_snapshot, boot_id]`, behind a frame with the topic |

* `corr` is the sender's number of a request, 1 or more, and comes back with its reply. Replies to
  different requests may overtake each other.
* `epoch` is that of the session, 0 without one; in a reply that of the worker's present session.
* `seq` numbers steps, see below. Everything else has 0.
* `budget_us` is a deadline relative to the receipt, 0 for none: no clocks are compared. What
  cannot start in time is not started.
* `boot_id` is 16 hexadecimal digits, new with every start of a worker. A reply with another one
  than the welcome's comes from somebody who knows nothing of you.

Trailing fields that have a default may be left out, in headers of requests and in bodies. Unknown
fields and wrong types are refused. Nothing but these arrays is ever decoded: no code, no class
name, no extension type travels.

Numbers in headers are at most 2^53 - 1, so that a double holds them. In bodies they may go up to
2^63 - 1 (a `seed` to 2^64 - 1), but a worker only counts and measures: what it says stays below
2^53 as long as your `step_id` does. An integer may stand for a float; a float never stands for an
integer, so take care that a library does not write `1` as `1.0`. Text is msgpack str, buffers are
bin, and None is nil.

`SamplingParams` is the one map; what it leaves out has its default. The keys of its `logit_bias`
are integers: a library that writes keys as text only cannot send one.

| limit | |
|---|---|
| header | {max_header_bytes} bytes |
| body | {max_body_bytes} bytes |
| frames | 2; more than {max_frames} are too large |
| `budget_us` | {max_budget_us} |
| message of a failure | {max_reason} characters |
| path of an ipc endpoint | {max_ipc_path_bytes} bytes |

## Sessions

`hello` makes the sender the worker's one scheduler. It names the major versions that the sender
speaks and an epoch above every epoch before, also those before the worker was started again: the
highest one is kept in a file beside the socket (`{epoch_suffix}`). Otherwise it is refused with
`fenced`, and nothing has changed. What decides who may schedule hands out epochs; without such a
thing take `get_health`'s `session.highest_epoch` + 1.

A hello revokes at once whatever the scheduler before it had queued; a step or move that runs is
waited for, because nothing can interrupt it. Then the worker drops all live requests and answers
`welcome`. The old scheduler gets `stale_epoch` for everything that is pending and everything that
it still says. A session belongs to its connection; on another one it is worth nothing.

`lease_ms` ends a session after that much silence; any message renews it. `end_session` ends it
at once. Without a session only questions are answered ({questions}), and `hello` and
`cancel`.

## Steps

`execute_model` is numbered by `seq`: from 1 in each session, without gaps, and at most `window`
(in `welcome` and `limits`) unanswered. So the next step may be sent before the last one is
answered; the worker keeps the token it has sampled. Steps run and are answered in their order.

* A step that was not accepted is answered with seq 0 in the reply's header, and its number is
  free: `busy` when the window is full, `out_of_order` behind a gap, `invalid_request` for a value
  of the wrong type. A reply with the step's own seq means that the number is used.
* A number that was used before is answered with the same reply again, or waits for it; it is
  never carried out twice. {num_replays} replies are kept, up to {max_replay_bytes} bytes
  together; older ones are `duplicate_expired`.
* Behind a step that was accepted and did not run (it failed, was refused as a whole, withdrawn,
  too late) every later one is answered `aborted`, because it was put together on the assumption
  that the other one runs. `resume_steps` with the `step_id` of the one that did not run goes on.
* A single request of a step that is wrong is refused in `step_output.refusals`, and the others
  run. That is no failure of the step.

The buffer of a step is little-endian int32, R rows, B new block ids, T token ids:

    slots[R]  num_scheduled[R]  num_computed[R]  num_new_blocks[R]  flags[R]
    block_ids[B]  token_ids[T]

A slot is a number below `max_num_seqs` that `new_requests` give to a request; it is free again when
the request is named in `finished`, also for the new requests of that very step. `step_id` grows
with every step; `get_limits` says where it begins, and a hello lets it begin anew.

A row computes `num_scheduled` tokens of the request in a slot, after `num_computed` that are in
the cache; both are checked against what the worker has computed. Block ids are row by row; the
worker appends them to the request's block table, or with flag 1 replaces it, for a request that is
computed again. Block 0 is not to be used. Token ids are those of `new_requests`, one after the
other: the prompt, then what was generated elsewhere before.

A row that computes a request's last known token samples the next one, which is known from then on;
any other row, for example the first part of a long prompt, samples none. The buffer of
`step_output` is little-endian int32 `num_sampled[R]`, then the sampled tokens, row by row.

A scheduler in short:

    hello; then what leads from the worker's state to serving (lifecycle.md); get_limits
    loop:
        while unanswered < window and there is something to compute:
            send execute_model(step_id++, kv_epoch, ...)     seq++
        take a reply
            step_output: append tokens, free what has ended, note refusals
            failure: take back what has not run; when nothing is unanswered, resume_steps
        stale_kv_epoch: the cache is gone; compute every request again, flag 1

## On the same machine

With the feature `ring` a client may send `open_ring`, before anything of its session is under
way, and from then on exchange messages through shared memory: Linux, same user, same process
namespace. `ring_opened` names descriptors that the client opens through `/proc/PID/fd/NUMBER`.
The memory is two rings, requests and then replies. Each begins with {counters_bytes} bytes of
counters (the producer's at 0, the consumer's at 64, both 8 bytes, little-endian, only growing) and
has `ring_bytes` bytes of data behind. A record is two little-endian 4-byte lengths, header, body,
and padding to 8 bytes, cyclic. The producer writes data, then its counter, then a byte into the
pipe; the consumer copies, then writes its own counter. The end of a pipe is the end of the other
side. Headers, bodies and rules are those of the socket. `hello`, `end_session`, `cancel`,
`get_health` and `get_status` still go there; a step that lies in the ring is unknown to `cancel`.

## Withdrawing

`cancel` names the `corr` of a request of the same connection. `withdrawn` means that it has not
started and never will; it is answered `cancelled`, and steps behind it `aborted`. `started` means
too late. `unknown` means that it was answered or never accepted.

## Health

`get_health` is answered outside the queue, without a session, while steps and moves run. That an
answer comes shows that the process and its event loop live; `ready`, whether a step would be
computed; `running_step_s` and `moving_s` against `limit_s`, whether the device gets on; `fault`,
why the worker cannot go on. What is older than its limit is `stalled`. After a grace the worker
gives it up, is `faulted`, answers everybody, and its process ends.

## Events

A worker may publish events on an XPUB socket; `welcome` and `get_health` say where (for ipc at
the endpoint with `{events_suffix}`). Frames: topic, header, body. Subscribe to a topic or to
nothing for all. A subscription is answered with a snapshot, whose header carries the number of
the topic's last event. Numbers of a topic have no gaps; whoever finds one was too slow and asks
for health. {event_table}

## Failures

`failure` may answer any request: `[code, message, state, accepted, retryable]`. Decide by the
code, and by `retryable` for codes that you do not know; messages are for people. `retryable`
means that the same message may simply be sent again. A failure under corr 0 answers no request:
`unsupported_version`, or `replies_lost` when the connection did not read and replies to it were
dropped, so that whatever is pending on it has an unknown outcome. Bytes whose header cannot be
read are counted and not answered.

The last column says whether a step that is answered so has used its number up; what counts is seq
in the reply's header, 0 or the step's own. Only `duplicate_expired` has 0 for a number that is
gone. Where the column is empty, no step is answered so.

{error_table}
A connection that ends leaves the outcome of what is pending unknown. A scheduler comes back with
a hello: then nothing of it is left that could still run.

## Security

An ipc endpoint lies in a directory of mode 700 that belongs to the worker's user, and is locked.
tcp without encryption takes loopback addresses only. Any other address needs CURVE: the worker
has a key pair and a list of public keys that may connect, a client its own pair and the worker's
public key (`gpuworker keygen`). Loopback tcp without keys is open to every user of the machine.

## Compatibility

Within major version {version}:

* messages, their tags, their fields, the order and the types of these stay as they are. No field
  is ever appended, because what is older would refuse it; more to say is a new message;
* new messages, events, topics, features and error codes may come. Ask for a feature by name in
  `hello`, skip events that you do not know, and treat unknown codes as said above;
* `SamplingParams` may get keys that can be left out; a worker that does not know one refuses the
  whole message with `invalid_request`;
* limits may grow, never shrink below those of this page.

Whatever breaks one of these is another major version, and a worker says which ones it speaks.
"""


def protocol_page() -> str:
    """Return the page as Markdown."""
    questions = ", ".join(
        f"`{message_tag(r.__name__)}`" for r in REQUESTS if r in OBSERVER_REQUESTS
    )
    return _PAGE.format(
        version=VERSION,
        max_header_bytes=MAX_HEADER_BYTES,
        max_body_bytes=MAX_BODY_BYTES,
        max_frames=MAX_FRAMES,
        max_budget_us=MAX_BUDGET_US,
        max_reason=MAX_REASON,
        max_ipc_path_bytes=MAX_IPC_PATH_BYTES,
        epoch_suffix=EPOCH_SUFFIX,
        events_suffix=EVENTS_SUFFIX,
        questions=questions,
        num_replays=NUM_REPLAYS,
        max_replay_bytes=MAX_REPLAY_BYTES,
        counters_bytes=COUNTERS_BYTES,
        event_table="\n\n" + "\n".join(_event_rows()),
        error_table="\n".join(_error_rows()) + "\n",
    )


def _event_rows() -> Iterator[str]:
    yield "| topic | event | fields |\n|---|---|---|"
    for event in EVENTS:
        fields = ", ".join(f"`{name}`" for name in event.__struct_fields__)
        yield f"| `{TOPIC_OF[event]}` | `{message_tag(event.__name__)}` | {fields} |"


def _error_rows() -> Iterator[str]:
    yield "| code | when | retryable | number of a step |\n|---|---|---|---|"
    for error in error_classes():
        doc = inspect.cleandoc(error.__doc__ or "").splitlines()[0]
        when = doc.removeprefix("Raised ").rstrip(".")
        retryable = "yes" if error.retryable else ""
        yield f"| `{error.code}` | {when} | {retryable} | {number_of_step(error)} |"
