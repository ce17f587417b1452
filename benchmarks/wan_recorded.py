"""Recorded activations: what a real model sends at a cut, for nodes whose compute is modelled.

Codecs live off what they are given: zeros or noise would flatter or wrong them. A recording is an ``.npz`` of
``activation`` and ``gradient``, [rows, channels] each, of the same tokens at the same cut, in float16. A boundary that
is wider is put together of blocks of channels, each from other tokens: every block has the real channels' statistics,
and no block repeats another, which a codec of low rank would live off.

    python -m benchmarks wan-record --out FILE                  # of a GPT trained for it here, from scratch
    python -m benchmarks wan-record --model FOLDER --out FILE   # of a Hugging Face folder
"""

from __future__ import annotations

import argparse
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
DEFAULT = ROOT / ".cache" / "wan-activation.npz"
KINDS = ("activation", "gradient")
SEQ_LEN, ROWS_PER_STEP = 128, 4
#: Microbatches that get tensors of their own; later ones get theirs again.
DISTINCT = 4


class Recorded:
    """A recording, cut and put together to any shape."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays
        self.tensor = lru_cache(maxsize=8 * DISTINCT)(self._tensor)

    def _tensor(self, kind: str, shape: tuple[int, ...], index: int) -> np.ndarray:
        """float32 of ``shape``: [..., channels], or [B, heads, T, channels of a head].

        Args:
            index: of the microbatch, below ``DISTINCT``.

        Raises:
            ValueError: the recording has fewer tokens than the tensor.
        """
        if len(shape) == 4:
            rows, heads, tokens, channels = shape
            whole = self.tensor(kind, (rows, tokens, heads * channels), index)
            return np.ascontiguousarray(whole.reshape(rows, tokens, heads, channels).swapaxes(1, 2))
        rows_NC = self._arrays[kind]
        tokens, width = prod(shape[:-1]), shape[-1]
        num_rows, channels = rows_NC.shape
        if tokens > num_rows:
            raise ValueError(f"the recording has {num_rows} tokens, a microbatch {tokens}; record more with --rows")
        blocks = -(-width // channels)
        first = index * (num_rows // DISTINCT)
        starts = [first + block * num_rows // blocks for block in range(blocks)]
        parts = [rows_NC.take(range(start, start + tokens), 0, mode="wrap") for start in starts]
        return np.concatenate(parts, axis=1)[:, :width].astype(np.float32).reshape(shape)


def load_recorded(path: Path) -> Recorded:
    """Read a recording. Raises SystemExit for a file that is none."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {kind: file[kind] for kind in KINDS}
    except (OSError, KeyError, ValueError) as error:
        raise SystemExit(f"{path} is no recording ({error}); make one with: python -m benchmarks wan-record") from None
    one, other = arrays.values()
    if one.ndim != 2 or one.shape != other.shape or not (np.isfinite(one).all() and np.isfinite(other).all()):
        raise SystemExit(f"{path}: activation and gradient must be finite, [rows, channels], of one shape")
    return Recorded(arrays)


def record(model: str, num_rows: int, steps: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Activation and its gradient after the middle block, [rows, channels] in float16.

    Args:
        model: a Hugging Face folder, or empty for a small GPT-2 that is trained here.
        steps: of that training.
    """
    import torch

    from benchmarks.plain import plain_optimizer
    from fusionllm.api.config import build_config
    from fusionllm.api.prepare import open_model

    torch.set_num_threads(1)
    data = ROOT / "examples" / "data"
    small = {
        "n_layer": 4, "n_head": 6, "n_embd": 384, "n_positions": SEQ_LEN, "vocab_size": 2048, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    tokenizer = str(Path(model, "tokenizer.json") if model else data / "tokenizer.json")
    config, dataset, source = open_model(
        build_config({
            "run": {"seed": seed}, "model": {"source": model} if model else {"source": "gpt2", "config": small},
            "data": {"source": str(data / "shakespeare.txt"), "tokenizer": tokenizer, "seq_len": SEQ_LEN},
            "optimizer": {"name": "adamw", "lr": 1e-3, "schedule": "constant"},
        }), Path.cwd(),
    )  # fmt: skip
    module = source.module
    held: list[torch.Tensor] = []
    blocks = middle_blocks(module)

    def keep(_: Any, __: Any, out: Any) -> None:
        tensor = out[0] if isinstance(out, tuple) else out
        tensor.retain_grad()
        held.append(tensor)

    optimizer = plain_optimizer(config.optimizer, module)
    found: dict[str, list[np.ndarray]] = {kind: [] for kind in KINDS}
    train_steps = 0 if model else steps
    for step in range(train_steps + -(-num_rows // (SEQ_LEN * ROWS_PER_STEP))):
        batch = dataset.microbatches(step, global_batch=ROWS_PER_STEP, microbatch_size=ROWS_PER_STEP)[0]
        hook = blocks[len(blocks) // 2].register_forward_hook(keep) if step >= train_steps else None
        module(**{name: torch.from_numpy(array) for name, array in batch.items()}).loss.backward()
        if hook is None:
            optimizer.step()
        else:
            hook.remove()
            tensor = held.pop()
            assert tensor.grad is not None
            for kind, values in zip(KINDS, (tensor.detach(), tensor.grad)):
                found[kind].append(values.flatten(0, 1).float().numpy())
        optimizer.zero_grad()
    joined = {kind: np.concatenate(parts)[:num_rows] for kind, parts in found.items()}
    joined["gradient"] /= np.abs(joined["gradient"]).max()  # a scale that float16 holds; codecs see none
    return {kind: rows.astype(np.float16) for kind, rows in joined.items()}


def middle_blocks(module: Any) -> Any:
    """The longest list of modules of a model: its blocks. Raises SystemExit where there is none."""
    import torch

    lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList)]
    if not lists:
        raise SystemExit("this model has no list of blocks to record after")
    return max(lists, key=len)


def ensure_recorded(path: Path) -> Path:
    """The file; the default one is made when it is missing."""
    if not path.exists() and path == DEFAULT:
        save(path, record("", 4096, 100))
    return path


def save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def run(argv: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks wan-record", description=__doc__)
    parser.add_argument("--model", default="", help="a Hugging Face folder with tokenizer.json; empty: a GPT made here")
    parser.add_argument("--out", type=Path, default=DEFAULT)
    parser.add_argument("--rows", type=int, default=4096, help="tokens to record")
    parser.add_argument("--steps", type=int, default=100, help="of training, of a GPT made here")
    args = parser.parse_args(argv)
    arrays = record(args.model, args.rows, args.steps)
    save(args.out, arrays)
    return {"out": str(args.out), "shape": list(arrays["activation"].shape), "num_bytes": args.out.stat().st_size}


def table(result: dict[str, Any]) -> str:
    rows, channels = result["shape"]
    return f"{result['out']}: {rows} tokens of {channels} channels, {result['num_bytes'] / 1e6:.1f} MB"
