"""Hypothesis builders of nouns: graphs that keep every rule of the IR, plans, pipelines."""

from __future__ import annotations

from hypothesis import strategies as st

from fusionllm.ir.graph import UNUSED, Buffer, Op, OpGraph, Param, Value
from fusionllm.ir.ops import OPS
from fusionllm.ir.plan import Plan, StagePlan
from fusionllm.ir.tensor import DTYPES, SCALARS, TensorSpec

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.text("abz019._", min_size=1, max_size=8) | st.text(
    st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=6
)
fixed_dims = st.integers(0, 1 << 40)
dims = fixed_dims | st.sampled_from(["B", "B*64", "T - 1", "Max(1, B)", "(B+T)//2", "12", "B "])
dtypes = st.sampled_from(sorted(DTYPES))


def specs(dim=dims):
    """Tensors mostly, the odd Python scalar."""
    tensors = st.builds(TensorSpec, dtypes, st.lists(dim, max_size=4).map(tuple))
    return tensors | st.builds(TensorSpec, st.sampled_from(SCALARS))


def plain_args():
    """Arguments that mention no value."""
    leaves = (
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), (1 << 63) - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | texts
        | st.builds(lambda d: {"dt": d}, dtypes)
        | st.sampled_from(["inf", "-inf", "nan"]).map(lambda word: {"f": word})
    )
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=4)


@st.composite
def graphs(draw, max_ops: int = 12) -> OpGraph:
    """Any graph `verify_graph` accepts, all of the format's corners in it; shapes need not make sense."""
    taken = draw(st.lists(names, unique=True, max_size=8))
    count = draw(st.integers(0, len(taken)))
    params, buffers = {}, {}
    tensors = st.builds(TensorSpec, dtypes, st.lists(fixed_dims, max_size=3).map(tuple))
    for name in taken[:count]:
        alias = draw(st.sampled_from([(), (f"{name}~alias",)]))
        if any(f"{name}~alias" == other for other in taken):
            alias = ()
        params[name] = Param(f"p:{name}", draw(tensors), draw(st.booleans()), alias)
    for name in taken[count:]:
        buffers[name] = Buffer(f"b:{name}", draw(tensors), draw(st.booleans()))
    fresh = names.filter(lambda n: n != UNUSED and n[:2] not in ("p:", "b:"))
    ids = iter(draw(st.lists(fresh, unique=True, min_size=4)))
    inputs = tuple(Value(id, draw(specs())) for id in draw(st.permutations([next(ids), next(ids)])))
    recv = tuple(Value(next(ids), draw(specs())) for _ in range(draw(st.integers(0, 1))))
    defined = [v.id for v in (*inputs, *recv)] + [t.id for t in (*params.values(), *buffers.values())]
    ops: list[Op] = []
    for out in ids:
        if len(ops) == max_ops:
            break
        ops.append(draw(_op(out, defined, len(ops))))
        defined.append(out)
    made = [op.outs[0] for op in ops]
    some = st.lists(st.sampled_from(made), unique=True, max_size=3).map(tuple) if made else st.just(())
    mutated = draw(st.lists(st.sampled_from(sorted(buffers)), unique=True, max_size=2)) if buffers and made else []
    return OpGraph(
        producer=draw(texts),
        mode=draw(st.sampled_from(["train", "eval"])),
        symbols={"B": draw(st.integers(0, 2)), "T": 1},
        inputs=inputs,
        recv=recv,
        params=params,
        buffers=buffers,
        ops=tuple(ops),
        outputs=draw(some),
        mutations={f"b:{name}": draw(st.sampled_from(made)) for name in mutated},
        send=draw(some),
        frozen=tuple(v.id for v in recv if v.spec.is_float and draw(st.booleans())),
    )


