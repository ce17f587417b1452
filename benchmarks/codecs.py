"""How small, how true and how fast every codec is, next to dense: ``python -m benchmarks codecs``.

Measured per codec and activation tensor: bytes per element (of a real payload), ratio to float32 and to
bfloat16, normalised squared error, cosine, and the median encode and decode times on one core. Three keys
stand for the paper's operator against ours: Top-1 % as ``topk-paper`` (int64 positions, float32 values) and
as ``topk`` (coded).

Tensors: ``normal`` (channel-scaled, 4 x 1024 x 768), ``gpt`` (the residual stream of a small GPT trained here
for a few steps, and its gradient), and, with ``--model FOLDER``, that of a Hugging Face causal language
model.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fusionllm import compress
from fusionllm.compress import Reference
from fusionllm.ir.codec import CodecSpec, parse_codec

#: Dense first: the others are read against it. ``tangent`` is measured on the gradient.
LADDER = (
    "identity", "cast", "cast:dtype=float16", "int8", "int8:block=64", "int4:block=64", "fp8", "hadamard",
    "hadamard:bits=2", "hadamard:bits=1", "outlier", "topk-paper:ratio=10", "topk:ratio=10",
    "topk:ratio=10,scope=row", "topk-paper:ratio=100", "topk:ratio=100", "topk:ratio=13,scope=row",
    "randomk:ratio=8", "zstd", "zstd(cast)", "klt:rate=1", "klt:rate=4", "klt-ec:rate=0.35", "klt-ec:rate=1",
    "klt-ec:rate=2", "klt-ec:rate=4", "tangent(hadamard:bits=2)", "tangent:bits=8(klt-ec:rate=0.35)",
)  # fmt: skip
_NAIVE, _CODED = "topk-paper:ratio=100", "topk:ratio=100"


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    """Median wall time of a call in milliseconds, after one call to warm up."""
    call()
    times_ms = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return statistics.median(times_ms)


def measure(spec: CodecSpec, x: Tensor, repeats: int, activation: Tensor | None = None) -> dict[str, Any]:
    """One codec on one float32 tensor: its fourth message, with klt's basis spread over its refresh."""
    forward = x if activation is None else activation
    state, memory = compress.init(spec, x.shape, "float32"), {}
    sizes = []
    for _ in range(4):
        before = state
        payload, state = compress.encode(x, before, reference=Reference(forward))
        data = b"".join(payload)
        memory = compress.remember(data, spec, x.shape, "float32", memory)
        sizes.append(len(data))
    reference = Reference(forward, memory=memory)
    decoded = compress.decode(data, spec, x.shape, "float32", reference=reference)
    num_bytes = len(data)
    if spec.core.name in ("klt", "klt-ec"):
        num_bytes += (sizes[0] - len(data)) // spec.core.integer("refresh")
    seen = compress.measure_distortion(x, decoded, num_bytes)
    encode_ms = median_ms(lambda: compress.encode(x, before, reference=reference), repeats)
    decode_ms = median_ms(lambda: compress.decode(data, spec, x.shape, "float32", reference=reference), repeats)
    dense_gb = x.numel() * 4 / 1e9
    return {
        "codec": str(spec),
        "bytes_per_element": num_bytes / x.numel(),
        "ratio_float32": seen.true_ratio,
        "ratio_bfloat16": seen.true_ratio / 2,
        "nmse": seen.nmse,
        "cosine": seen.cosine,
        "encode_ms": encode_ms,
        "decode_ms": decode_ms,
        "encode_gb_per_s": dense_gb / (encode_ms / 1e3),
        "decode_gb_per_s": dense_gb / (decode_ms / 1e3),
    }


def index_bits_over_entropy(x: Tensor) -> float:
    """Bits per position of the coded Top-1 % over the entropy of a random mask of that density."""
    spec = parse_codec(_CODED)
    payload, _ = compress.encode(x, compress.init(spec, x.shape, "float32"))
    kept = round(x.numel() / spec.number("ratio"))
    share = kept / x.numel()
    entropy_bits = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) * x.numel()
    return payload[1].nbytes * 8 / entropy_bits


