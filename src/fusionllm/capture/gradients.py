"""What a model says about gradients, kept through export: ``no_grad`` regions, ``detach_``, its own backward functions.

Making a program functional drops the first two without a word, and tracing goes through the third and past hooks on
gradients, so each would train something else than the model. Here the first two become plain detaches, and the others
are refused. Sits between
torch.export and `normalise`.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from fusionllm.capture.normalise import user_line
from fusionllm.errors import CaptureError

_REGION = "wrap_with_set_grad_enabled"


def keep_detached(program: Any) -> None:
    """Detach, in place, what a ``no_grad`` region of an exported program reads, and write ``detach_`` as ``detach``.

    Raises:
        CaptureError: gradients are switched on again inside such a region.
    """
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    plain = {name for name, kind in kinds.items() if kind is not InputKind.PARAMETER}
    _walk(program.graph_module, plain, inside=False)


def _walk(module: Any, plain: set[str], inside: bool) -> None:
    """One (sub)graph. ``plain``: names of its placeholders that carry no gradient. ``inside``: of a no_grad region."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten.detach_.default:
            node.target = torch.ops.aten.detach.default
            continue
        children = [getattr(module, arg.target) for arg in node.args if _is_graph(arg)]
        is_region = getattr(node.target, "_name", "") == _REGION
        if is_region and node.args[0] and inside:
            raise CaptureError("the model switches gradients on inside a no_grad region; move that part out of it")
        off = inside or (is_region and not node.args[0])
        if is_region and off and not inside:
            node.args = tuple(_detached(module, node, arg, plain) for arg in node.args)
        for child in children:
            _walk(child, set(), off)
    module.recompile()


def _is_graph(arg: Any) -> bool:
    return isinstance(arg, torch.fx.Node) and arg.op == "get_attr"


def _detached(module: Any, node: Any, arg: Any, plain: set[str]) -> Any:
    if not isinstance(arg, torch.fx.Node) or arg.op == "get_attr" or arg.name in plain:
        return arg
    value = arg.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return arg
    with module.graph.inserting_before(node):
        made = module.graph.call_function(torch.ops.aten.detach.default, (arg,))
    made.meta = dict(node.meta) | {"val": value}
    return made


def refuse_hooks(module: torch.nn.Module) -> None:
    """Raises CaptureError for a hook on gradients of the module; hooks on a forward are part of it, and captured."""
    for name, child in module.named_modules():
        for hook in (*child._backward_hooks.values(), *child._backward_pre_hooks.values()):
            raise _hooked(f"the module {name or 'itself'} ({type(child).__name__})", hook)
    for name, parameter in module.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            for hook in (getattr(parameter, kind, None) or {}).values():
                raise _hooked(f"the parameter {name}", hook)


def _hooked(what: str, hook: Any) -> CaptureError:
    return CaptureError(
        f"{what} has a hook on its gradient, {getattr(hook, '__qualname__', type(hook).__name__)}, which no graph can "
        "hold; remove it, and change the gradient by operators and .detach(), e.g. x * s + (x - x * s).detach()"
    )


@contextmanager
def refuse_own_backward() -> Iterator[None]:
    """Within it, calling a ``torch.autograd.Function`` or hooking a tensor's gradient raises CaptureError.

    Export would forget the backward of the one and the hook of the other.
    """

    def refuse_hook(self: torch.Tensor, hook: Any) -> Any:
        where = user_line("".join(traceback.format_stack())) or "a line outside the model"
        raise _hooked(f"a tensor at {where}", hook)

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ == "torch._library.autograd":  # a torch.library operator: it keeps its backward in the graph
            return held.__get__(None, cls)(*args, **kwargs)
        raise CaptureError(
            f"the model uses {cls.__module__}.{cls.__qualname__}, an autograd.Function with its own backward, which "
            "no graph can hold; write it with operators and .detach(), e.g. x + (x.round() - x).detach()"
        )

    function: Any = torch.autograd.Function
    held = function.__dict__["apply"]
    function.apply = classmethod(refuse)
    tensor: Any = torch.Tensor
    held_hook, tensor.register_hook = tensor.register_hook, refuse_hook
    try:
        yield
    finally:
        function.apply, tensor.register_hook = held, held_hook
