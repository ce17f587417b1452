"""Families of models: captured, cut into three stages, trained some steps, against the eager model.

Each family twice: in float32 for the loss, in float64 for the updates that stochastic gradient descent makes, which are
the gradients (deep nets with batch norm are chaotic in float32). Every parameter and every buffer is compared.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import Any

import numpy as np
import torch

from benchmarks.families import FAMILIES, Inputs

STEPS, LR = 2, 0.05


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks capture", description=__doc__)
    parser.add_argument(
        "--family", action="append", choices=list(FAMILIES), help="only this; may be given several times"
    )
    parser.add_argument("--stages", type=int, default=3)
    args = parser.parse_args(argv)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    for name in args.family or FAMILIES:
        rows.append(_compare(name, args.stages))
        print(_line(rows[-1]), flush=True)
    torch.set_num_threads(before)
    good = [row for row in rows if not row["error"]]
    return {
        "families": len(rows),
        "failures": len(rows) - len(good),
        "max_rel_grad_diff_f64": max((row["rel_grad_diff_f64"] for row in good), default=None),
        "max_abs_loss_diff_f32": max((row["abs_loss_diff_f32"] for row in good), default=None),
        "operators": sorted({op for row in good for op in row["operators"]}),
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    return (
        f"{result['families']} families, {result['failures']} failures, {len(result['operators'])} operators; "
        f"largest relative difference of a gradient in float64 {result['max_rel_grad_diff_f64']:.2g}, "
        f"of a loss in float32 {result['max_abs_loss_diff_f32']:.2g}"
    )


def _line(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"{row['family']:18} FAILED: {row['error'][:300]}"
    return (
        f"{row['family']:18} {row['ops']:4} operators of {len(row['operators']):3} kinds  loss f32 "
        f"{row['abs_loss_diff_f32']:.1e}  gradient f64 {row['rel_grad_diff_f64']:.1e}  "
        f"{row['trainable']} of {row['params']} trained  {row['seconds']:.1f} s"
    )


def _compare(name: str, stages: int) -> dict[str, Any]:
    started = time.perf_counter()
    row: dict[str, Any] = {"family": name, "error": "", "operators": []}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row |= compare_family(name, torch.float32, stages)
            row["abs_loss_diff_f32"] = row.pop("loss_diff")
            row.pop("update_diff")
            wide = compare_family(name, torch.float64, stages)
            row["rel_grad_diff_f64"] = wide["update_diff"]
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
    return row | {"seconds": time.perf_counter() - started}


def compare_family(name: str, dtype: torch.dtype, stages: int) -> dict[str, Any]:
    """Capture a family's model and train it in stages and eagerly.

    Returns:
        ``loss_diff``: largest difference of a loss over the steps. ``update_diff``: of what the first step changed in
        a tensor, over the largest change in that tensor. ``ops``, ``operators``, ``params``, ``trainable``: counts.
    """
    from benchmarks.coded import CodedPipeline
    from fusionllm.capture.export import capture_module, loss_of
    from fusionllm.capture.portable import portable
    from fusionllm.compute import OptimConfig
    from fusionllm.estimate.flops import anchored_flops
    from fusionllm.schedule.partition import partition_graph

    module, inputs = FAMILIES[name]()
    module = module.to(dtype)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    captured = capture_module(module, inputs)
    graph = captured.graph
    optim = OptimConfig(name="sgd", lr=LR, schedule="constant")
    symbols = dict.fromkeys(graph.symbols, len(next(iter(inputs.values()))))
    boundaries = partition_graph(graph, stages, "equal-compute", symbols, costs=anchored_flops(graph, symbols))
    pipeline = CodedPipeline(captured, optim, STEPS, boundaries)
    batches = _halves(inputs)
    eager = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=LR)
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    start = {n: t.clone() for n, t in pipeline.state().items()}
    loss_diff = update_diff = 0.0
    for step in range(STEPS):
        ours = pipeline.train_step(step, [{k: v.numpy() for k, v in batch.items()} for batch in batches])
        theirs = 0.0
        with portable(module):
            for batch in batches:
                loss = loss_of(module(**batch)) * (len(next(iter(batch.values()))) / len(next(iter(inputs.values()))))
                loss.backward()
                theirs += loss.item()
        eager.step()
        eager.zero_grad()
        loss_diff = max(loss_diff, abs(ours - theirs))
        if step == 0:
            for tensor_name, tensor in pipeline.state().items():
                theirs_now = own.get(tensor_name, start[tensor_name])  # a constant of the code stays
                update_diff = max(update_diff, _relative(tensor, theirs_now, start[tensor_name]))
    return {
        "loss_diff": loss_diff, "update_diff": update_diff, "ops": len(graph.ops),
        "operators": sorted({op.name for op in graph.ops}), "params": len(graph.params),
        "trainable": sum(p.trainable for p in graph.params.values()),
    }  # fmt: skip


def _halves(inputs: Inputs) -> list[Inputs]:
    """Two microbatches of unequal size."""
    rows = len(next(iter(inputs.values())))
    cut = rows // 2
    return [{k: v[:cut] for k, v in inputs.items()}, {k: v[cut:] for k, v in inputs.items()}]


def _relative(ours: torch.Tensor, theirs: torch.Tensor, start: torch.Tensor) -> float:
    if not ours.is_floating_point():
        return 0.0 if torch.equal(ours, theirs) else float(np.inf)
    change = (theirs.detach() - start).abs().max().item() if start.numel() else 0.0
    diff = (ours - theirs.detach()).abs().max().item() if start.numel() else 0.0
    return diff / change if change else diff
