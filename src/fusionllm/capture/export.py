"""From `nn.Module` to OpGraph: the only place that knows torch.export and fx. First stop of the path.

The loss is captured inside, the batch size stays symbolic, and an empty decomposition table keeps composite operators
whole while making everything functional. What comes out is normalised (`normalise`) and verified.
"""

from __future__ import annotations

import inspect
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any, Literal, NamedTuple

import torch

from fusionllm.capture.empty import all_on_meta, is_empty, on_meta
from fusionllm.capture.gradients import keep_detached, refuse_hooks, refuse_own_backward
from fusionllm.capture.normalise import GraphBuilder, user_line
from fusionllm.capture.portable import portable
from fusionllm.errors import CaptureError, GraphError
from fusionllm.ir.graph import OpGraph
from fusionllm.ir.ops import allowed_ops
from fusionllm.ir.verify import verify_graph


class Captured(NamedTuple):
    """A graph and its tensors: parameters and buffers by canonical name, on the CPU, detached.

    The parameters of a model built without weights (`capture.empty`) are on the device ``meta``.
    """

    graph: OpGraph
    tensors: dict[str, torch.Tensor]


class _LossOnly(torch.nn.Module):
    """Positional inputs in, the scalar loss out, whatever the wrapped module returns it in."""

    def __init__(self, module: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self._names = names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        given = (self._fitting(x) for x in inputs)
        return loss_of(self.module(**dict(zip(self._names, given))))

    def _fitting(self, x: torch.Tensor) -> torch.Tensor:
        """An input of a model with short weights in the weights' type."""
        weight = next(self.module.parameters(), x)
        is_short = weight.dtype in (torch.bfloat16, torch.float16)
        return x.to(weight.dtype) if is_short and x.is_floating_point() else x


def loss_of(out: Any) -> torch.Tensor:
    """The loss in what a module returned: itself, ``.loss``, or ``["loss"]``. Raises CaptureError."""
    loss = out if isinstance(out, torch.Tensor) else None
    if loss is None:
        loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"the model returns {type(out).__name__} without a loss; return the scalar loss from forward "
            "(a Hugging Face model needs `labels` among its inputs)"
        )
    if loss.dim() != 0 or not loss.is_floating_point():
        raise CaptureError(
            f"the model's loss is {loss.dtype} of shape {list(loss.shape)}; it must be one float, e.g. `.mean()` of it"
        )
    return loss


def capture_module(
    module: torch.nn.Module, example_inputs: Mapping[str, torch.Tensor], *, mode: Literal["train", "eval"] = "train",
    allow_ops: Sequence[str] = (), open_length: bool = False,
) -> Captured:  # fmt: skip
    """Capture a module with its loss as an OpGraph.

    Args:
        module: its forward takes the inputs by name and returns the scalar loss, or something with ``.loss``.
        example_inputs: by name, batch first, at least 2 rows (the batch size becomes symbolic).
        mode: train or eval; the module is put into it.
        allow_ops: operators of `torch.library` that the graph may name beyond the list, e.g. ``mylib.scan.default``;
            every node of the job must allow them too.
        open_length: leave the second size of every input open too, one for all: one graph for sequences of any length.

    Raises:
        UserError: allow_ops names something else.
        CaptureError: names the operator or the cause, the line of the model's source, and the way out.
    """
    names, allowed = _check_inputs(module, example_inputs), allowed_ops(allow_ops)
    refuse_hooks(module)
    module.train(mode == "train")
    if is_empty(module):
        with all_on_meta(module) as buffers:
            graph, tensors = _capture(module, on_meta(example_inputs), names, mode, allowed, open_length)
        tensors |= {name: buffers[name].detach() for name in tensors.keys() & buffers.keys()}
        if lost := [n for n in graph.buffers if tensors[n].is_meta]:
            raise CaptureError(
                f"{lost[0]} is a constant made on the inputs' device, and a model without weights is captured on one "
                "without values; register it as a buffer"
            )
    else:
        graph, tensors = _capture(module, example_inputs, names, mode, allowed, open_length)
    try:
        verify_graph(graph, allowed)
    except GraphError as error:
        raise CaptureError(f"the captured graph is not valid: {error}") from None
    return Captured(graph, tensors)


def _capture(
    module: torch.nn.Module, example_inputs: Mapping[str, torch.Tensor], names: tuple[str, ...],
    mode: Literal["train", "eval"], allowed: frozenset[str], open_length: bool,
) -> tuple[OpGraph, dict[str, torch.Tensor]]:  # fmt: skip
    wrapper = _LossOnly(module, names)
    inputs = tuple(example_inputs[name].clone() for name in names)  # one tensor under two names would become one input
    rows = torch.export.Dim("rows")  # one for all inputs: their first dimensions are equal
    length = {1: torch.export.Dim("length", min=2)} if open_length else {}
    dynamic: Any = {"inputs": tuple({0: rows, **(length if x.dim() > 1 else {})} for x in inputs)}
    try:
        with warnings.catch_warnings(), torch.enable_grad(), _no_dump(), refuse_own_backward(), portable(module):
            warnings.simplefilter("ignore")
            program = torch.export.export(wrapper, inputs, dynamic_shapes=dynamic, strict=False)
            keep_detached(program)
            program = program.run_decompositions({})
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(_explain(error)) from None
    return GraphBuilder(program, module, names, mode, allowed).build()


def _check_inputs(module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name, tensor in inputs.items():
        if name not in parameters and not takes_any:
            raise CaptureError(f"the data has a column {name!r}, the model's forward takes {', '.join(parameters)}")
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 1 or tensor.shape[0] < 2:
            raise CaptureError(f"the example input {name!r} needs at least 2 rows, so that the batch size stays open")
    missing = [n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if lacking := [n for n in missing if n not in inputs]:
        raise CaptureError(f"the model's forward needs {', '.join(lacking)}, the data has {', '.join(inputs)}")
    return tuple(inputs)


def _explain(error: Exception) -> str:
    """One sentence for what torch.export says in pages."""
    text = str(error)
    where = user_line(text) or user_line(_traceback_text(error)) or "a line torch does not name"
    first = text.strip().splitlines()[0][:300] if text.strip() else type(error).__name__
    kind = type(error).__name__
    if "DataDependent" in kind or "data-dependent" in text.lower() or "GuardOnDataDependent" in text:
        return (
            f"control flow depends on the data at {where}; write it without a Python `if`, loop or .item() on a "
            "tensor, e.g. with torch.where"
        )
    if "Constraints violated" in text or "specialized" in text:
        return (
            f"the batch size is fixed by the model: {first}; let no shape depend on the number of rows "
            "(len(x) makes it a constant, x.shape[0] does not)"
        )
    if "use_cache" in text or "Cache" in first:
        return f"the model returns a cache ({first}); set use_cache=False in its config"
    return f"torch.export cannot capture the model at {where}: {kind}: {first}"


@contextmanager
def _no_dump() -> Iterator[None]:
    """Without the graph so far that torch.export prints when it fails, and what it logs then."""
    held = io.StringIO()
    loggers = [logging.getLogger(name) for name in ("torch.fx.experimental.symbolic_shapes", "torch.export._trace")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    has_dump = False
    try:
        with redirect_stderr(held):
            yield
    except Exception as error:
        has_dump = hasattr(error, "partial_fx_graph")
        raise
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
        if not has_dump:
            sys.stderr.write(held.getvalue())


def _traceback_text(error: Exception) -> str:
    import traceback

    return "".join(traceback.format_exception(type(error), error, error.__traceback__))
