"""Admission, leases and the commit of a step."""

from __future__ import annotations

import math

import pytest

from fusionllm.errors import AdmissionError, RemoteProtocolError, UserError
from fusionllm.protocol.job import CommitStep, FailJob, JobMachine, StartJob
from fusionllm.protocol.membership import Membership
from fusionllm.protocol.messages import (
    CONTROL_VERSION,
    Join,
    StepOrder,
    TensorHeader,
    Ticket,
    decode_control,
    decode_header,
    decode_order,
    encode_message,
    parse_ticket,
)  # fmt: skip


def join(name: str = "n0", **changes) -> Join:
    fields = {"version": CONTROL_VERSION, "role": "node", "token": "secret", "public_key_pem": b"", "fence": "a"}
    return Join(name=name, **{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "now_s", "text"),
    [
        ({"token": "guess"}, 0.0, "wrong join token"),
        ({}, 11.0, "expired"),
        ({"version": 99}, 0.0, "version 99"),
        ({"name": "../etc"}, 0.0, "letters, digits"),
        ({"fence": "a\nb"}, 0.0, "letters, digits"),
        ({"name": "broker"}, 0.0, "already here"),
    ],
)
def test_a_newcomer_is_refused_with_a_reason(changes, now_s, text):
    with pytest.raises(AdmissionError, match=text):
        Membership("secret", 10.0).admit(join(**changes), now_s)


def test_a_job_holds_its_machines_until_one_leaves():
    roster = Membership("secret", 10.0)
    for name in ("o", "a", "b"):
        roster.admit(join(name, role="owner" if name == "o" else "node"), 0.0)
        roster.listening(name, "host", 1)
    assert roster.lease("o", "job1", 2) is not None
    assert roster.holds("job1", ["o", "a", "b"]) and not roster.holds("job2", ["a"])
    roster.leave("b")
    assert not roster.holds("job1", ["o", "a", "b"])


def test_one_machine_per_identity():
    roster = Membership("secret", 10.0)
    roster.admit(join(), 0.0)
    with pytest.raises(AdmissionError, match="already here"):
        roster.admit(join(), 0.0)
    roster.leave("n0")
    roster.admit(join(), 0.0)


def test_leases_keep_fences_together_and_are_given_back():
    roster = Membership("secret", 10.0)
    for name, fence in (("n3", "b"), ("n1", "a"), ("n2", "b"), ("n0", "a")):
        roster.admit(join(name, fence=fence), 0.0)
    roster.admit(join("owner", role="owner", fence="b"), 0.0)
    assert roster.lease("owner", "job1", 1) is None
    for name in ("n0", "n1", "n2", "n3"):
        roster.listening(name, "host", 1)
    assert [m.name for m in roster.lease("owner", "job1", 3)] == ["n2", "n3", "n0"]
    assert roster.lease("owner", "job2", 2) is None
    roster.release("job1")
    assert len(roster.idle_nodes()) == 4


def test_a_step_commits_when_all_stages_are_done():
    job = JobMachine(("a", "b"))
    assert job.handle_ready("a", 0) == []
    assert job.handle_ready("b", 1) == [StartJob()]
    assert job.handle_done("b", 1, 0, 9.0) == []
    assert "stage 0 (a)" in job.waiting_for()
    assert job.handle_done("a", 0, 0, 16.0) == [CommitStep(0, 5.0)]
    with pytest.raises(RemoteProtocolError, match="twice"):
        job.handle_done("a", 0, 0, 1.0)
    with pytest.raises(RemoteProtocolError, match="not its own"):
        job.handle_done("a", 1, 1, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_gradient_that_is_no_number_ends_the_job_before_any_stage_updates(value):
    job = JobMachine(("a",))
    job.handle_ready("a", 0)
    assert isinstance(job.handle_done("a", 0, 0, value)[0], FailJob)
    assert job.handle_lost("a", "gone") == []


def test_messages_survive_the_wire_and_refuse_what_they_do_not_know():
    assert decode_control(encode_message(join())) == join()
    header = TensorHeader("activation", "j", 3, 0, "x", "float32", (2, 3))
    assert decode_header(encode_message(header)) == header
    for bad in (b"", b"\xc0", b"\x81\xa4type\xa4Evil", encode_message(header)[:-1], b"\x93\x01\x02\x03"):
        with pytest.raises(RemoteProtocolError):
            decode_control(bad)
        with pytest.raises(RemoteProtocolError):
            decode_header(bad)
    with pytest.raises(RemoteProtocolError):
        decode_header(encode_message(TensorHeader("activation", "j", 3, 0, "x", "float32", (-2,))))
    for rows in ((), (0,), (-1, 2)):
        with pytest.raises(RemoteProtocolError):
            decode_order(encode_message(StepOrder(seq=0, step=0, rows=rows)))


def test_a_ticket_reads_back_and_a_wrong_one_says_what_is_wrong():
    six = Ticket("::1", 7654, "ab" * 32, "token-token")
    assert parse_ticket(str(six)) == six
    ticket = Ticket("host.example", 7654, "ab" * 32, "token-token")
    assert parse_ticket(f" {ticket}\n") == ticket
    for bad in (
        "",
        "fusion1:host",
        "fusion9:h:1:" + "ab" * 32 + ":tokentoken",
        f"fusion1:h:99999:{'ab' * 32}:tokentoken",
    ):
        with pytest.raises(UserError, match="ticket"):
            parse_ticket(bad)


def test_an_overflow_is_committed_as_a_step_to_leave_out():
    machine = JobMachine(("a", "b"))
    for index, node in enumerate(("a", "b")):
        machine.handle_ready(node, index)
    assert machine.handle_done("a", 0, 0, 0.0, overflow=True) == []
    (commit,) = machine.handle_done("b", 1, 0, 4.0)
    assert commit == CommitStep(0, float("inf"))
    machine.handle_done("a", 0, 1, 9.0)
    assert machine.handle_done("b", 1, 1, 16.0) == [CommitStep(1, 5.0)]
