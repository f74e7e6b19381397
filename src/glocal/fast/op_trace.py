"""Trace a function of tensors into a flat list of operations, without the Python, autograd and `vmap` around them.

A step of a small network is some fifty short operations, and most of its time goes to finding out which ones they are,
though they are the same at every step. `make_fx` traces them once; constants, repeated views and unused results are
removed, and the rest is written as one straight Python function. It runs the same operations on the same numbers in the
same order, so results agree bit by bit.

A trace fixes everything that is decided in Python. A function that reads values of its tensors, or whose result shapes
depend on values, cannot be traced (an error); one that depends on anything but its arguments must not be.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node
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
            traced = make_fx(lambda given: function(given))([copy_with_strides(t) for t in example])
        return Trace(traced, [copy_with_strides(t) for t in example]).function


def copy_with_strides(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides; expanded dimensions stay expanded."""
    tensor = tensor.detach()
    once = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
    return torch.empty_strided(once.shape, once.stride(), dtype=tensor.dtype).copy_(once).expand(tensor.shape)


class ForbidDataAccess(TorchFunctionMode):
    """Raise where a function reads values of a tensor in a way that tracing does not notice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
            raise RuntimeError("a function that reads its tensors' values cannot be traced.")
        return func(*args, **(kwargs or {}))


class Trace:
    """A traced graph without repeated views, constants and unused results."""

    def __init__(self, traced: torch.fx.GraphModule, example: list[Tensor]) -> None:
        self._traced = traced
        self._known: dict[str, Any] = {}  # what the function's text refers to, by name
        self._same: dict[Node, Node] = {}  # a node and the earlier one that is the same tensor
        self._values: dict[Node, Any] = {}
        self._calls: dict[Node, Callable[..., Any]] = {}
        self._run(example)
        self._fold()
        self.function = self._write()

    def _run(self, example: list[Tensor]) -> None:
        """Run every operation once and keep all results, so that no two share an address."""
        places: dict[Hashable, Node] = {}
        sizes: dict[int, int] = {}
        given = iter(example)
        for node in self._traced.graph.nodes:
            if node.op == "placeholder":
                value: Any = next(given)
            elif node.op == "get_attr":
                value = getattr(self._traced, node.target)
            elif node.op == "output":
                continue
            else:
                value = self._call(node)
            self._values[node] = value
            if isinstance(value, Tensor) and value.numel():
                sizes[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
                if sum(sizes.values()) > MAX_TRACED_BYTES:
                    raise RuntimeError(f"a function of more than {MAX_TRACED_BYTES} bytes of results is not traced.")
                where = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg())
                first = places.setdefault(where, node)
                if first is not node:
                    self._same[node] = first

    def _call(self, node: Node) -> Any:
        args: Any = map_arg(node.args, self._values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, self._values.__getitem__)
        if has_dynamic_shape(node, args):
            raise RuntimeError(f"{name_of(node)} has a result whose shape depends on values.")
        direct = binding(node.target)
        if direct is not None:
            try:
                value = direct(*args, **kwargs)
                self._calls[node] = direct
                return value
            except TypeError:  # the binding takes its arguments in another way
                pass
        self._calls[node] = node.target  # type: ignore[assignment]
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _fold(self) -> None:
        """Mark results that never change and are neither mutated nor returned: they are computed once."""
        output = next(iter(reversed(self._traced.graph.nodes)))
        touched = {self._storage(n) for n in output.all_input_nodes}
        touched |= {self._storage(n) for node in self._calls for n in (mutated(node) or [node] * random(node))}
        self._constant: set[Node] = set()
        for node in self._calls:
            fixed = name_of(node) in SHAPE_ONLY_OPS or all(n in self._constant for n in node.all_input_nodes)
            if fixed and isinstance(self._values[node], Tensor) and self._storage(node) not in touched | {0}:
                self._constant.add(node)

    def _storage(self, node: Node) -> int:
        value = self._values[node]
        return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0

    def _write(self) -> Function:
        """Return the compiled function: one line per operation, each result released after its last use."""
        output = next(iter(reversed(self._traced.graph.nodes)))
        needed: set[Node] = set()
        lines: list[str] = []
        for node in reversed(self._traced.graph.nodes):
            if node is output:
                used = self._used(node)
                lines.append(f"return {self._text(node.args[0])}")
            elif node.op == "call_function" and (node in needed or has_side_effects(node)):
                used = self._used(node)
                arguments = [self._text(a) for a in node.args]
                arguments += [f"{k}={self._text(a)}" for k, a in node.kwargs.items()]
                forgotten = "".join(f"; {n} = None" for n in sorted(n.name for n in used - needed))
                called = self._refer(f"f_{name_of(node)}", self._calls[node])
                lines.append(f"{node.name} = {called}({', '.join(arguments)}){forgotten}")
            else:
                continue
            needed |= used
        names = ", ".join(n.name for n in self._traced.graph.nodes if n.op == "placeholder")
        text = "\n    ".join([f"def replay(given):\n    {names}, = given", *reversed(lines)])
        exec(text, self._known)
        return self._known["replay"]

    def _used(self, node: Node) -> set[Node]:
        """Return the nodes that a call reads, without constants."""
        used = {self._same.get(n, n) for n in node.all_input_nodes}
        return {n for n in used if n not in self._constant and n.op != "get_attr"}

    def _text(self, argument: Any) -> str:
        if isinstance(argument, Node):
            node = self._same.get(argument, argument)
            if node in self._constant or node.op == "get_attr":
                return self._refer(node.name, self._values[node])
            return node.name
        if isinstance(argument, (list, tuple)):
            inside = ", ".join(self._text(a) for a in argument)
            return f"[{inside}]"
        if argument is None or isinstance(argument, (bool, int)):
            return repr(argument)
        return self._refer(f"c_{type(argument).__name__}", argument)

    def _refer(self, name: str, value: Any) -> str:
        while self._known.setdefault(name, value) is not value:
            name += "_"
        return name


def binding(target: Any) -> Callable[..., Any] | None:
    """Return torch's own binding of an operation, a few times faster to call than the `OpOverload`."""
    name = getattr(getattr(target, "_schema", None), "name", "").removeprefix("aten::")
    for holder, kind in ((torch, BuiltinFunctionType), (torch.Tensor, MethodDescriptorType)):
        found = getattr(holder, name, None) if name else None
        if isinstance(found, kind):
            return found
    return None


def name_of(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(schema.name).split("::")[-1] if schema else node.target.__name__  # type: ignore[union-attr]


def mutated(node: Node) -> list[Node]:
    """Return the arguments that an operation mutates."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    given = {a.name: value for a, value in zip(schema.arguments, node.args, strict=False)} | node.kwargs
    found: list[Node] = []
    for argument in schema.arguments:
        if argument.alias_info and argument.alias_info.is_write:
            map_arg(given.get(argument.name), found.append)
    return found


def random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def has_side_effects(node: Node) -> bool:
    """Return whether an operation mutates, draws random numbers, or only checks its arguments."""
    schema = getattr(node.target, "_schema", None)
    return bool(mutated(node)) or random(node) or (schema is not None and not schema.returns)


def has_dynamic_shape(node: Node, args: Any) -> bool:
    """Return whether the shape of the result depends on values, as with a mask or `nonzero`."""
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    masks = (torch.bool, torch.uint8)
    return name_of(node) != "index" or any(index is not None and index.dtype in masks for index in args[1])
