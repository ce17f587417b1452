"""Batch: many placements of the same length replayed at once, in arrays. The planner's inner loop.

Pure decision. On the path: candidate placements -> **seconds of a step each** -> the planner keeps the best. The same
recurrence as `schedule.timeline`, which stays the judge of the plan that is chosen; `tests/schedule` holds the two
against each other. Programs of one shape (as many stages, the same depths) have their events in one order, whatever
the seconds are, so one walk over the events serves a whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fusionllm.errors import PlanError

Array = NDArray[np.float64]
#: A compute event: stage, whether it is a forward, microbatch.
Event = tuple[int, bool, int]


@lru_cache(maxsize=128)
def event_order(depths: tuple[int, ...], num_microbatches: int) -> tuple[Event, ...]:
    """The computations of one step in an order that keeps every dependency.

    Args:
        depths: microbatches in flight per stage; what `schedule.pipeline` calls depth.

    Raises:
        PlanError: the programs would deadlock; a stage may not hold more microbatches than the one before it.
    """
    count = len(depths)
    forwards, backwards = [0] * count, [0] * count
    order: list[Event] = []
    moved = True
    while moved:
        moved = False
        for stage_index in [*range(count), *range(count - 2, -1, -1)]:
            while backwards[stage_index] < num_microbatches:
                done, back = forwards[stage_index], backwards[stage_index]
                is_forward = done < num_microbatches and done - back < depths[stage_index]
                if is_forward and stage_index > 0 and forwards[stage_index - 1] <= done:
                    break
                if not is_forward and stage_index < count - 1 and backwards[stage_index + 1] <= back:
                    break
                order.append((stage_index, is_forward, done if is_forward else back))
                forwards[stage_index] += is_forward
                backwards[stage_index] += not is_forward
                moved = True
    if len(order) < 2 * count * num_microbatches:
        raise PlanError(f"1F1B with depths {list(depths)} deadlocks; let no stage hold more than the one before it")
    return tuple(order)


class BatchCosts:
    """What a batch of B placements of S stages costs per microbatch, in seconds.

    Args:
        forward_s, backward_s: [S, B] of the stages.
        out_s, back_s, latency_s: [S - 1, B] of the links: activation, gradient, delay of either direction.
    """

    def __init__(self, forward_s: Array, backward_s: Array, out_s: Array, back_s: Array, latency_s: Array) -> None:
        self.forward_s, self.backward_s = forward_s, backward_s
        self.out_s, self.back_s, self.latency_s = out_s, back_s, latency_s

    def select(self, keep: NDArray[np.intp]) -> BatchCosts:
        """The batch of these columns."""
        parts = (self.forward_s, self.backward_s, self.out_s, self.back_s, self.latency_s)
        return BatchCosts(*(np.ascontiguousarray(part[:, keep]) for part in parts))

    def round_trip_s(self) -> Array:
        """[S, B]: from the start of a forward until its backward is done, when nobody waits."""
        trip = self.forward_s + self.backward_s
        trip[:-1] += self.out_s + self.back_s + 2 * self.latency_s
        return np.asarray(np.cumsum(trip[::-1], axis=0)[::-1])

    def slowest_s(self) -> Array:
        """[B]: seconds per microbatch of the busiest stage or direction of a link."""
        slowest = (self.forward_s + self.backward_s).max(axis=0)
        if len(self.out_s):
            slowest = np.maximum(slowest, np.maximum(self.out_s, self.back_s).max(axis=0))
        return np.asarray(slowest)

    def lower_bound_s(self, depths: Sequence[int], num_microbatches: int) -> Array:
        """[B]: no step is shorter. Before and after its work each stage waits for the way there and back.

        A stage works off all microbatches, and so does each direction of a link; a stage of W microbatches in flight
        starts one only when the W-th before it is back.
        """
        work = self.forward_s + self.backward_s
        trip = self.round_trip_s()
        reach = trip[:1] - trip
        bound = (reach + num_microbatches * work).max(axis=0)
        windows = np.array([[(num_microbatches - 1) // depth + 1] for depth in depths])
        bound = np.maximum(bound, (reach + windows * trip).max(axis=0))
        if len(self.out_s):
            way = reach[:-1] + work[:-1] + 2 * self.latency_s
            for busy in (self.out_s, self.back_s):
                bound = np.maximum(bound, (way + num_microbatches * busy).max(axis=0))
        return np.asarray(bound)


def replay_many(costs: BatchCosts, depths: Sequence[int], num_microbatches: int) -> Array:
    """Seconds of one step of each placement, [B]. Raises PlanError for depths that deadlock."""
    count = len(costs.forward_s)
    clock = np.zeros_like(costs.forward_s)
    line_out, line_back = np.zeros_like(costs.out_s), np.zeros_like(costs.out_s)
    arrived: dict[Event, Array] = {}
    for stage_index, is_forward, microbatch_index in event_order(tuple(depths), num_microbatches):
        now = clock[stage_index]
        message = arrived.pop((stage_index, is_forward, microbatch_index), None)
        if message is not None:
            np.maximum(now, message, out=now)
        now += costs.forward_s[stage_index] if is_forward else costs.backward_s[stage_index]
        if is_forward and stage_index < count - 1:
            line = line_out[stage_index]
            np.maximum(line, now, out=line)
            line += costs.out_s[stage_index]
            arrived[stage_index + 1, True, microbatch_index] = line + costs.latency_s[stage_index]
        elif not is_forward and stage_index > 0:
            line = line_back[stage_index - 1]
            np.maximum(line, now, out=line)
            line += costs.back_s[stage_index - 1]
            arrived[stage_index - 1, False, microbatch_index] = line + costs.latency_s[stage_index - 1]
    return np.asarray(clock.max(axis=0))
