"""The rule applied again while a job runs: by what the job shows, and not for small changes."""

from __future__ import annotations

import msgspec
import pytest
from tests.schedule.test_coded import MIB, wide
from tests.schedule.test_planner import make_cluster, make_workload

from fusionllm.broker.links import Tuner, ladder_of, link_choices
from fusionllm.errors import RemoteProtocolError
from fusionllm.ir.cluster import LinkProfile
from fusionllm.protocol.messages import Compression, LinkCodecs
from fusionllm.schedule.coded import BAND, best_coded
from fusionllm.schedule.placement import Placement

RULE = Compression(rule="deadline", rule_every=3, links="all")


def make_tuner(rate: float) -> Tuner:
    """Two nodes that compute 3 s a microbatch, 4 MiB between them, ``rate`` in MiB/s."""
    cluster = make_cluster([1, 1], lambda a, b: rate * MIB)
    nodes = tuple(msgspec.structs.replace(node, device=node.name) for node in cluster.nodes)
    cluster = msgspec.structs.replace(cluster, nodes=nodes)
    workload = wide(make_workload([1.0] * 2, [3], num_microbatches=8))
    workload = msgspec.structs.replace(workload, device_s={node.name: (1.0, 1.0) for node in nodes})
    placement = Placement(nodes=(0, 1), boundaries=(1,))
    coded = best_coded([placement], "deadline", workload, cluster, ladder=ladder_of(RULE))
    return Tuner(workload, cluster, coded, lambda spec, node: None, RULE)


def show(tuner: Tuner, rate: float, compute_s: float = 8 * 3.0) -> None:
    names = sorted(tuner._index)
    for name, peer in (names, names[::-1]):
        tuner.observe(name, compute_s, {peer: LinkProfile(bandwidth_bytes_per_s=rate * MIB, rtt_s=0.01)})


def test_a_link_that_slows_down_is_coded_and_dense_again_when_it_has_recovered():
    tuner = make_tuner(100)
    show(tuner, 100)
    assert tuner.retune() == ()
    show(tuner, 0.1)
    (change,) = tuner.retune()
    assert change.codecs == LinkCodecs("outlier:bits=6", "tangent:bits=8(hadamard:bits=2)") and "seen" in change.why
    show(tuner, 0.1)
    assert tuner.retune() == ()
    show(tuner, 100)
    (change,) = tuner.retune()
    assert change.codecs == LinkCodecs("identity", "identity")


def test_a_rate_that_moves_within_the_band_changes_nothing():
    """From any rate a link may lose or win a fifth and back without a word."""
    for rate in (0.2 * 1.15**k for k in range(30)):
        tuner = make_tuner(rate)
        for factor in (1 + 0.9 * BAND, 1 / (1 + 0.9 * BAND), 1.0):
            show(tuner, rate * factor)
            assert tuner.retune() == (), (rate, factor)


def test_slower_stages_leave_a_link_more_time():
    tuner = make_tuner(0.5)
    for seconds in (8 * 3000.0, 8 * 3000.0, 1e-9):  # one odd step is not believed
        show(tuner, 0.5, seconds)
    (change,) = tuner.retune()
    assert change.codecs == LinkCodecs("identity", "identity") and "3e+03 s a microbatch" in change.why
    show(tuner, 0.5, 8 * 0.03)
    (change,) = tuner.retune()
    assert change.codecs.forward == "outlier:bits=6" and "0.03 s a microbatch" in change.why


def test_it_is_due_every_so_many_steps():
    tuner = make_tuner(2)
    assert [tuner.is_due() for _ in range(6)] == [False, False, True] * 2


@pytest.mark.parametrize(("compute_s", "rate"), [(float("nan"), 1), (-1.0, 1), (1.0, -1), (1.0, float("inf"))])
def test_what_cannot_be_is_refused(compute_s, rate):
    with pytest.raises(RemoteProtocolError, match="reported"):
        show(make_tuner(2), rate, compute_s)


def test_links_may_use_the_whole_ladder_where_the_rule_is_applied_again():
    codecs = {(0, 1): LinkCodecs("int8:block=64", "int8:block=64")}
    choices = link_choices(codecs, 3, RULE)
    assert sorted(choices) == [(0, 1), (0, 2), (1, 2)]
    assert choices[1, 2].backward[-1] == "tangent:bits=8(hadamard:bits=2)"
    (once,) = link_choices(codecs, 3, msgspec.structs.replace(RULE, rule_every=0)).values()
    assert once.forward == once.backward == ("int8:block=64",)
