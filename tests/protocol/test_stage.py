"""Stage machines of a whole pipeline, driven together with tensors arriving in any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionllm.errors import RemoteProtocolError
from fusionllm.protocol import stage as s
from fusionllm.protocol.messages import StepOrder
from fusionllm.schedule.pipeline import PIPELINES, forward_only

X = "value{}"


def machine(index: int, count: int, pipeline: str, skip: bool, tied: bool) -> s.StageMachine:
    """Stage ``index`` of a chain; with ``skip`` stage 0's value also goes to the last stage."""
    producers = {X.format(index - 1): index - 1} if index else {}
    consumers = {X.format(index): (index + 1,)} if index + 1 < count else {}
    if skip and count > 2:
        if index == count - 1:
            producers = {**producers, X.format(0): 0}
        if index == 0:
            consumers = {X.format(0): (1, count - 1)}
    holders = {"wte": (0, count - 1)} if tied and count > 1 and index in (0, count - 1) else {}

    def program(num_microbatches: int, train: bool):
        return (PIPELINES[pipeline] if train else forward_only)(index, count, num_microbatches)

    inputs = ("ids",) if index in (0, count - 1) else ()
    return s.StageMachine(
        index, inputs=inputs, producers=producers, consumers=consumers,
        differentiable=frozenset({*producers, *consumers}), tied=holders, program=program,
    )  # fmt: skip


class Pipeline:
    """Performs commands by putting what they send on the way; a random one arrives next."""

    def __init__(self, count: int, pipeline: str, skip: bool, tied: bool, seed: int) -> None:
        self.machines = [machine(i, count, pipeline, skip, tied) for i in range(count)]
        self.way: list[tuple[int, s.Slot | tuple]] = []
        self.random = random.Random(seed)
        self.done: dict[int, set[int]] = {}
        self.log: list[str] = []

    def order(self, order: StepOrder) -> None:
        for i, one in enumerate(self.machines):
            self.way += [
                (i, s.Slot("input", order.seq, b, "ids", s.OWNER)) for b in range(len(order.rows)) for _ in one._inputs
            ]
            self.perform(i, one.handle_order(order))

    def perform(self, i: int, commands: list[s.Command]) -> None:
        one = self.machines[i]
        todo = list(commands)
        while todo:
            command = todo.pop(0)
            seq = command.order.seq
            if isinstance(command, s.SendActivations):
                for key, stages in one._consumers.items():
                    self.way += [(k, s.Slot("activation", seq, command.microbatch_index, key, i)) for k in stages]
                continue
            if isinstance(command, s.SendGradients):
                for key, stage in one._producers.items():
                    self.way.append((stage, s.Slot("gradient", seq, command.microbatch_index, key, i)))
                continue
            if isinstance(command, s.SendTied):
                for name, stages in one._tied.items():
                    self.way += [(k, s.Slot("tied", seq, -1, name, i)) for k in stages if k != i]
                continue
            self.log.append(f"{i}{type(command).__name__}{getattr(command, 'microbatch_index', '')}")
            if isinstance(command, s.ReportDone):
                done = self.done.setdefault(seq, set())
                done.add(i)
                if len(done) == len(self.machines):
                    self.way += [(k, ("commit", seq)) for k in range(len(self.machines))]
            todo += one.handle_computed()

    def run(self) -> None:
        while self.way:
            i, what = self.way.pop(self.random.randrange(len(self.way)))
            one = self.machines[i]
            self.perform(i, one.handle_commit(what[1], 1.0) if isinstance(what, tuple) else one.handle_arrival(what))


@given(
    st.integers(1, 4), st.sampled_from(sorted(PIPELINES)), st.booleans(), st.booleans(), st.integers(0, 10**6),
    st.lists(st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans()), min_size=1, max_size=4),
)  # fmt: skip
def test_every_step_completes_in_any_arrival_order(count, pipeline, skip, tied, seed, steps):
    pipe = Pipeline(count, pipeline, skip, tied, seed)
    for seq, (rows, train) in enumerate(steps):
        pipe.order(StepOrder(seq=seq, step=seq, rows=tuple(rows), train=train))
    pipe.run()
    assert all(one.idle for one in pipe.machines)
    trained = sum(train for _, train in steps)
    assert sum("Update" in line for line in pipe.log) == trained * count
    assert sum("Forward" in line for line in pipe.log) == sum(len(rows) for rows, _ in steps) * count
    assert sum("Backward" in line for line in pipe.log) == sum(len(rows) for rows, train in steps if train) * count

    for index in range(count):  # in order, whatever came first
        for kind in ("Forward", "Backward"):
            did = [line.removeprefix(f"{index}{kind}") for line in pipe.log if line.startswith(f"{index}{kind}")]
            assert did == [str(b) for rows, train in steps if train or kind == "Forward" for b in range(len(rows))]


