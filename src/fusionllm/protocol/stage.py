"""The stage executor as a pure machine: what arrived goes in, what to compute and send comes out.

Holds no tensor and no clock: the node's shell keeps the tensors under the keys named here, performs the commands and
reports back. Executes the StageProgram of each step in order; a forward waits for its inputs and received values, a
backward for the gradients of all consumers, the update for the other holders of tied parameters and for the commit of
the whole job. So a step happens on all stages or on none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from fusionllm.errors import RemoteProtocolError
from fusionllm.ir.program import Action, StageProgram
from fusionllm.protocol.messages import StepOrder

#: Steps ahead of the current one that a peer may send for.
MAX_STEPS_AHEAD = 64
OWNER = -1


class Slot(msgspec.Struct, frozen=True):
    """Name of one tensor on its way: ``source`` is the stage that sent it, or OWNER."""

    kind: str
    seq: int
    microbatch_index: int
    key: str
    source: int


class Forward(msgspec.Struct, frozen=True):
    """Compute a forward from the values in ``slots``."""

    order: StepOrder
    microbatch_index: int
    slots: tuple[Slot, ...]


class Backward(msgspec.Struct, frozen=True):
    """Compute a backward from the gradients in ``slots`` (several of one key are summed, in the order given)."""

    order: StepOrder
    microbatch_index: int
    slots: tuple[Slot, ...]
    loss_weight: float


class SendActivations(msgspec.Struct, frozen=True):
    order: StepOrder
    microbatch_index: int


class SendGradients(msgspec.Struct, frozen=True):
    order: StepOrder
    microbatch_index: int


class SendTied(msgspec.Struct, frozen=True):
    """Send the gradient of each tied parameter to its other holders."""

    order: StepOrder


class ReportDone(msgspec.Struct, frozen=True):
    """Sum the tied gradients of ``slots`` with our own, and tell the broker that this stage could update."""

    order: StepOrder
    slots: tuple[Slot, ...]


class Update(msgspec.Struct, frozen=True):
    order: StepOrder
    total_norm: float


class FinishEval(msgspec.Struct, frozen=True):
    order: StepOrder


Command = Forward | Backward | SendActivations | SendGradients | SendTied | ReportDone | Update | FinishEval


class StageMachine:
    """Executes steps of one stage. ``handle_*`` takes an event and returns the commands it releases.

    Args:
        inputs: ids of the raw inputs the owner feeds.
        producers: value id -> stage that produces it (what this stage receives).
        consumers: value id -> stages that want it (what this stage sends).
        differentiable: ids among producers and consumers through which a gradient flows.
        tied: parameter name -> all stages that hold it, this one included.
        program: (number of microbatches, train) -> the stage's program for such a step.
    """

    def __init__(
        self,
        stage_index: int,
        *,
        inputs: tuple[str, ...],
        producers: Mapping[str, int],
        consumers: Mapping[str, tuple[int, ...]],
        differentiable: frozenset[str],
        tied: Mapping[str, tuple[int, ...]],
        program: Callable[[int, bool], StageProgram],
    ) -> None:
        self.stage_index = stage_index
        self._inputs, self._producers, self._consumers = inputs, producers, consumers
        self._differentiable, self._tied, self._program = differentiable, tied, program
        self._orders: deque[StepOrder] = deque()
        self._actions: deque[Action] = deque()
        self._most_held = self._held = 0  # microbatches between forward and backward; no overtaking where most is 0
        self._arrived: set[Slot] = set()
        self._busy = False
        self._sent_tied = self._reported = False
        self._last_seq = -1

    # events

    def handle_order(self, order: StepOrder) -> list[Command]:
        """The owner wants a step. Orders come in sequence."""
        if order.seq != self._last_seq + 1 or len(self._orders) > MAX_STEPS_AHEAD:
            raise RemoteProtocolError(f"step order {order.seq} after {self._last_seq}, {len(self._orders)} waiting")
        self._last_seq = order.seq
        self._orders.append(order)
        if len(self._orders) == 1:
            self._begin()
        return self._advance()

    def handle_arrival(self, slot: Slot) -> list[Command]:
        """A tensor lies ready under ``slot``. Raises RemoteProtocolError for one nobody asked for, or a second one."""
        current = self._orders[0].seq if self._orders else self._last_seq + 1
        expected = {
            "input": slot.key in self._inputs and slot.source == OWNER,
            "activation": self._producers.get(slot.key) == slot.source,
            "gradient": slot.source in self._consumers.get(slot.key, ()) and slot.key in self._differentiable,
            "tied": slot.source in self._tied.get(slot.key, ()) and slot.source != self.stage_index,
        }.get(slot.kind, False)
        if not expected or not current <= slot.seq <= current + MAX_STEPS_AHEAD or slot in self._arrived:
            raise RemoteProtocolError(
                f"unexpected {slot.kind} {slot.key!r} of step {slot.seq} from {_who(slot.source)}"
            )
        self._arrived.add(slot)
        return self._advance()

    def handle_computed(self) -> list[Command]:
        """The command that computes (Forward, Backward, ReportDone, Update, FinishEval) is done."""
        self._busy = False
        return self._advance()

    def handle_commit(self, seq: int, total_norm: float) -> list[Command]:
        """All stages could update. Raises RemoteProtocolError when this stage is not at that point."""
        if not self._orders or self._orders[0].seq != seq or not self._reported:
            raise RemoteProtocolError(f"commit of step {seq} while {self.waiting_for() or 'computing'}")
        order = self._orders[0]
        self._finish()
        self._busy = True
        return [Update(order, total_norm)]

    # state

    @property
    def idle(self) -> bool:
        return not self._orders and not self._busy

    def waiting_for(self) -> str | None:
        """Who this stage waits for, in words; None while it computes."""
        if self._busy:
            return None
        if not self._orders:
            return "the owner to order the next step"
        order = self._orders[0]
        if not self._actions:
            return f"the other stages to finish step {order.step}"
        missing = sorted(
            {f"{s.kind} {s.key} from {_who(s.source)}" for s in self._needs(self._actions[0]) if s not in self._arrived}
        )
        return f"{', '.join(missing[:4])} (step {order.step}, {self._actions[0]})" if missing else None

    # transitions

    def _begin(self) -> None:
        order = self._orders[0]
        program = self._program(len(order.rows), order.train)
        # RECV is the wait of its F or B, SEND follows it at once: what is sent where, the graph says
        self._actions = deque(a for a in program.actions if a.kind in ("F", "B", "UPDATE"))
        self._most_held, self._held = program.depth if program.overtakes else 0, 0
        self._sent_tied = self._reported = False

    def _finish(self) -> None:
        done = self._orders.popleft().seq
        self._arrived = {s for s in self._arrived if s.seq != done}
        self._actions.clear()
        self._reported = False
        if self._orders:
            self._begin()

    def _advance(self) -> list[Command]:
        commands: list[Command] = []
        while self._orders and not self._busy and not self._reported:
            order = self._orders[0]
            if not self._actions:
                self._finish()
                self._busy = True
                commands.append(FinishEval(order))
                break
            first = self._actions[0]
            if first.kind == "UPDATE" and self._tied and not self._sent_tied:
                self._sent_tied = True
                commands.append(SendTied(order))
            action = next(filter(self._has_all, (first, *self._overtaking(first))), None)
            if action is None:
                break
            self._actions.remove(action)
            self._held += (action.kind == "F") - (action.kind == "B")
            self._busy = True
            commands.extend(self._commands(order, action, self._needs(action)))
        return commands

    def _has_all(self, action: Action) -> bool:
        return all(slot in self._arrived for slot in self._needs(action))

    def _overtaking(self, late: Action) -> list[Action]:
        """What may go first while ``late`` waits for a message: the next action of the other kind, if any."""
        allowed = {"F": self._most_held and self._held > 0, "B": self._held < self._most_held}
        if not allowed.get(late.kind):
            return []
        return [a for a in self._actions if a.kind in allowed and a.kind != late.kind][:1]

    def _commands(self, order: StepOrder, action: Action, slots: tuple[Slot, ...]) -> list[Command]:
        index = action.microbatch_index
        if action.kind == "F":
            return [Forward(order, index, slots), SendActivations(order, index)]
        if action.kind == "B":
            weight = order.rows[index] / sum(order.rows)
            return [Backward(order, index, slots, weight), SendGradients(order, index)]
        self._reported = True
        return [ReportDone(order, slots)]

    def _needs(self, action: Action) -> tuple[Slot, ...]:
        seq, index = self._orders[0].seq, action.microbatch_index
        if action.kind == "F":
            inputs = [Slot("input", seq, index, key, OWNER) for key in self._inputs]
            return (*inputs, *(Slot("activation", seq, index, key, s) for key, s in self._producers.items()))
        if action.kind == "B":
            return tuple(
                Slot("gradient", seq, index, key, stage)
                for key, stages in self._consumers.items()
                if key in self._differentiable
                for stage in sorted(stages, reverse=True)
            )
        return tuple(
            Slot("tied", seq, -1, name, stage)
            for name, stages in self._tied.items()
            for stage in stages
            if stage != self.stage_index
        )


def _who(source: int) -> str:
    return "the owner" if source == OWNER else f"stage {source}"
