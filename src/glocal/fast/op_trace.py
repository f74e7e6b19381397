"""Trace a function of tensors into a flat list of operations, without the Python, autograd and `vmap` around them.

A step of a small network is some fifty short operations, and most of its time goes to finding out which ones they are,
though they are the same at every step. `make_fx` traces them once, and constants, repeated views and unused results are
removed from its graph. The rest are the same operations on the same numbers in the same order, so results agree bit by
bit.

A trace fixes everything that is decided in Python. A function that reads values of its tensors, or whose result shapes
depend on values, cannot be traced (an error); one that depends on anything but its arguments must not be.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

Function: TypeAlias = Callable[[Sequence[Tensor]], list[Tensor]]

SHAPE_ONLY_OPS = {"ones_like", "zeros_like", "full_like", "new_zeros", "new_ones", "new_full"}
"""Operations that depend on the shape of their argument alone."""
MAX_TRACED_BYTES = 1 << 29
"""Limit on the memory held while tracing; functions of larger tensors do not gain from it."""


def trace(function: Function, example: Sequence[Tensor]) -> Function:
    """Return the traced function, for arguments of the example's shapes and strides; the example is not changed."""
    from torch.fx.experimental.proxy_tensor import make_fx  # a second of imports, for those who need them

    if sum(t.nbytes for t in example) > MAX_TRACED_BYTES:
        raise RuntimeError(f"a function of more than {MAX_TRACED_BYTES} bytes of arguments is not traced.")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        with ForbidDataAccess():
            traced = make_fx(lambda arguments: function(arguments))([copy_with_strides(t) for t in example])
        _simplify(traced, [copy_with_strides(t) for t in example])
    return lambda arguments: traced.forward(*arguments)


def copy_with_strides(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides; expanded dimensions stay expanded."""
    tensor = tensor.detach()
    base = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
    return torch.empty_strided(base.shape, base.stride(), dtype=tensor.dtype).copy_(base).expand(tensor.shape)


class ForbidDataAccess(TorchFunctionMode):
    """Raise where a function reads values of a tensor in a way that tracing does not notice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__):
            raise RuntimeError("a function that reads its tensors' values cannot be traced.")
        return func(*args, **(kwargs or {}))


def _simplify(traced: GraphModule, example: list[Tensor]) -> None:
    """Remove repeated views, constants and unused results from a traced graph, and call torch's own bindings."""
    graph = traced.graph
    values = _run(traced, example)
    calls = [node for node in graph.nodes if node.op == "call_function"]

    def storage(node: Node) -> int:
        value = values[node]
        return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0

    # Constants: results that never change and are neither mutated nor returned. They are computed once.
    touched = {0, *map(storage, graph.output_node().all_input_nodes)}
    touched |= {storage(n) for node in calls for n in (mutated(node) or [node] * random(node))}
    constant: set[Node] = set()
    for node in calls:
        fixed = name_of(node) in SHAPE_ONLY_OPS or all(n in constant for n in node.all_input_nodes)
        if fixed and storage(node) not in touched:
            constant.add(node)
    places: dict[Hashable, Node] = {}
    for node, value in values.items():
        if node in constant:
            traced.__dict__[f"constant_{node.name}"] = value  # a plain attribute is quicker to read than a buffer
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.create_node("get_attr", f"constant_{node.name}"))
        elif isinstance(value, Tensor) and value.numel():
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg())
            first = places.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
    graph.eliminate_dead_code(has_side_effects)
    for node in graph.nodes:
        node.target = node.meta.get("binding", node.target)
    graph.set_codegen(CodeGen())  # tensors as arguments, and a list of them as the result
    traced.recompile()


def _run(traced: GraphModule, example: list[Tensor]) -> dict[Node, Any]:
    """Run every operation once and return all results, so that no two share an address."""
    values: dict[Node, Any] = {}
    sizes: dict[int, int] = {}
    inputs = iter(example)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "get_attr":
            values[node] = getattr(traced, node.target)
        elif node.op == "call_function":
            values[node] = _call(node, values)
        value = values.get(node)
        if isinstance(value, Tensor):
            sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            if sum(sizes.values()) > MAX_TRACED_BYTES:
                raise RuntimeError(f"a function of more than {MAX_TRACED_BYTES} bytes of results is not traced.")
    return values


def _call(node: Node, values: dict[Node, Any]) -> Any:
    """Run an operation, by torch's own binding if that takes the same arguments."""
    args: Any = map_arg(node.args, values.__getitem__)
    kwargs: Any = map_arg(node.kwargs, values.__getitem__)
    if has_dynamic_shape(node, args):
        raise RuntimeError(f"{name_of(node)} has a result whose shape depends on values.")
    direct = binding(node.target)
    if direct is not None:
        try:
            value = direct(*args, **kwargs)
            node.meta["binding"] = direct
            return value
        except TypeError:
            pass
    return node.target(*args, **kwargs)  # type: ignore[operator]


def binding(target: Any) -> Callable[..., Any] | None:
    """Return torch's own binding of an operation, a few times faster to call than the `OpOverload`."""
    name = getattr(getattr(target, "_schema", None), "name", "").removeprefix("aten::")
    for holder, kind in ((torch, BuiltinFunctionType), (torch.Tensor, MethodDescriptorType)):
        candidate = getattr(holder, name, None) if name else None
        if isinstance(candidate, kind):
            return candidate
    return None


def name_of(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(schema.name).split("::")[-1] if schema else node.target.__name__  # type: ignore[union-attr]


def mutated(node: Node) -> list[Node]:
    """Return the arguments that an operation mutates."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    arguments = {a.name: value for a, value in zip(schema.arguments, node.args, strict=False)} | node.kwargs
    nodes: list[Node] = []
    for argument in schema.arguments:
        if argument.alias_info and argument.alias_info.is_write:
            map_arg(arguments.get(argument.name), nodes.append)
    return nodes


def random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def has_side_effects(node: Node) -> bool:
    """Return whether an operation mutates, draws random numbers, or only checks its arguments."""
    schema = getattr(node.target, "_schema", None)
    checks = schema is not None and not schema.returns
    return node.op in ("placeholder", "output") or bool(mutated(node)) or random(node) or checks


def has_dynamic_shape(node: Node, args: Any) -> bool:
    """Return whether the shape of the result depends on values, as with a mask or `nonzero`."""
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    masks = (torch.bool, torch.uint8)
    return name_of(node) != "index" or any(index is not None and index.dtype in masks for index in args[1])