@pytest.mark.parametrize(
    ("pipeline", "wanted"),
    [
        ("1f1b-ahead", ["Forward0", "Backward0", "Forward1", "Forward2", "Forward3", "Backward1"]),
        ("1f1b", ["Forward0", "Forward1", "Backward0", "Forward2", "Backward1", "Forward3"]),
        ("gpipe", ["Forward0", "Forward1", "Forward2", "Forward3", "Forward4", "Backward0"]),
    ],
)
def test_what_is_there_overtakes_what_is_late(pipeline, wanted):
    """Stage 1 of 3: gradient 0 comes before microbatch 1, and all others before the next gradient."""
    one = machine(1, 3, pipeline, False, False)
    todo = one.handle_order(StepOrder(seq=0, step=0, rows=(1, 1, 1, 1, 1)))
    did = []
    arrivals = [("activation", 0), ("gradient", 0), *(("activation", b) for b in range(1, 5))]
    arrivals += [("gradient", b) for b in range(1, 5)]
    for kind, index in arrivals:
        todo += one.handle_arrival(
            s.Slot(kind, 0, index, X.format(0 if kind == "activation" else 1), 0 if kind == "activation" else 2)
        )
        while todo:
            command = todo.pop(0)
            if isinstance(command, (s.Forward, s.Backward)):
                did.append(f"{type(command).__name__}{command.microbatch_index}")
            if not isinstance(command, (s.SendActivations, s.SendGradients)):
                todo += one.handle_computed()
    assert did[: len(wanted)] == wanted and len(did) == 10


def test_gradients_and_losses_are_weighted_by_rows():
    one = machine(0, 1, "gpipe", False, False)
    commands = one.handle_order(StepOrder(seq=0, step=5, rows=(3, 1)))
    assert commands == []
    for index in (0, 1):
        commands += one.handle_arrival(s.Slot("input", 0, index, "ids", s.OWNER))
    weights = []
    while commands:
        command = commands.pop(0)
        if isinstance(command, s.Backward):
            weights.append(command.loss_weight)
        if not isinstance(command, (s.SendActivations, s.SendGradients)):
            commands += one.handle_computed()
    assert weights == [0.75, 0.25]


@pytest.mark.parametrize(
    "slot",
    [
        s.Slot("activation", 0, 0, "value0", 2),
        s.Slot("activation", 0, 0, "other", 0),
        s.Slot("gradient", 0, 0, "value1", 0),
        s.Slot("tied", 0, -1, "wte", 0),
        s.Slot("activation", 1000, 0, "value0", 0),
        s.Slot("weight", 0, 0, "value0", 0),
    ],
)
def test_what_nobody_asked_for_is_refused(slot):
    one = machine(1, 3, "1f1b", False, False)
    with pytest.raises(RemoteProtocolError, match="unexpected"):
        one.handle_arrival(slot)


def test_a_second_arrival_and_a_step_out_of_order_are_refused():
    one = machine(1, 3, "1f1b", False, False)
    one.handle_order(StepOrder(seq=0, step=0, rows=(1,)))
    with pytest.raises(RemoteProtocolError):
        one.handle_order(StepOrder(seq=2, step=2, rows=(1,)))
    slot = s.Slot("gradient", 0, 0, "value1", 2)
    one.handle_arrival(slot)
    with pytest.raises(RemoteProtocolError):
        one.handle_arrival(slot)
    with pytest.raises(RemoteProtocolError, match="commit"):
        one.handle_commit(0, 1.0)


def test_a_wait_says_for_whom():
    one = machine(1, 3, "1f1b", False, False)
    assert one.waiting_for() == "the owner to order the next step"
    one.handle_order(StepOrder(seq=0, step=7, rows=(1,)))
    assert one.waiting_for() == "activation value0 from stage 0 (step 7, 1F0)"