def normal_tensor() -> Tensor:
    """float32 [4, 1024, 768], channels of unequal scale."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp(0.7 * torch.randn(768, generator=generator))
    return torch.randn(4, 1024, 768, generator=generator) * scale


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        batch, length, width = h.shape
        qkv = self.qkv(self.norm_1(h)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return h + self.down(functional.gelu(self.up(self.norm_2(h))))


def gpt_tensors(text: bytes, steps: int, *, width: int = 256, length: int = 128) -> tuple[Tensor, Tensor]:
    """Train a 4-layer byte GPT from scratch.

    The residual stream after layer 2 and its gradient, [32, 128, 256].
    """
    torch.manual_seed(0)
    embed, head = nn.Embedding(256, width), nn.Linear(width, 256)
    place = nn.Parameter(0.02 * torch.randn(length, width))
    blocks = nn.ModuleList([_Block(width, 4) for _ in range(4)])
    parameters = [*embed.parameters(), *head.parameters(), place, *blocks.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def loss_and_cut(batch: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(0, data.numel() - length - 1, (batch,))
        tokens = torch.stack([data[s : s + length + 1] for s in starts.tolist()])
        cut = blocks[1](blocks[0](embed(tokens[:, :-1]) + place))
        logits = head(blocks[3](blocks[2](cut)))
        return functional.cross_entropy(logits.reshape(-1, 256), tokens[:, 1:].reshape(-1)), cut

    for _ in range(steps):
        optimizer.zero_grad()
        loss_and_cut(8)[0].backward()
        optimizer.step()
    loss, cut = loss_and_cut(32)
    (gradient,) = torch.autograd.grad(loss, cut)
    return cut.detach(), gradient


def model_tensor(folder: str, text: bytes) -> Tensor:
    """The residual stream in the middle of a Hugging Face causal language model, float32 [4, 256, width]."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    try:
        tokens = AutoTokenizer.from_pretrained(folder)(text.decode(errors="ignore"))["input_ids"]
    except (OSError, ValueError):  # a folder without a tokenizer: bytes are tokens of every vocabulary
        tokens = list(text)
    ids = torch.tensor(tokens[: 4 * 256]).view(4, 256)
    with torch.no_grad():
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states
    middle: Tensor = hidden[len(hidden) // 2]
    return middle.float()


def run(argv: list[str]) -> dict[str, Any]:
    """Measure. Returns ``topk1_*`` keys and ``codecs``, a list of one record per tensor and codec."""
    parser = argparse.ArgumentParser(prog="benchmarks codecs", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="timed calls per codec; the median counts")
    parser.add_argument("--steps", type=int, default=60, help="training steps of the small GPT; 0 leaves it out")
    parser.add_argument("--text", type=Path, default=Path("docs"), help="file or folder whose bytes are the text")
    parser.add_argument("--model", help="folder of a Hugging Face causal language model")
    parser.add_argument("--codecs", nargs="*", default=list(LADDER), help="codecs in their text form")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    wide = normal_tensor()
    tensors: list[tuple[str, Tensor, Tensor | None]] = [("normal", wide, None)]
    text = _read_text(options.text) if options.steps or options.model else b""
    if options.steps:
        cut, gradient = gpt_tensors(text, options.steps)
        tensors += [("gpt", cut, None), ("gpt-gradient", gradient, cut)]
    if options.model:
        tensors.append((Path(options.model).name, model_tensor(options.model, text), None))
    records = []
    for name, x, activation in tensors:
        for codec in options.codecs:
            found = measure(parse_codec(codec), x, options.repeats, activation)
            records.append({"tensor": name, "num_elements": x.numel(), **found})
    return {**top_1_percent(wide, options.repeats), "codecs": records}


def top_1_percent(x: Tensor, repeats: int) -> dict[str, float]:
    """The paper's operator at 1 % of 3.1 M elements, naive and coded."""
    naive, coded = (measure(parse_codec(codec), x, max(5, repeats)) for codec in (_NAIVE, _CODED))
    return {
        "topk1_true_ratio": coded["ratio_float32"],
        "topk1_naive_true_ratio": naive["ratio_float32"],
        "topk1_index_bits_over_entropy": index_bits_over_entropy(x),
        "topk1_ms": coded["encode_ms"] + coded["decode_ms"],
    }


def _read_text(path: Path) -> bytes:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".md", ".txt", ".py"))
    text = b"\n".join(file.read_bytes() for file in files)
    if len(text) < 4096:
        raise SystemExit(f"{path}: {len(text)} bytes of text are too few, 4096 are needed; pass --text FILE_OR_FOLDER")
    return text


def table(result: dict[str, Any]) -> str:
    """Markdown for people."""
    lines = [
        f"Top-1 % of 3.1 M elements: {result['topk1_true_ratio']:.0f}x true "
        f"(naive {result['topk1_naive_true_ratio']:.0f}x), "
        f"positions {result['topk1_index_bits_over_entropy']:.3f} of the entropy, "
        f"encode + decode {result['topk1_ms']:.1f} ms on one core",
        "",
        "| tensor | codec | bytes/element | x float32 | x bfloat16 | NMSE | cosine | encode ms | decode ms "
        "| GB/s enc / dec |",
        "|" + "---|" * 10,
    ]
    for r in result["codecs"]:
        lines.append(
            f"| {r['tensor']} | `{r['codec']}` | {r['bytes_per_element']:.4f} | {r['ratio_float32']:.1f} | "
            f"{r['ratio_bfloat16']:.1f} | {r['nmse']:.2e} | {r['cosine']:.4f} | {r['encode_ms']:.1f} | "
            f"{r['decode_ms']:.1f} | {r['encode_gb_per_s']:.2f} / {r['decode_gb_per_s']:.2f} |"
        )
    return "\n".join(lines)
