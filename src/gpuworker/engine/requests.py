"""Layer 5. A request as the user states it, as the scheduler follows it, and what it yields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import msgspec
import numpy as np

from gpuworker.engine.blocks import block_hash, root_hash
from gpuworker.engine.limits import SchedulerLimits
from gpuworker.errors import ClientError, InvalidRequest, WorkerError
from gpuworker.step import Logprobs, SamplingParams

__all__ = [
    "Delta",
    "FinishReason",
    "GenerationRequest",
    "LiveRequest",
    "Stage",
    "TokenLogprobs",
    "own_copy",
    "token_logprobs",
]

FinishReason = Literal["stop", "length", "abort", "refused"]
"""A stop token came; max_tokens or max_model_len is reached; aborted; ended by an error."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to generate."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = 16
    """Tokens to generate at most; the sequence ends at max_model_len at the latest."""
    stop_token_ids: tuple[int, ...] = ()
    """The first of these ends the request, and is part of its output."""
    cache_salt: str = ""
    """Only requests with the same salt share cached blocks."""


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of one generated token: its own first, then the most likely ones."""

    token_ids: tuple[int, ...]
    values: tuple[float, ...]
    rank: int
    """1 + the number of tokens with a greater logit."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step meant for one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: WorkerError | ClientError | None = None
    """Why, when the finish reason is "refused"."""


class Stage(Enum):
    """Where a request is on its way through the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class LiveRequest:
    """A request and what the scheduler believes about it.

    num_computed and num_pending run ahead of the worker: they count what the steps in flight
    will have computed and sampled. A slot means that the worker was told of the request.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "hashes",
        "num_computed",
        "num_pending",
        "num_prompt",
        "num_registered",
        "num_total_max",
        "request",
        "sampling",
        "slot",
        "stage",
        "stop_token_ids",
        "table_version",
        "tokens",
    )

    def __init__(
        self, request: GenerationRequest, limits: SchedulerLimits, *, arrival: int
    ) -> None:
        """Raises InvalidRequest, naming numbers, when the request can never be computed."""
        self.request = request
        self.arrival = arrival
        self.stage = Stage.WAITING
        self.tokens = list(request.prompt_token_ids)
        """Known tokens: the prompt and the outputs that have arrived."""
        self.num_prompt = len(self.tokens)
        self.num_total_max = min(self.num_prompt + request.max_tokens, limits.max_model_len)
        """Length at which the request ends."""
        _check(request, limits, limits.blocks_for(self.num_total_max - 1))
        sampling = request.sampling
        self.stop_token_ids = frozenset(request.stop_token_ids) | set(sampling.stop_token_ids)
        if sampling.min_tokens > 0:  # the worker must know what it has to suppress
            stop_token_ids = tuple(sorted(self.stop_token_ids))
            sampling = msgspec.structs.replace(sampling, stop_token_ids=stop_token_ids)
        self.sampling = sampling
        self.slot: int | None = None
        self.num_pending = 0
        """Tokens that steps in flight will sample."""
        self.hashes: list[bytes] = []
        """Of the full blocks of known tokens."""
        self.table_version = 0
        """Changes when the block table is given up, so that late steps do not vouch for it."""
        self.blocks: list[int] = []
        self.num_computed = 0
        self.num_registered = 0
        """Leading blocks whose contents were offered to the prefix cache."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_total(self) -> int:
        """Tokens known to the worker once the steps in flight are done."""
        return len(self.tokens) + self.num_pending

    @property
    def num_to_schedule(self) -> int:
        """Tokens the next step could compute; 0 when no further token is wanted."""
        if self.num_total >= self.num_total_max:
            return 0
        return self.num_total - self.num_computed

    def extend_hashes(self, block_size: int) -> None:
        """Hash the blocks that have become full."""
        for index in range(len(self.hashes), len(self.tokens) // block_size):
            parent = self.hashes[-1] if self.hashes else root_hash(self.request.cache_salt)
            tokens = self.tokens[index * block_size : (index + 1) * block_size]
            self.hashes.append(block_hash(parent, tokens))

    def forget_table(self) -> None:
        """Give up the block table and whatever was computed into it."""
        self.blocks = []
        self.num_computed = 0
        self.num_registered = 0
        self.table_version += 1

    def append(self, token_ids: Iterable[int]) -> FinishReason | None:
        """Add outputs; says whether the request ends with the last of them."""
        self.tokens.extend(token_ids)
        if self.tokens[-1] in self.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.num_total_max else None


def own_copy(error: WorkerError | ClientError) -> WorkerError | ClientError:
    """Return the same error for one more raiser; an instance collects the traceback of one."""
    if isinstance(error, WorkerError):
        return type(error)(error.message, state=error.state, accepted=error.accepted)
    return type(error)(*error.args)


def _check(request: GenerationRequest, limits: SchedulerLimits, num_blocks: int) -> None:
    name, prompt = request.request_id, request.prompt_token_ids
    if not 1 <= len(name) <= 128:
        raise InvalidRequest(f"a request id has 1 to 128 characters, this one {len(name)}")
    if not prompt:
        raise InvalidRequest(f"request {name} has no prompt tokens; give at least 1")
    if min(prompt) < 0 or max(prompt) >= 2**31:
        raise InvalidRequest(f"request {name} has a prompt token id outside [0, 2**31)")
    if request.max_tokens < 1:
        raise InvalidRequest(f"request {name}: max_tokens is {request.max_tokens}; minimum 1")
    if len(prompt) + 1 > limits.max_model_len:
        raise InvalidRequest(
            f"request {name}: {len(prompt)} prompt tokens and one to generate exceed "
            f"max_model_len {limits.max_model_len}; shorten the prompt"
        )
    num_usable = limits.num_blocks - 1
    if num_blocks > num_usable:
        raise InvalidRequest(
            f"request {name}: {len(prompt)} prompt tokens and max_tokens {request.max_tokens} "
            f"need {num_blocks} blocks of {limits.block_size}, the pool has {num_usable}; "
            "shorten the prompt or lower max_tokens"
        )


def token_logprobs(logprobs: Logprobs, first: int, count: int) -> tuple[TokenLogprobs, ...]:
    """Cut the log-probabilities of sampled tokens [first, first + count) out of a step's."""
    columns = logprobs.num_columns
    token_ids = np.frombuffer(logprobs.token_ids, "<i4").reshape(-1, columns)
    values = np.frombuffer(logprobs.values, "<f4").reshape(-1, columns)
    ranks = np.frombuffer(logprobs.ranks, "<i4")
    cut: list[TokenLogprobs] = []
    for index in range(first, first + count):
        asked = token_ids[index] >= 0
        cut.append(
            TokenLogprobs(
                token_ids=tuple(token_ids[index][asked].tolist()),
                values=tuple(values[index][asked].tolist()),
                rank=int(ranks[index]),
            )
        )
    return tuple(cut)
