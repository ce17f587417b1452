"""Timeline: exact replay of StagePrograms on modelled devices and links. What a step takes, and who waits.

Pure decision: seconds and rates come in as arguments, no clock. On the path: StageProgram + costs -> **Timeline** ->
planner (which plan is fastest) and people (the stage-by-time grid). The programs are the ones the nodes execute.

The model: a node does one thing at a time, in its program's order (or overtakes, see `StageProgram`). Links are full
duplex; each direction carries one message at a time, in the order sent; a message is there ``latency_s`` after its last
byte left. Sends do not hold up the sender. A line that several links share (the uplink of a home or a site) serves
messages in the order sent too: one starts when its link and all lines on its way are free, and keeps each for as long
as its bytes take there.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from math import inf

import msgspec

from fusionllm.errors import PlanError
from fusionllm.ir.program import Action, StageProgram, needed_send
from fusionllm.units import format_duration


class LinkModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The link between stage k and k+1 and what crosses it per microbatch. Bytes are those on the wire.

    ``forward_shared`` and ``back_shared`` are the lines in common on the way: pairs of a name and its bytes per second.
    """

    forward_bytes: float
    backward_bytes: float
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    back_bandwidth_bytes_per_s: float | None = None
    forward_shared: tuple[tuple[str, float], ...] = ()
    back_shared: tuple[tuple[str, float], ...] = ()

    def transfer_s(self, kind: str) -> float:
        """Seconds the line is busy with one message of ``SEND_F`` or ``SEND_B``."""
        back = self.back_bandwidth_bytes_per_s or self.bandwidth_bytes_per_s
        return self.forward_bytes / self.bandwidth_bytes_per_s if kind == "SEND_F" else self.backward_bytes / back

    def shared_s(self, kind: str) -> list[tuple[str, float]]:
        """Lines in common and the seconds one message of ``SEND_F`` or ``SEND_B`` keeps each of them."""
        if kind == "SEND_F":
            return [(name, self.forward_bytes / rate) for name, rate in self.forward_shared]
        return [(name, self.backward_bytes / rate) for name, rate in self.back_shared]


class StageModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds one stage computes: per microbatch forward and backward, and the update at the end of the step.

    ``weight_s`` is the part of the backward that computes gradients of weights; a program may do it by itself, as W.
    """

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    weight_s: float = 0.0

    def compute_s(self, kind: str, splits: bool = False) -> float:
        """Seconds of an action; ``splits``: whether its program parts W from B."""
        if kind == "B":
            return self.backward_s - self.weight_s if splits else self.backward_s
        return {"F": self.forward_s, "W": self.weight_s, "UPDATE": self.update_s}.get(kind, 0.0)


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When an action ran. For RECV, from when the stage began to wait until the message was there."""

    action: Action
    start_s: float
    end_s: float


class Timeline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A replayed step.

    Attributes:
        step_s: from the start until the last node is done.
        busy_s: seconds each node computes; where nodes have one stage each, each stage.
        link_busy_s: seconds each link is busy in its busier direction, one entry per pair of neighbouring stages.
        spans: per node, its actions in order.
        feed_s: seconds the owner's busiest line sends inputs; no step is shorter.
    """

    step_s: float
    busy_s: tuple[float, ...]
    link_busy_s: tuple[float, ...]
    spans: tuple[tuple[Span, ...], ...]
    feed_s: float = 0.0

    def with_feed(self, feed_s: float) -> Timeline:
        """The step with the owner's lines counted."""
        if not feed_s:
            return self
        return msgspec.structs.replace(self, step_s=max(self.step_s, feed_s), feed_s=feed_s)

    @property
    def idle_s(self) -> tuple[float, ...]:
        return tuple(self.step_s - busy for busy in self.busy_s)

    @property
    def bubble(self) -> float:
        """Share of all stages' time in which nothing is computed, 0 to 1."""
        return 1 - sum(self.busy_s) / (self.step_s * len(self.busy_s)) if self.step_s > 0 else 0.0

    @property
    def bottleneck(self) -> str:
        """The busiest stage or link in words, e.g. ``"link 0-1, busy 93 % of the step"``."""
        shares = [(busy, f"stage {k}") for k, busy in enumerate(self.busy_s)]
        shares += [(busy, f"link {k}-{k + 1}") for k, busy in enumerate(self.link_busy_s)]
        shares.append((self.feed_s, "owner's line"))
        busy, name = max(shares, key=lambda pair: pair[0])
        return f"{name}, busy {busy / self.step_s if self.step_s else 0:.0%} of the step".replace("%", " %")

    def critical_path(self) -> list[tuple[str, float]]:
        """What the step takes its time for: stages that compute, links that are waited for, stages that exchange tied
        gradients; seconds, the longest first.

        Followed back from the end of the step; the seconds add up to it. A message's wait for its line is its link's.
        """
        if self.feed_s >= self.step_s:
            return [("owner's line", self.feed_s)]
        sends: dict[tuple[int, str, int], tuple[int, int]] = {
            (span.action.stage_index, span.action.kind, span.action.microbatch_index): (index, at)
            for index, spans in enumerate(self.spans)
            for at, span in enumerate(spans)
        }
        seconds: dict[str, float] = {}
        index = max(range(len(self.spans)), key=lambda k: self.spans[k][-1].end_s)
        at = len(self.spans[index]) - 1
        while at >= 0:
            span = self.spans[index][at]
            name = f"{'exchange' if span.action.kind == 'UPDATE' else 'stage'} {span.action.stage_index}"
            since_s, needed = span.start_s, needed_send(span.action)
            if needed is not None and span.end_s > span.start_s:
                first = min(needed[0], span.action.stage_index)
                (index, at), name = sends[needed], f"link {first}-{first + 1}"
                since_s = self.spans[index][at].start_s
            seconds[name] = seconds.get(name, 0.0) + span.end_s - since_s
            at -= 1
        return sorted(((name, s) for name, s in seconds.items() if s > 0), key=lambda pair: -pair[1])


