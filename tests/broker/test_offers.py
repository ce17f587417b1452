"""What a node's backend lacks is refused at planning, by name, before anything is sent."""

from __future__ import annotations

import msgspec
import pytest
from tests.kits.backend_kit import Regression, example

from fusionllm.broker.planning import plan_job
from fusionllm.capture.export import capture_module
from fusionllm.compute import ComputeOptions, OptimConfig, ParamGroup, load_backend
from fusionllm.errors import PlanError
from fusionllm.ir.ops import OPS
from fusionllm.ir.tensor import DTYPES
from fusionllm.protocol.membership import Member
from fusionllm.protocol.messages import Compression, JobOptions, Offer

GRAPH = capture_module(Regression(), example()).graph
WHOLE = Offer(device="cpu", operators=tuple(OPS), optimizers=("adamw", "sgd"), dtypes=tuple(DTYPES), codecs=True)
OWNER = Member("owner", "owner", "", "", 1, "127.0.0.1", 1)


def plan(offer: Offer | None, optim: OptimConfig | None = None, opset: int = 1, **options: object) -> set[str]:
    """Names of the nodes that get a stage of a job on a whole node and one with this offer."""
    nodes = [
        Member(f"node{i}", "node", "", "jax", known, "127.0.0.1", 2 + i, offer=given)
        for i, (given, known) in enumerate([(WHOLE, 1), (offer, opset)])
    ]
    job = JobOptions(
        num_stages=2, partition="equal-number", pipeline="gpipe", num_microbatches=1, microbatch_size=3, num_steps=1,
        optim=msgspec.json.encode(optim or OptimConfig()), compute=msgspec.json.encode(ComputeOptions()), **options,
    )  # fmt: skip
    return set(plan_job("job1", GRAPH, job, nodes, OWNER).assignments)


def test_a_node_that_has_all_or_did_not_say_gets_its_stage():
    assert plan(WHOLE) == plan(None) == {"node0", "node1"}


def test_a_missing_operator_is_named():
    offer = msgspec.structs.replace(WHOLE, operators=tuple(n for n in OPS if n != "aten.mean.default"))
    with pytest.raises(PlanError, match=r"stage 1 would go to node1, whose backend jax lacks 1 .*aten\.mean\.default"):
        plan(offer)


def test_a_missing_dtype_is_named():
    with pytest.raises(PlanError, match=r"node1, whose backend jax has no float32; it has int64, float64"):
        plan(msgspec.structs.replace(WHOLE, dtypes=("int64", "float64")))


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
