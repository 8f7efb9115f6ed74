"""Layer 1. The weights of one model: their bytes, where these are, and what they are worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gpuworker.device.arena import Arena
from gpuworker.device.memory import MemoryReader
from gpuworker.device.spill import Spill
from gpuworker.errors import WorkerError
from gpuworker.messages import MemoryUse, WeightsTruth
from gpuworker.model.parameters import ParameterSpec
from gpuworker.weights.layout import WeightLayout

__all__ = ["Fill", "WeightStore"]


@dataclass(frozen=True, slots=True)
class Fill:
    """A checked source, ready to be read."""

    write: Callable[[Mapping[str, torch.Tensor]], None]
    """Writes every parameter; may raise a WorkerError halfway."""
    warnings: tuple[str, ...] = ()


class WeightStore:
    """Owns the weight arena of a model and its kept copy.

    plan checks the source of the weights and returns what fills them, so that every fault of a
    checkpoint is found before memory is touched. truth says whether the bytes are a model:
    defined, undefined (released without a kept copy), or poisoned (a refill failed halfway).
    version changes whenever the bytes do; the kept copy carries the version it was taken of.
    Belongs to the device thread; truth, version and memory may be read from any.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        plan: Callable[[], Fill],
        *,
        reader: MemoryReader,
        spill_dir: Path | None,
    ) -> None:
        """Map an arena and fill it; raises a WorkerError and leaves nothing behind."""
        fill = plan()
        self.warnings = fill.warnings
        layout = WeightLayout.of(specs)
        self._plan = plan
        self._spill = Spill(spill_dir)
        self._num_bytes = layout.total_bytes
        self._arena = Arena("weights", layout.total_bytes, reader)
        try:
            self._arena.map(layout.total_bytes)
            self.params = layout.bind(self._arena)
            fill.write(self.params)
        except BaseException:
            self.close()
            raise
        self.truth: WeightsTruth = "defined"
        self.version = 1

    @property
    def num_bytes(self) -> int:
        """Size of the weights in the arena."""
        return self._num_bytes

    @property
    def is_resident(self) -> bool:
        """Whether the weights have memory."""
        return self._arena.mapped_bytes > 0

    def memory(self) -> MemoryUse:
        """Measure the arena."""
        return MemoryUse(
            tag="weights",
            reserved_bytes=self._arena.reserved_bytes,
            mapped_bytes=self._arena.mapped_bytes,
            resident_bytes=self._arena.resident_bytes(),
            spilled_bytes=self._spill.num_bytes,
        )

    def refill(self) -> None:
        """Fill the resident arena from its source again.

        The source is checked before a byte changes. When filling fails, a current kept copy is
        put back and the weights stay defined; without one they are poisoned.
        """
        fill = self._plan()
        kept = self._spill.kept_version() == self.version
        before, self.truth = self.truth, "poisoned"
        try:
            fill.write(self.params)
        except WorkerError:
            if kept:
                self._spill.restore(self._arena)
                self.truth = before
            raise
        self.truth = "defined"
        self.version += 1
        self._spill.drop()

    def keep(self) -> int:
        """Copy the weights out; returns the bytes written, 0 when nothing was or needed to be."""
        if not self.is_resident or self.truth != "defined":
            return 0
        return self._spill.save(self._arena, self.version)

    def forget_kept(self) -> None:
        """Drop the kept copy."""
        self._spill.drop()

    def release(self, keep: bool) -> None:
        """Give the memory back; without a current kept copy the weights are undefined."""
        if not keep:
            self._spill.drop()
        if self.truth == "defined" and self._spill.kept_version() != self.version:
            self.truth = "undefined"
            self.version += 1
        self._arena.unmap()

    def resume(self) -> bool:
        """Bring memory and kept contents back; False when the weights are resident already."""
        if self.is_resident:
            return False
        self._arena.map(self._num_bytes)
        if self.truth == "defined":
            try:
                self._spill.restore(self._arena)
            except WorkerError:
                self._arena.unmap()
                raise
        return True

    def close(self) -> None:
        """Give everything back for good."""
        self._spill.drop()
        self._arena.close()
