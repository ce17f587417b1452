"""What a node's backend lacks is refused at planning, by name, before anything is sent."""

from __future__ import annotations

import msgspec
import pytest
from tests.kits.backend_kit import Regression, example

from fusionllm.broker.planning import Surveyed, plan_job
from fusionllm.capture.export import capture_module
from fusionllm.compute import ComputeOptions, OptimConfig, ParamGroup, load_backend
from fusionllm.errors import PlanError
from fusionllm.estimate.device import lambda_rates
from fusionllm.ir.ops import OPS
from fusionllm.ir.tensor import DTYPES
from fusionllm.protocol.membership import Member
from fusionllm.protocol.messages import Compression, JobOptions, Offer
from fusionllm.schedule.placement import Cluster, NodeModel

GRAPH = capture_module(Regression(), example()).graph
WHOLE = Offer(device="cpu", operators=tuple(OPS), optimizers=("adamw", "sgd"), dtypes=tuple(DTYPES), codecs=True)
OWNER = Member("owner", "owner", "", "", 1, "127.0.0.1", 1)


def plan(
    offer: Offer | None, optim: OptimConfig | None = None, opset: int = 1, precision: str = "float32",
    partition: str = "equal-number", surveyed: Surveyed | None = None, **options: object,
) -> set[str]:  # fmt: skip
    """Names of the nodes that get a stage of a job on a whole node and one with this offer."""
    nodes = [
        Member(f"node{i}", "node", "", "jax", known, "127.0.0.1", 2 + i, offer=given)
        for i, (given, known) in enumerate([(WHOLE, 1), (offer, opset)])
    ]
    job = JobOptions(
        num_stages=2, partition=partition, pipeline="gpipe", num_microbatches=1, microbatch_size=3, num_steps=1,
        optim=msgspec.json.encode(optim or OptimConfig()),
        compute=msgspec.json.encode(ComputeOptions(precision=precision)), **options,
    )  # fmt: skip
    return set(plan_job("job1", GRAPH, job, nodes, OWNER, surveyed).assignments)


def test_a_node_that_has_all_or_did_not_say_gets_its_stage():
    assert plan(WHOLE) == plan(None) == {"node0", "node1"}


def test_a_missing_operator_is_named():
    offer = msgspec.structs.replace(WHOLE, operators=tuple(n for n in OPS if n != "aten.mean.default"))
    with pytest.raises(PlanError, match=r"stage 1 would go to node1, whose backend jax lacks 1 .*aten\.mean\.default"):
        plan(offer)


def test_a_missing_dtype_is_named():
    with pytest.raises(PlanError, match=r"node1, whose backend jax has no float32; it has int64, float64"):
        plan(msgspec.structs.replace(WHOLE, dtypes=("int64", "float64")))


def test_a_precision_that_a_backend_lacks_is_named_and_planned_around(monkeypatch):
    narrow = msgspec.structs.replace(WHOLE, dtypes=("int64", "float32", "float64"))
    assert plan(narrow) == {"node0", "node1"}
    for precision in ("bfloat16", "bfloat16-weights"):
        with pytest.raises(PlanError, match="node1, whose backend jax has no bfloat16; it has int64, float32"):
            plan(narrow, precision=precision)
    # the node without bfloat16 is a hundred times as fast
    models = [
        NodeModel(name=f"node{i}", flops_per_s=rate, memory_bytes=1e9, site="a", device=f"node{i}")
        for i, rate in enumerate((1e9, 1e11))
    ]
    way = ((0.0, 1e9), (1e9, 0.0))
    cluster = Cluster(nodes=tuple(models), bandwidth_bytes_per_s=way, latency_s=((0.0, 0.0), (0.0, 0.0)))
    rates = {node.name: lambda_rates(node.flops_per_s, 1.0) for node in models}
    surveyed = Surveyed(cluster, rates, {})
    assert plan(narrow, partition="dp", surveyed=surveyed) == {"node1"}
    assert plan(narrow, partition="dp", surveyed=surveyed, precision="bfloat16") == {"node0"}
    whole_too = msgspec.structs.replace(WHOLE, dtypes=narrow.dtypes)
    monkeypatch.setitem(globals(), "WHOLE", whole_too)
    with pytest.raises(PlanError, match=r"none of node0, node1 has bfloat16; set train\.precision = 'float32'"):
        plan(narrow, partition="dp", surveyed=surveyed, precision="bfloat16")


def test_a_precision_that_nobody_knows_is_refused():
    with pytest.raises(PlanError, match=r"how stages compute is not what this broker knows: .*'int3'"):
        plan(WHOLE, precision="int3")


def test_an_older_opset_is_refused():
    with pytest.raises(PlanError, match=r"node1, which knows operators up to opset 0.*upgrade fusionllm on node1"):
        plan(WHOLE, opset=0)


@pytest.mark.parametrize(
    ("optim", "missing"),
    [
        (OptimConfig(name="rprop"), "rprop"),
        (OptimConfig(name="muon"), "muon"),
        (OptimConfig(groups=(ParamGroup(match=("*",), name="nadam"),)), "nadam"),
    ],
)
def test_a_missing_optimizer_is_named(optim, missing):
    with pytest.raises(PlanError, match=f"no optimizer '{missing}'; it has adamw, sgd"):
        plan(WHOLE, optim)


def test_codecs_need_torch_where_they_are_used():
    offer = msgspec.structs.replace(WHOLE, codecs=False)
    assert plan(offer) == {"node0", "node1"}
    with pytest.raises(PlanError, match=r"node1, .*has no codecs.*int8.*fusionllm\[torch\]"):
        plan(offer, compression=Compression(forward="int8", links="all"))


def test_torch_offers_everything_and_jax_every_operator():
    torch, jax = (load_backend(name).warm_up("cpu") for name in ("torch", "jax"))
    assert torch.operators == jax.operators == OPS.keys()
    assert jax.optimizers < torch.optimizers
    assert torch.dtypes == jax.dtypes == DTYPES.keys()
