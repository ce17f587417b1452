"""One job seen from the broker, as a pure machine: when to start, when to commit a step, when to give up.

A step is atomic: the commit goes out when every stage has said that it holds the gradients of that step; the norm in
it is the one over all stages, so that clipping is global.
"""

from __future__ import annotations

import math

import msgspec

from fusionllm.errors import RemoteProtocolError


class StartJob(msgspec.Struct, frozen=True):
    """All stages hold their weights: the owner may feed."""


class CommitStep(msgspec.Struct, frozen=True):
    seq: int
    total_norm: float


class FailJob(msgspec.Struct, frozen=True):
    reason: str


JobCommand = StartJob | CommitStep | FailJob


class JobMachine:
    """``stage_nodes``: the node of each stage, in path order."""

    def __init__(self, stage_nodes: tuple[str, ...]) -> None:
        self.stage_nodes = stage_nodes
        self._ready: set[int] = set()
        self._done: dict[int, tuple[int, float]] = {}
        self._last_seq = -1
        self.ended = False

    def handle_ready(self, node: str, stage_index: int) -> list[JobCommand]:
        """A stage holds all its weights and reaches its peers."""
        self._check(node, stage_index)
        if self.ended or stage_index in self._ready:
            return []
        self._ready.add(stage_index)
        return [StartJob()] if len(self._ready) == len(self.stage_nodes) else []

    def handle_done(
        self, node: str, stage_index: int, seq: int, square_sum: float, *, overflow: bool = False
    ) -> list[JobCommand]:
        """A stage holds the gradients of step ``seq``; ``square_sum`` is its share of the squared norm.

        With ``overflow`` it is none: the step is committed as one that every stage leaves out.
        """
        self._check(node, stage_index)
        if self.ended:
            return []
        if seq <= self._last_seq or stage_index in self._done:
            raise RemoteProtocolError(
                f"node {node} finished step {seq} twice; the last committed one is {self._last_seq}"
            )
        if not math.isfinite(square_sum) or square_sum < 0:
            return self._fail(
                f"the gradient of stage {stage_index} on node {node} is {square_sum} at step {seq}; "
                "lower the learning rate, clip the gradient (optimizer.clip_norm) or warm up longer"
            )
        self._done[stage_index] = (seq, math.inf if overflow else square_sum)
        if len(self._done) < len(self.stage_nodes):
            return []
        seqs = {s for s, _ in self._done.values()}
        if len(seqs) != 1:
            return self._fail(f"stages finished different steps: {sorted(seqs)}")
        total = math.sqrt(math.fsum(square for _, square in self._done.values()))
        self._done.clear()
        self._last_seq = seq
        return [CommitStep(seq, total)]

    def handle_lost(self, node: str, reason: str) -> list[JobCommand]:
        """A machine of this job is gone."""
        return [] if self.ended else self._fail(f"node {node} lost: {reason}")

    def handle_failed(self, node: str, stage_index: int, message: str) -> list[JobCommand]:
        """A node could not go on."""
        self._check(node, stage_index)
        return [] if self.ended else self._fail(f"stage {stage_index} on node {node} failed: {message[:2000]}")

    def waiting_for(self) -> str:
        """Who has not reported yet, in words."""
        have = self._done if len(self._ready) == len(self.stage_nodes) else self._ready
        late = [f"stage {i} ({n})" for i, n in enumerate(self.stage_nodes) if i not in have]
        return f"waits for {', '.join(late)}"

    def _fail(self, reason: str) -> list[JobCommand]:
        self.ended = True
        return [FailJob(reason)]

    def _check(self, node: str, stage_index: int) -> None:
        if not 0 <= stage_index < len(self.stage_nodes) or self.stage_nodes[stage_index] != node:
            raise RemoteProtocolError(f"node {node} spoke for stage {stage_index}, which is not its own")
