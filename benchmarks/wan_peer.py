"""What we are measured against on the wide-area network, each rank a process on its host: torch's own pipeline over
gloo with the model cut by hand, DiLoCo, one host alone. Prints a JSON line per step.

``python -m benchmarks.wan_peer MODE OPTIONS.json RANK`` with MODE ``pipeline``, ``diloco``, ``one-host`` or
``evaluate``. The model, the data, their order and the optimizer are those of our own rows, from the same configuration.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.plain import plain_optimizer
from benchmarks.wan_meter import BACKWARD, FORWARD, Meter
from benchmarks.wan_padded import PaddedCut
from fusionllm.api.config import RunConfig, build_config
from fusionllm.api.prepare import open_model

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9  # DiLoCo (Douillard et al. 2023), Nesterov


class HandCut(torch.nn.Module):
    """Some of a GPT-2's blocks, with embedding or head at the ends: [B, T] or [B, T, D] -> [B, T, D] or [B, T, V]."""

    def __init__(self, model: Any, rank: int, size: int, boundary: torch.dtype, precision: str) -> None:
        super().__init__()
        body, blocks = model.transformer, list(model.transformer.h)
        each = -(-len(blocks) // size)
        self.first, self.last = rank == 0, rank == size - 1
        self.blocks = torch.nn.ModuleList(blocks[rank * each : (rank + 1) * each])
        if self.first:
            self.wte, self.wpe = body.wte, body.wpe
        if self.last:
            self.ln_f, self.lm_head = body.ln_f, model.lm_head
        self._boundary, self._autocast = boundary, precision == "bfloat16"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            if self.first:
                x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
            x = x.float()
            for block in self.blocks:
                x = block(x)
            if self.last:
                return self.lm_head(self.ln_f(x)).float()
        return x.to(self._boundary)


def next_token_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """As transformers' causal models have it: token t is predicted from those before."""
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())


class Peer:
    """One rank: the configuration, its data, its optimizer."""

    def __init__(self, options: dict[str, Any], rank: int) -> None:
        self.options, self.rank = options, rank
        self.config: RunConfig = build_config(options["config"])
        torch.set_num_threads(1)
        self.config, self.data, source = open_model(self.config, Path.cwd())
        self.model = source.module
        self.size = len(options["addresses"])

    def join(self) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = self.options["device"]
        where = f"tcp://{self.options['addresses'][0]}:{self.options['port']}"
        dist.init_process_group("gloo", init_method=where, rank=self.rank, world_size=self.size)

    def optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        return plain_optimizer(self.config.optimizer, module)

    def batches(self, step: int) -> list[dict[str, torch.Tensor]]:
        train = self.config.train
        found = self.data.microbatches(step, global_batch=train.global_batch, microbatch_size=train.microbatch_size)
        return [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in found]

    def timed(self, do_step: Callable[[int], float], steps: int) -> Iterator[float]:
        for step in range(steps):
            start = time.perf_counter()
            loss = do_step(step)
            seconds = time.perf_counter() - start
            print(json.dumps({"type": "step", "step": step + 1, "loss": loss, "seconds": seconds}), flush=True)
            yield seconds

    def save(self, module: torch.nn.Module) -> None:
        """This rank's tensors by the whole model's names."""
        held = {id(t) for t in module.parameters()}
        state = {name: t for name, t in self.model.named_parameters() if id(t) in held}
        torch.save(state, Path(self.options["folder"], f"rank{self.rank}.pt"))

    def whole_step(self, optimizer: torch.optim.Optimizer, batches: list[dict[str, torch.Tensor]]) -> float:
        """A step of the whole model over ``batches``; the mean loss."""
        total = 0.0
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.config.train.precision == "bfloat16"):
                loss = self.model(**batch).loss / len(batches)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total