#: How many times as long as modelled an action of a program (by its place in the list) takes.
Stretch = Callable[[int, Action], float]


def replay(
    programs: Sequence[StageProgram],
    stages: Sequence[StageModel],
    links: Sequence[LinkModel],
    stretch: Stretch | None = None,
    *,
    overtaking: bool = False,
) -> Timeline:
    """Play the programs of one step.

    Args:
        programs: one per node, as `schedule.pipeline.build_programs` gives them.
        stages: one per stage. links: one per pair of neighbours, ``links[k]`` between stage k and k+1.
        stretch: of each computation and each transfer; without it all take what the models say.
        overtaking: programs that overtake do, as on a node. Without it all keep their order, so that nothing that gets
            faster makes a step longer: what plans are compared by.

    Raises:
        PlanError: counts that do not match, a rate that is not above zero, or programs that deadlock.
    """
    known = sorted(stage_index for program in programs for stage_index in program.stages)
    if known != list(range(len(stages))) or len(links) != max(0, len(stages) - 1):
        raise PlanError(
            f"programs of {len(known)} stages, {len(stages)} stages and {len(links)} links; expected n, n, n - 1"
        )
    if any(min(link.bandwidth_bytes_per_s, link.back_bandwidth_bytes_per_s or 1) <= 0 for link in links):
        raise PlanError("a link with a rate that is not above zero; leave its nodes out or measure again")
    run = _Replay(programs, stages, links, stretch or _as_modelled, overtaking)
    run.play()
    busy = tuple(sum(s.end_s - s.start_s for s in spans if s.action.kind in _COMPUTE) for spans in run.spans)
    return Timeline(
        step_s=max(run.clock),
        busy_s=busy,
        link_busy_s=tuple(max(run.line_s[k, "SEND_F"], run.line_s[k, "SEND_B"]) for k in range(len(links))),
        spans=tuple(tuple(spans) for spans in run.spans),
    )


def _as_modelled(index: int, action: Action) -> float:
    return 1.0


_COMPUTE = ("F", "B", "W", "UPDATE")
_FORWARD, _BACKWARD = ("RECV_F", "F", "SEND_F"), ("RECV_B", "B", "SEND_B")


