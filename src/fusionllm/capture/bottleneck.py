"""Low-rank cuts of a job: where they go in a model, what of a trained one becomes an ordinary model, and export.

Decides and checks; the layers themselves are in `cut_layers`. On the path between the model's source and its capture,
and again from a trained model to its Hugging Face folder. Three ends:

- fixed cuts merge into the weights, to the last bits of float32;
- learned cuts annealed away are dropped, and nothing changes;
- learned cuts that stay are exported with the source of `cut_layers` as the folder's own modelling file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusionllm.capture import cut_layers
from fusionllm.capture.cut_layers import NAME, Subspace, attach
from fusionllm.capture.options import BottleneckConfig
from fusionllm.errors import UserError

#: What adds to the residual stream, by the names that architectures with a fixed subspace give it.
_WRITERS = {"gpt2": ("attn.c_proj", "mlp.c_proj"), "llama": ("self_attn.o_proj", "mlp.down_proj")}
_DROPOUTS = ("resid_pdrop", "embd_pdrop")
#: Frozen embeddings are larger than trained ones begin: they are all that tells tokens apart outside the subspace.
_FROZEN_SCALE = {"tokens": 15.0, "places": 5.0}
_FILE = "modeling_bottleneck"
_SUFFIX = "-bottleneck"
_KEY = "bottleneck_plan"


def notice(config: BottleneckConfig) -> str:
    """One sentence for whoever creates the job: what it does to the model and to its export. Empty for none."""
    if not config.rank:
        return ""
    what = f"the model is trained with {config.cuts} {config.kind} low-rank cuts of {config.rank} channels"
    if config.kind == "fixed":
        return f"{what}: its embeddings stay frozen; it is exported as an ordinary model"
    if config.anneal:
        return f"{what}, which open over {config.anneal} forwards: after those it is exported as an ordinary model"
    return f"{what}, which stay part of it: its export needs its own modelling file (trust_remote_code)"


def add_bottlenecks(module: nn.Module, config: BottleneckConfig, *, pretrained: bool = False) -> None:
    """Attach the cuts of a config to a model. ``pretrained``: its weights mean something already.

    Raises:
        UserError: the model has no layers to cut between, or the config does not fit it.
    """
    plan = _plan(module, config)
    if config.kind == "fixed":
        if pretrained:
            raise UserError(
                "model.bottleneck.kind = 'fixed' confines the weights of a pretrained model to a subspace, which "
                "destroys it; use kind = 'learned', or init = 'random'"
            )
        _check_fixed(module)
        with torch.no_grad():
            for table, scale in _FROZEN_SCALE.items():
                if plan[table]:
                    module.get_parameter(f"{plan[table]}.weight").mul_(scale)
    attach(module, plan)
    _bottlenecks(module).plan = plan


def _plan(module: nn.Module, config: BottleneckConfig) -> dict[str, Any]:
    """What `cut_layers.attach` needs to know, as plain JSON."""
    lists = {name: child for name, child in module.named_modules() if isinstance(child, nn.ModuleList)}
    layers = max(lists, key=lambda name: len(lists[name]), default="")
    count = len(lists[layers]) if layers else 0
    if not 1 <= config.cuts < count:
        raise UserError(
            f"model.bottleneck.cuts is {config.cuts}; {type(module).__name__} has {count} layers, "
            f"so there can be 1 to {max(0, count - 1)}"
        )
    tables = {name: child for name, child in module.named_modules() if isinstance(child, nn.Embedding)}
    tokens = next(iter(tables), None)
    hidden = getattr(getattr(module, "config", None), "hidden_size", None)
    width = hidden or (tables[tokens].embedding_dim if tokens else 0)
    if not 1 <= config.rank < width:
        raise UserError(f"model.bottleneck.rank is {config.rank}; the model's width is {width}, choose less than that")
    limit = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    places = next((n for n, t in tables.items() if n != tokens and t.num_embeddings == limit), None)
    family = getattr(getattr(module, "config", None), "model_type", "")
    return {
        "kind": config.kind, "rank": config.rank, "width": width, "anneal": config.anneal, "embed": config.embed,
        "after": [f"{layers}.{round(count * k / (config.cuts + 1)) - 1}" for k in range(1, config.cuts + 1)],
        "tokens": tokens, "places": places,
        "writers": [f"{layers}.{k}.{name}" for k in range(count) for name in _WRITERS.get(family, ())],
    }  # fmt: skip


def _check_fixed(module: nn.Module) -> None:
    """What the stream is made of must be known: frozen embeddings, and what the writers add, unchanged."""
    config = getattr(module, "config", None)
    family = getattr(config, "model_type", type(module).__name__)
    if family not in _WRITERS:
        raise UserError(f"model.bottleneck.kind = 'fixed' knows {', '.join(_WRITERS)}, not {family}; use 'learned'")
    for name in _DROPOUTS:
        if getattr(config, name, 0.0):
            raise UserError(
                f"model.bottleneck.kind = 'fixed' needs model.config.{name} = 0: dropout leaves the subspace"
            )
    if getattr(config, "tie_word_embeddings", False):
        raise UserError(
            "model.bottleneck.kind = 'fixed' freezes the embeddings; set model.config.tie_word_embeddings = false, so "
            "that the head is trained"
        )


def _bottlenecks(module: nn.Module) -> Any:
    return module.get_submodule(NAME)


def plan_of(module: nn.Module) -> dict[str, Any] | None:
    """The plan of a model's cuts, or None for a model without."""
    return getattr(getattr(module, NAME, None), "plan", None)


