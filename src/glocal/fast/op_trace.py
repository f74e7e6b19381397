"""A function of tensors as the list of its operations, without the Python, autograd and `vmap` that found them.

A step of a small network is some fifty short operations, and most of its time goes to finding out which ones they are,
though they are the same at every step. So they are recorded once, by `make_fx`, tidied, and written down as one
straight Python function. It makes the same operations on the same numbers in the same order: results agree to the last
bit.

What a recording holds is decided at the time. A function that looks at its tensors' values to choose its way, or makes
results as long as there are values of some kind, cannot be recorded (an error); one that depends on anything else than
its arguments must not be.
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

SHAPED = {"ones_like", "zeros_like", "full_like", "new_zeros", "new_ones", "new_full"}
"""Operations that look at nothing but their argument's shape."""
MOST = 1 << 29
"""Bytes that may be held while a function is recorded. The time of larger ones goes elsewhere."""


def record(function: Function, example: Sequence[Tensor]) -> Function:
    """The recorded function, for arguments of the example's shapes and strides. The example itself is left alone."""
    from torch.fx.experimental.proxy_tensor import make_fx  # a second of imports, for those who need them

    if sum(t.nbytes for t in example) > MOST:
        raise RuntimeError(f"a function of more than {MOST} bytes of arguments is not recorded.")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        with Unseen():
            traced = make_fx(lambda given: function(given))([copied(t) for t in example])
        return Recording(traced, [copied(t) for t in example]).function


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides; a number that many places share is one there too."""
    tensor = tensor.detach()
    once = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
    return torch.empty_strided(once.shape, once.stride(), dtype=tensor.dtype).copy_(once).expand(tensor.shape)


class Unseen(TorchFunctionMode):
    """Refuses to hand out a tensor's numbers in ways that tracing does not notice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
            raise RuntimeError("a function that looks at its tensors' values cannot be recorded.")
        return func(*args, **(kwargs or {}))


class Recording:
    """The operations of a traced graph that are left when views met twice, constants and unused results are gone."""

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
        """Make every operation once, to see what comes out. All results are kept: no two live at one address."""
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
                if sum(sizes.values()) > MOST:
                    raise RuntimeError(f"a function of more than {MOST} bytes of results is not recorded.")
                where = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.is_conj(), value.is_neg())
                first = places.setdefault(where, node)
                if first is not node:
                    self._same[node] = first

    def _call(self, node: Node) -> Any:
        args: Any = map_arg(node.args, self._values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, self._values.__getitem__)
        if as_long_as_values_say(node, args):
            raise RuntimeError(f"{name_of(node)} makes as many results as there are values of some kind.")
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
        """Results that are always the same, and that nobody writes to or is given, are kept instead of made."""
        output = next(iter(reversed(self._traced.graph.nodes)))
        touched = {self._storage(n) for n in output.all_input_nodes}
        touched |= {self._storage(n) for node in self._calls for n in (written(node) or [node] * random(node))}
        self._constant: set[Node] = set()
        for node in self._calls:
            fixed = name_of(node) in SHAPED or all(n in self._constant for n in node.all_input_nodes)
            if fixed and isinstance(self._values[node], Tensor) and self._storage(node) not in touched | {0}:
                self._constant.add(node)

    def _storage(self, node: Node) -> int:
        value = self._values[node]
        return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0

    def _write(self) -> Function:
        """The function as text: a line an operation, each result forgotten after its last use."""
        output = next(iter(reversed(self._traced.graph.nodes)))
        needed: set[Node] = set()
        lines: list[str] = []
        for node in reversed(self._traced.graph.nodes):
            if node is output:
                used = self._used(node)
                lines.append(f"return {self._text(node.args[0])}")
            elif node.op == "call_function" and (node in needed or acts(node)):
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
        """The results that a call needs, made by calls or given."""
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
    """torch's own entry to an operation, a few times as quick to call as the operation's record."""
    name = getattr(getattr(target, "_schema", None), "name", "").removeprefix("aten::")
    for holder, kind in ((torch, BuiltinFunctionType), (torch.Tensor, MethodDescriptorType)):
        found = getattr(holder, name, None) if name else None
        if isinstance(found, kind):
            return found
    return None


def name_of(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(schema.name).split("::")[-1] if schema else node.target.__name__  # type: ignore[union-attr]


def written(node: Node) -> list[Node]:
    """The arguments that an operation writes to."""
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


def acts(node: Node) -> bool:
    """Whether an operation does more than to return something: it writes, draws, or checks and complains."""
    schema = getattr(node.target, "_schema", None)
    return bool(written(node)) or random(node) or (schema is not None and not schema.returns)


def as_long_as_values_say(node: Node, args: Any) -> bool:
    """Whether the shape of a result depends on values, and so on the step: what a mask picks, what is not zero."""
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    masks = (torch.bool, torch.uint8)
    return name_of(node) != "index" or any(index is not None and index.dtype in masks for index in args[1])