def pipeline(peer: Peer) -> None:
    """1F1B of torch.distributed.pipelining, the boundary in float32 or bfloat16."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    peer.join()
    boundary = torch.bfloat16 if peer.options["boundary"] == "bfloat16" else torch.float32
    padding_s = tuple(peer.options["padding_s"][peer.rank]) if peer.options["padding_s"] else ()
    if padding_s:
        module: torch.nn.Module = PaddedCut(peer.model, peer.rank, peer.size, boundary, padding_s)
    else:
        module = HandCut(peer.model, peer.rank, peer.size, boundary, peer.config.train.precision)
    optimizer = peer.optimizer(module)
    stage = PipelineStage(module, peer.rank, peer.size, torch.device("cpu"))
    meter = Meter(str(Path(peer.options["folder"], f"rank{peer.rank}.work")))
    stage.forward_one_chunk = meter.around(FORWARD, stage.forward_one_chunk)
    stage.backward_one_chunk = meter.around(BACKWARD, stage.backward_one_chunk)
    schedule = Schedule1F1B(stage, n_microbatches=peer.config.num_microbatches, loss_fn=next_token_loss)

    def do_step(step: int) -> float:
        batches = peer.batches(step)
        losses: list[torch.Tensor] = []
        if peer.rank == 0:
            schedule.step(torch.cat([batch["input_ids"] for batch in batches]))
        elif peer.rank == peer.size - 1:
            schedule.step(target=torch.cat([batch["labels"] for batch in batches]), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        return float(sum(loss.item() for loss in losses) / max(1, len(losses)))

    for _ in peer.timed(do_step, peer.config.train.steps):
        pass
    peer.save(module)
    dist.barrier()
    os._exit(0)  # gloo's own end waits for peers that are gone already


def diloco(peer: Peer) -> None:
    """Every host has the whole model and its share of each batch; measures inner steps and one exchange.

    The exchange is real: outer gradients summed over all hosts, then the outer optimizer.
    """
    peer.join()
    optimizer = peer.optimizer(peer.model)
    params = list(peer.model.parameters())
    anchor = [p.detach().clone() for p in params]
    outer = torch.optim.SGD(anchor, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    inner = list(peer.timed(
        lambda step: peer.whole_step(optimizer, peer.batches(step)[peer.rank :: peer.size]), peer.config.train.steps
    ))  # fmt: skip
    dist.barrier()
    start = time.perf_counter()
    flat = torch.cat([(old - new.detach()).flatten() for old, new in zip(anchor, params)])
    dist.all_reduce(flat)
    for old, part in zip(anchor, (flat / peer.size).split([p.numel() for p in params])):
        old.grad = part.view_as(old)
    outer.step()
    with torch.no_grad():
        for new, old in zip(params, anchor):
            new.copy_(old)
    exchange_s = time.perf_counter() - start
    skip = peer.options["skip"]
    result = {"inner_s": median(inner[skip:]), "exchange_s": exchange_s}
    Path(peer.options["folder"], f"rank{peer.rank}.json").write_text(json.dumps(result))
    print(json.dumps({"type": "exchange", "seconds": exchange_s}), flush=True)
    if peer.rank == 0:
        peer.save(peer.model)
    dist.barrier()
    os._exit(0)


def one_host(peer: Peer) -> None:
    """The whole model on one host."""
    optimizer = peer.optimizer(peer.model)
    for _ in peer.timed(lambda step: peer.whole_step(optimizer, peer.batches(step)), peer.config.train.steps):
        pass
    peer.save(peer.model)


def evaluate(peer: Peer) -> None:
    """The validation loss of what the ranks saved."""
    for path in Path(peer.options["folder"]).glob("rank*.pt"):
        peer.model.load_state_dict(torch.load(path, weights_only=True), strict=False)
    train, losses = peer.config.train, []
    batches = list(peer.data.val_batches(train.microbatch_size, train.eval_batches or None))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=train.precision == "bfloat16"):
        for batch in batches:
            inputs = {name: torch.from_numpy(array) for name, array in batch.items()}
            out = peer.model(**inputs)
            losses.append((getattr(out, "loss", out).item(), len(inputs["labels"])))
    print(json.dumps({"val_loss": sum(loss * rows for loss, rows in losses) / sum(rows for _, rows in losses)}))


MODES = {"pipeline": pipeline, "diloco": diloco, "one-host": one_host, "evaluate": evaluate}


def main(words: list[str]) -> None:
    """``MODE OPTIONS.json RANK``."""
    MODES[words[0]](Peer(json.loads(Path(words[1]).read_text()), int(words[2])))


def prepare(options: dict[str, Any]) -> None:
    """In the process that ranks are forked from."""
    import torch.distributed.pipelining

    torch.set_num_threads(1)


if __name__ == "__main__":
    main(sys.argv[1:])