class _Replay:
    """State of a replay: a clock per node, when each direction of a link is free, when each message arrives."""

    def __init__(
        self,
        programs: Sequence[StageProgram],
        stages: Sequence[StageModel],
        links: Sequence[LinkModel],
        stretch: Stretch,
        overtaking: bool,
    ) -> None:
        self.programs, self.stages, self.links, self.stretch = programs, stages, links, stretch
        self.todo = [deque(program.actions) for program in programs]
        self.most_held = [program.depth if program.overtakes and overtaking else 0 for program in programs]
        self.held = [0] * len(programs)
        self.splits = [program.splits for program in programs]
        self.clock = [0.0] * len(programs)
        self.spans: list[list[Span]] = [[] for _ in programs]
        self.free_s = {(k, kind): 0.0 for k in range(len(links)) for kind in ("SEND_F", "SEND_B")}
        self.line_s = dict.fromkeys(self.free_s, 0.0)
        self.arrival_s: dict[tuple[int, str, int], float] = {}
        self.waiters: dict[tuple[int, str, int], int] = {}
        self.shared_free_s: dict[str, float] = {}
        self.ready: list[tuple[float, int]] = []

    def play(self) -> None:
        """Perform actions in order of time, so that lines in common serve who comes first."""
        self.ready = [(0.0, index) for index in range(len(self.programs))]
        while self.ready:
            now_s, index = heapq.heappop(self.ready)
            if self.todo[index] and now_s >= self.clock[index] and self._choose(index, now_s):
                self._perform(index, self.todo[index].popleft())
        stuck = [str(todo[0]) for todo in self.todo if todo]
        if stuck:
            raise PlanError(f"the programs deadlock; waiting: {' '.join(stuck)}")

    def _choose(self, index: int, now_s: float) -> bool:
        """Whether the node can go on, what it does then in front; else it looks again when a message has come."""
        todo = self.todo[index]
        if self._is_there(todo[0], now_s):
            return True
        choice = [0, *self._overtaking(index)]
        if self._is_there(todo[choice[-1]], now_s):
            self._put_in_front(todo, choice[-1])
            return True
        for at in choice:
            needed = needed_send(todo[at])
            assert needed is not None
            if needed in self.arrival_s:
                heapq.heappush(self.ready, (self.arrival_s[needed], index))
            else:
                self.waiters[needed] = index
        return False

    def _is_there(self, action: Action, now_s: float) -> bool:
        needed = needed_send(action)
        return needed is None or self.arrival_s.get(needed, inf) <= now_s

    def _overtaking(self, index: int) -> list[int]:
        """Where the next action is that may go before the one in front, which waits; empty: nowhere."""
        todo, held, most = self.todo[index], self.held[index], self.most_held[index]
        forward = todo[0].kind == "RECV_B"
        if not (held < most if forward else most and held):
            return []
        kinds = _FORWARD if forward else _BACKWARD
        return [at for at, action in enumerate(todo) if action.kind in kinds][:1]

    @staticmethod
    def _put_in_front(todo: deque[Action], at: int) -> None:
        """All that belongs to the forward or backward at a place."""
        microbatch, kinds = todo[at].microbatch_index, _FORWARD if todo[at].kind in _FORWARD else _BACKWARD
        block = []
        while todo[at].kind in kinds and todo[at].microbatch_index == microbatch:
            block.append(todo[at])
            del todo[at]
        todo.extendleft(reversed(block))

    def _perform(self, index: int, action: Action) -> None:
        start, needed = self.clock[index], needed_send(action)
        if needed is not None:
            end = max(start, self.arrival_s[needed])
        else:
            seconds = self.stages[action.stage_index].compute_s(action.kind, self.splits[index])
            end = start + seconds * self.stretch(index, action) if seconds else start
        self.held[index] += (action.kind == "F") - (action.kind == "B")
        if action.kind in ("SEND_F", "SEND_B"):
            self._send(index, action)
        self.clock[index] = end
        self.spans[index].append(Span(action, start, end))
        heapq.heappush(self.ready, (end, index))

    def _send(self, index: int, action: Action) -> None:
        stage_index = action.stage_index
        link_index = stage_index if action.kind == "SEND_F" else stage_index - 1
        link, line = self.links[link_index], (link_index, action.kind)
        longer = self.stretch(index, action)
        transfer, shared = link.transfer_s(action.kind) * longer, link.shared_s(action.kind)
        start = max([self.clock[index], self.free_s[line], *(self.shared_free_s.get(n, 0.0) for n, _ in shared)])
        self.free_s[line] = start + transfer
        self.shared_free_s |= {name: start + seconds * longer for name, seconds in shared}
        self.line_s[line] += transfer
        message = stage_index, action.kind, action.microbatch_index
        self.arrival_s[message] = self.free_s[line] + link.latency_s
        if message in self.waiters:
            waiter = self.waiters.pop(message)
            heapq.heappush(self.ready, (max(self.clock[waiter], self.arrival_s[message]), waiter))


def format_grid(timeline: Timeline, width: int = 72) -> str:
    """The step as a picture: a row per node, time to the right.

    Digits are forwards, letters backwards (0 and a are microbatch 0, 10, 20 ...; capitals: gradients of weights),
    ``U`` updates and ``.`` waits.
    """
    rows = []
    scale = width / timeline.step_s if timeline.step_s > 0 else 0.0
    for stage_index, spans in enumerate(timeline.spans):
        cells = ["."] * width
        for span in spans:
            if span.action.kind in _COMPUTE and span.end_s > span.start_s:
                first = min(width - 1, round(span.start_s * scale))
                last = max(first + 1, min(width, round(span.end_s * scale)))
                cells[first:last] = _mark(span.action) * (last - first)
        idle = timeline.idle_s[stage_index]
        rows.append(f"stage {stage_index:>3} |{''.join(cells)}| idle {format_duration(idle)}")
    rows.append(f"step {format_duration(timeline.step_s)}, bubble {timeline.bubble * 100:.0f} %, {timeline.bottleneck}")
    return "\n".join(rows)


def _mark(action: Action) -> str:
    if action.kind == "UPDATE":
        return "U"
    return {"F": "0123456789", "B": "abcdefghij", "W": "ABCDEFGHIJ"}[action.kind][action.microbatch_index % 10]