def is_open(module: nn.Module) -> bool:
    """True when learned cuts have been annealed away: the model computes the same without them."""
    plan = plan_of(module)
    return bool(plan and plan["anneal"]) and all(float(c.forwards) >= c.anneal for c in _bottlenecks(module))


def without_bottlenecks(module: nn.Module) -> nn.Module:
    """A model of the same class that computes the same, without the cuts. For a Hugging Face model.

    Raises UserError for learned cuts that are not annealed away.
    """
    plan, model_any = plan_of(module), module
    if plan is None:
        return module
    if plan["kind"] == "learned" and not is_open(module):
        raise UserError("the model's low-rank cuts still carry its stream, so it cannot be written without them")
    state = {name: tensor for name, tensor in module.state_dict().items() if not name.startswith(NAME + ".")}
    if plan["kind"] == "fixed":
        _merge(state, _bottlenecks(module), plan, module)
    kind: Any = type(model_any)
    with torch.random.fork_rng(devices=[]):
        plain: nn.Module = kind(model_any.config)
    plain.load_state_dict(state)
    return plain.train(module.training)


@torch.no_grad()
def _merge(state: dict[str, torch.Tensor], space: Subspace, plan: dict[str, Any], module: nn.Module) -> None:
    """Project what writes into the subspace, and add the trained part of the embedding to the frozen one."""
    basis = space.basis.double()
    for writer in plan["writers"]:
        for name in (f"{writer}.weight", f"{writer}.bias"):
            if name not in state:
                continue
            tensor = state[name].double()
            # An nn.Linear has outputs by inputs, GPT-2's Conv1D inputs by outputs.
            first = tensor.dim() == 2 and isinstance(module.get_submodule(writer), nn.Linear)
            outs_last = tensor.t() if first else tensor
            projected = outs_last @ basis @ basis.t()
            state[name] = (projected.t() if first else projected).to(state[name].dtype).contiguous()
    table = f"{plan['tokens']}.weight"
    state[table] = (state[table].double() + space.tokens.weight.double() @ basis.t()).to(state[table].dtype)


def save_with_bottlenecks(module: nn.Module, folder: Path) -> None:
    """Write a Hugging Face folder that brings its own modelling file. Raises UserError for a class of one's own."""
    module_any: Any = module
    kind, config_kind = type(module), type(module_any.config)
    if not kind.__module__.startswith("transformers."):
        raise UserError(f"{kind.__name__} is no class of transformers; anneal the cuts away to export its folder")
    module_any.save_pretrained(folder)
    path = folder / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["model_type"] += _SUFFIX
    raw["architectures"] = ["BottleneckModel"]
    raw["auto_map"] = {
        "AutoConfig": f"{_FILE}.BottleneckModelConfig",
        "AutoModelForCausalLM": f"{_FILE}.BottleneckModel",
    }
    raw[_KEY] = plan_of(module)
    path.write_text(json.dumps(raw, indent=2), encoding="utf-8")
    source = Path(cut_layers.__file__).read_text(encoding="utf-8")
    classes = _CLASSES.format(config=config_kind.__name__, model=kind.__name__, kind=raw["model_type"], key=_KEY)
    (folder / f"{_FILE}.py").write_text(source + classes, encoding="utf-8")


_CLASSES = """

from transformers import {config}, {model}  # noqa: E402


class BottleneckModelConfig({config}):
    model_type = "{kind}"


class BottleneckModel({model}):
    config_class = BottleneckModelConfig

    def __init__(self, config):
        super().__init__(config)
        attach(self, config.{key})
"""


def read_saved(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Take what `save_with_bottlenecks` added out of a config.json, in place; returns the plan or None."""
    plan = raw.pop(_KEY, None)
    if plan is None:
        return None
    raw["model_type"] = str(raw["model_type"]).removesuffix(_SUFFIX)
    for key in ("auto_map", "architectures"):
        raw.pop(key, None)
    return dict(plan)


def load_saved(module: nn.Module, folder: Path) -> None:
    """Weights of the cuts from a folder that has them. Raises UserError when they are of another shape."""
    from safetensors import safe_open

    own = {n: t for n, t in module.state_dict(keep_vars=True).items() if n.startswith(NAME + ".")}
    with torch.no_grad():
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in own.keys() & set(file.keys()):
                    tensor = file.get_tensor(name)
                    if tensor.shape != own[name].shape:
                        raise UserError(
                            f"{path} has {name} of shape {list(tensor.shape)}, model.bottleneck makes it "
                            f"{list(own[name].shape)}; keep the rank and the number of cuts"
                        )
                    own[name].copy_(tensor)
