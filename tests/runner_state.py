"""Everything that a runner knows between steps, to be compared bit by bit."""

from __future__ import annotations

from dataclasses import dataclass

from gpuworker.runner.runner import ModelRunner

__all__ = ["RunnerState", "snapshot"]


@dataclass(frozen=True)
class RunnerState:
    state: tuple[bytes, ...]
    blocks: tuple[bytes, ...]
    tokens: tuple[bytes, ...]
    requests: tuple[str, ...]
    seen: tuple[object, ...]
    slot_of: dict[str, int]
    num_seeds: int
    last_step_id: int
    max_model_len: int

    def slot(self, slot: int) -> tuple[object, ...]:
        return tuple(
            column[slot]
            for column in (self.state, self.blocks, self.tokens, self.requests, self.seen)
        )


def snapshot(runner: ModelRunner) -> RunnerState:
    table = runner._table
    shapings = [request.shaping if request else None for request in table.requests]
    return RunnerState(
        state=tuple(row.tobytes() for row in table._state),
        blocks=tuple(row.tobytes() for row in table.blocks),
        # Beyond num_tokens there is only what earlier requests left.
        tokens=tuple(
            table.tokens[slot, : table.num_tokens[slot]].tobytes()
            for slot in range(len(table.requests))
        ),
        requests=tuple(request.request_id if request else "" for request in table.requests),
        seen=tuple(
            (shaping.seen.ids.tolist(), shaping.seen.output_counts.tolist())
            if shaping is not None and shaping.seen is not None
            else None
            for shaping in shapings
        ),
        slot_of=dict(table.slot_of),
        num_seeds=table._num_seeds,
        last_step_id=runner._last_step_id,
        max_model_len=runner.max_model_len,
    )
