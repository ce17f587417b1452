"""All operators of the JAX backend in one table, each bound by our argument names."""

from __future__ import annotations

from typing import Any

from fusionllm.compute.jax.elementwise import ELEMENTWISE, Handler
from fusionllm.compute.jax.layers import LAYERS, RANDOM
from fusionllm.compute.jax.moves import MOVES
from fusionllm.compute.jax.windows import WINDOWS
from fusionllm.compute.sizes import SIZES
from fusionllm.errors import GraphError
from fusionllm.ir.ops import OPS


def _by_order(name: str) -> Handler:
    function, order = SIZES[name], OPS[name].args
    return lambda **given: function(*(given[key] for key in order if key in given))


TABLE: dict[str, Handler] = {
    **ELEMENTWISE, **MOVES, **LAYERS, **WINDOWS, **RANDOM, **{name: _by_order(name) for name in SIZES},
}  # fmt: skip

#: Under bfloat16: computed in it, and in float32, as torch's autocast divides them. The others take what comes.
LOWER = frozenset(
    f"aten.{name}"
    for name in (
        "linear.default", "addmm.default", "matmul.default", "bmm.default", "baddbmm.default", "conv1d.default",
        "conv2d.default", "conv3d.default", "conv_transpose2d.input", "scaled_dot_product_attention.default",
    )
)  # fmt: skip
HIGHER = frozenset(
    f"aten.{name}"
    for name in (
        "layer_norm.default", "group_norm.default", "rms_norm.default", "softmax.int", "log_softmax.int",
        "cross_entropy_loss.default", "nll_loss_nd.default", "binary_cross_entropy_with_logits.default",
        "mse_loss.default", "l1_loss.default", "smooth_l1_loss.default", "linalg_vector_norm.default", "prod.dim_int",
        "cumsum.default", "logsumexp.default", "var.correction", "std.correction",
        "_native_batch_norm_legit_functional.default",
    )
)  # fmt: skip


def resolve(name: str) -> Handler:
    """The function of an operator. Raises GraphError: not listed, or not on this backend."""
    if name not in OPS:
        raise GraphError(f"operator {name!r} is not in the allow-list; a jax node executes listed operators only")
    if name not in TABLE:
        raise GraphError(f"the jax backend has no operator {name!r}; let a torch node take this stage")
    return TABLE[name]


def lowered(args: Any, dtype: Any) -> Any:
    """An argument with its float arrays, in a list too, of another dtype."""
    if isinstance(args, list):
        return [lowered(a, dtype) for a in args]
    floating = getattr(args, "dtype", None) is not None and str(args.dtype) in ("float32", "bfloat16", "float16")
    return args.astype(dtype) if floating else args
