"""`fusionllm graph`: a model's OP-DAG in numbers, as JSON, as Graphviz, or as text."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fusionllm.ir.graph import OpGraph, encode_graph
from fusionllm.units import format_count, format_num_bytes


def show_graph(model: str, batch: int, seq_len: int, sets: list[str], form: str) -> None:
    """Capture ``model`` and print it. Raises UserError, CaptureError."""
    graph = _capture(model, seq_len, sets)
    if form == "dot":
        sys.stdout.write(to_dot(graph))
    elif form == "text":
        from fusionllm.ir.text import graph_to_text

        sys.stdout.write(graph_to_text(graph))
    else:
        summary = summarise(graph, batch)
        if form == "json":
            print(json.dumps(summary))
        else:
            _print_table(model, summary)


def _capture(model: str, seq_len: int, sets: list[str]) -> OpGraph:
    import torch

    from fusionllm.api.config import load_config
    from fusionllm.api.prepare import prepare
    from fusionllm.capture.export import capture_module
    from fusionllm.capture.sources import resolve_model

    if model.endswith(".toml"):
        path = Path(model)
        return prepare(load_config(path, sets), path.parent.resolve()).captured.graph
    config = load_config(None, [f"model.config.{text}" for text in sets], {"model": {"source": model}})
    source = resolve_model(config.model, base_dir=Path.cwd(), seed=0)
    if source.vocab_size is not None:
        length = min(seq_len, source.max_seq_len or seq_len)
        tokens = torch.arange(2 * length).reshape(2, length) % source.vocab_size
        example = {"input_ids": tokens, "labels": tokens}
    else:
        example = source.example_inputs
    return capture_module(source.module, example, mode="train").graph


def summarise(graph: OpGraph, batch: int) -> dict[str, Any]:
    """The graph in numbers, for ``batch`` rows."""
    from fusionllm.estimate.flops import graph_costs
    from fusionllm.ir.cuts import anchored_ops, list_cuts

    symbols = dict.fromkeys(graph.symbols, batch)
    costs = graph_costs(graph, symbols)
    cuts = list_cuts(graph, symbols)
    single = [c for c in cuts if len(c.values) == 1]
    return {
        "hash": graph.content_hash(),
        "ops": len(graph.ops),
        "distinct_ops": len({op.name for op in graph.ops}),
        "anchored_ops": len(anchored_ops(graph)),
        "op_counts": dict(Counter(op.name for op in graph.ops).most_common()),
        "params": graph.num_params,
        "param_bytes": sum(p.spec.num_bytes({}) for p in graph.params.values()),
        "tied": {name: list(p.aliases) for name, p in graph.params.items() if p.aliases},
        "batch": batch,
        "forward_flops": sum(c.flops for c in costs),
        "activation_bytes": sum(c.output_bytes for c in costs),
        "cuts": len(cuts),
        "single_tensor_cuts": len(single),
        "smallest_cut_bytes": min((c.num_bytes for c in cuts), default=0),
        "single_tensor_cut_bytes": sorted({c.num_bytes for c in single}),
        "json_bytes": len(encode_graph(graph)),
    }


def _print_table(model: str, summary: dict[str, Any]) -> None:
    table = Table(title=f"{model}: OP-DAG {summary['hash'][:12]}", show_header=False)
    rows = [
        ("operators", f"{summary['ops']}, {summary['distinct_ops']} kinds"),
        ("parameters", f"{format_count(summary['params'])} ({format_num_bytes(summary['param_bytes'])})"),
        ("tied", ", ".join(f"{k} = {', '.join(v)}" for k, v in summary["tied"].items()) or "none"),
        (f"forward, {summary['batch']} rows", f"{format_count(summary['forward_flops'])}FLOP"),
        ("activations", format_num_bytes(summary["activation_bytes"])),
        ("cuts", f"{summary['cuts']}, {summary['single_tensor_cuts']} of them cross one tensor"),
        ("smallest cut", format_num_bytes(summary["smallest_cut_bytes"])),
        ("most frequent", ", ".join(f"{k} {n}" for k, n in list(summary["op_counts"].items())[:6])),
    ]
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def to_dot(graph: OpGraph) -> str:
    """The graph in Graphviz's language: one box per operator, one edge per value."""
    maker = {out: f"op{i}" for i, op in enumerate(graph.ops) for out in op.outs}
    lines = ["digraph opdag {", "  node [shape=box, fontname=monospace, fontsize=9];"]
    for value in graph.inputs:
        maker[value.id] = f"in_{len(maker)}"
        lines.append(f"  {maker[value.id]} [label={json.dumps(value.id)}, shape=ellipse];")
    for i, op in enumerate(graph.ops):
        lines.append(f"  op{i} [label={json.dumps(f'{op.name} -> {op.specs[0]}')}];")
        lines += [f"  {maker[ref]} -> op{i};" for ref in dict.fromkeys(op.refs()) if ref in maker]
    return "\n".join([*lines, "}", ""])