@st.composite
def _op(draw, out: str, defined: list[str], index: int) -> Op:
    name = draw(st.sampled_from(sorted(OPS)))
    schema = OPS[name]
    ref = st.sampled_from(defined).map(lambda id: {"r": id})
    arg = plain_args() | ref | st.lists(ref, max_size=3)
    given = schema.args[: draw(st.integers(schema.num_required, len(schema.args)))]
    extra = draw(st.integers(0, 1))
    return Op(
        name=name,
        args={arg_name: draw(arg) for arg_name in given},
        outs=(out,) + (UNUSED,) * extra,
        specs=tuple(draw(specs()) for _ in range(1 + extra)),
        scope=draw(texts),
        source=draw(texts),
        rng=index if schema.rng and ({"p", "dropout_p", "dropout"} & set(given) or draw(st.booleans())) else None,
    )


@st.composite
def dataflows(draw, max_ops: int = 16) -> OpGraph:
    """Graphs with the shape of a model: free and anchored operators, ties, skips, randomness, a stateful buffer."""
    plain = sorted(n for n, s in OPS.items() if not s.rng and len(s.args) >= 2)[:6]
    random = sorted(n for n, s in OPS.items() if s.rng)[:2]
    spec = TensorSpec("float32", ("B", 4))
    params = {f"w{i}": Param(f"p:w{i}", TensorSpec("float32", (4,)), draw(st.booleans())) for i in range(3)}
    buffers = {f"s{i}": Buffer(f"b:s{i}", TensorSpec("float32", (4,))) for i in range(2)}
    inputs = (Value("x", spec), Value("y", spec))
    values = [*(p.id for p in params.values()), *(b.id for b in buffers.values()), "x", "y"]
    ops: list[Op] = []
    for index in range(draw(st.integers(1, max_ops))):
        first = {"r": draw(st.sampled_from(values[:1] if index == 0 else values))}
        rng = bool(random) and draw(st.integers(0, 5)) == 0
        name = draw(st.sampled_from(random if rng else plain))
        args = dict.fromkeys(OPS[name].args[: max(2, OPS[name].num_required)], first)
        if draw(st.booleans()):
            args[OPS[name].args[1]] = {"r": draw(st.sampled_from(values))}
        width = draw(st.integers(1, 4))
        made = TensorSpec("float32", ("B", width))
        ops.append(Op(name=name, args=args, outs=(f"v{index}",), specs=(made,), rng=index if rng else None))
        values.append(f"v{index}")
    mutations = {"b:s0": draw(st.sampled_from([op.outs[0] for op in ops]))} if draw(st.booleans()) else {}
    # the loss reads a parameter, as every loss worth training does
    args = {name: {"r": "p:w0"} for name in OPS[plain[0]].args[: max(2, OPS[plain[0]].num_required)]}
    loss = Op(name=plain[0], args=args, outs=("loss",), specs=(spec,))
    outputs = ("loss", *draw(st.lists(st.sampled_from([op.outs[0] for op in ops]), unique=True, max_size=2)))
    return OpGraph(
        symbols={"B": 1}, inputs=inputs, params=params, buffers=buffers, ops=(*ops, loss),
        outputs=outputs, mutations=mutations,
    )  # fmt: skip


@st.composite
def plans(draw) -> Plan:
    """Any plan `verify_plan` accepts."""
    stages, end = [], 0
    for index in range(draw(st.integers(1, 6))):
        first, end = end, end + draw(st.integers(1, 50))
        stages.append(
            StagePlan(
                stage_index=index,
                node=draw(texts.filter(bool)),
                first_op=first,
                end_op=end,
                num_ops=draw(st.integers(0, 99)),
                flops=draw(st.floats(0, 1e30)),
                param_bytes=draw(st.integers(0, 1 << 50)),
            )
        )
    tied = {}
    if len(stages) > 1:
        several = st.lists(st.integers(0, len(stages) - 1), unique=True, min_size=2).map(lambda s: tuple(sorted(s)))
        tied = draw(st.dictionaries(texts, several, max_size=2))
    pipeline = draw(st.sampled_from(["gpipe", "1f1b"]))
    return Plan(pipeline=pipeline, num_microbatches=draw(st.integers(1, 99)), stages=tuple(stages), tied=tied)
