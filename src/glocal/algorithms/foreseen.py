r"""The first layer's part of a projection g − Jᵀ (J Jᵀ)⁻¹ J g, without a product with the stored inputs in any step.

A first layer z = W x + b meets the task's own inputs x, and how they lie to the stored inputs, the rows of A, is known
before the first step. The layer takes k(x) = A x + 1 beside x, and C beside W, where C is 0 when an epoch begins:

    z = W x + C k(x) + b = (W + C A) x + (b + C 1).

Let G and g be the slopes of W and b. Then C's slope is Σ_batch δ k(x)ᵀ = G Aᵀ + g 1ᵀ: what this layer answers to its
stored inputs if G and g are its weight and bias, all that J g asks of them. And what Jᵀ c takes away, (c δ)ᵀ A from W
and (c δ)ᵀ 1 from b, is taken away from C as (c δ)ᵀ, as it is. So C never follows its own slope: it collects what is
owed to W and b, who get it after the epoch: W ← W + C A, b ← b + C 1.

A step multiplies by k(x), as wide as there are stored inputs, instead of by A there and back. With m of them, batches
of B and a layer of p inputs and q outputs that is 2 B m q multiplications for 2 m p q, and k(x) itself is B m p of
them, made once for all epochs. While a task is learnt its k(x) lie beside its inputs, m numbers each, once for all runs
of a seed; they are no part of what is remembered. Without a bias, k(x) = A x.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from glocal.curvature.jacobian import FactoredJacobian, product
from glocal.tree import Params


def first_layer(module: nn.Module, rows: FactoredJacobian) -> str | None:
    """The linear layer by which inputs enter a network, and by it alone, if there is one and rows are kept of it."""
    if module not in _FIRST:
        _FIRST[module] = next((name for name in rows.get("inputs", {}) if _enters_by(module, name)), None)
    return _FIRST[module]


_FIRST: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()


def _enters_by(module: nn.Module, name: str) -> bool:
    """Whether a layer is given the inputs as they are, however wide, and nothing else looks at them.

    So it is if the layer is handed the very tensor, and if, when it takes other numbers instead, always the same, the
    outputs are the same too, whatever the inputs. A network in training tells, in passes that draw the same numbers.
    """
    probe = copy.deepcopy(module).train()  # its statistics change
    layer = probe.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    like = layer.weight.detach()
    wide = _irregular(like, 4, layer.in_features + 5)
    outputs = []
    with torch.no_grad():
        for x in (wide, -30 * wide, torch.zeros_like(wide)):
            begun = copy.deepcopy(probe.state_dict())
            answer = _answer(probe, layer, x, wide[:, :-5])
            if answer is None:
                return False
            probe.load_state_dict(begun)
            outputs.append(answer)
    return all(answer.equal(outputs[0]) for answer in outputs)


def takes_flat(module: nn.Module, name: str, x: Tensor) -> bool:
    """Whether inputs of this shape reach the layer flattened as they are."""
    probe = copy.deepcopy(module).train()
    layer = probe.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        return _answer(probe, layer, x[:4], None) is not None


def _answer(module: nn.Module, layer: nn.Linear, x: Tensor, instead: Tensor | None) -> Tensor | None:
    """The outputs where the layer takes other inputs instead of x; None where it is not given x, or nothing works."""
    given: list[bool] = []

    def look(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        same = args[0].data_ptr() == x.data_ptr() and args[0].is_contiguous()
        given.append(same and args[0].shape == (x.shape[0], x[0].numel()))
        return None if instead is None else (instead,)

    handle = layer.register_forward_pre_hook(look)
    try:
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            torch.manual_seed(0)
            outputs: Tensor = module(x)
    except Exception:  # what cannot take such inputs fails, in whichever way
        return None
    finally:
        handle.remove()
    return outputs if given == [True] else None


def _irregular(like: Tensor, rows: int, columns: int) -> Tensor:
    """Numbers between 0 and 1 that nothing mistakes for each other."""
    return torch.arange(2, rows * columns + 2, dtype=like.dtype, device=like.device).sqrt().frac().view(rows, columns)


def pays(stored: Tensor, outputs: int, batch: int, epochs: int) -> bool:
    """Whether a task's steps are the cheaper for it."""
    m, p = stored.shape
    return m > 0 and 2 * p * outputs > 2 * batch * outputs + batch * p / epochs


def beside(x: Tensor, stored: Tensor, bias: bool) -> Tensor:
    """(x, k(x)) of every input."""
    x = x.flatten(1)
    return torch.cat([x, (x @ stored.mT).add_(int(bias))], 1)


def widened(params: Params, name: str, stored: Tensor) -> Params:
    """[W, 0] in W's place."""
    key = f"{name}.weight"
    return {**params, key: torch.cat([params[key], params[key].new_zeros(params[key].shape[0], stored.shape[0])], 1)}


def folded(params: Params, name: str, stored: Tensor) -> Params:
    """W + C A and b + C 1 in the place of [W, C] and b."""
    weight, owed = params[f"{name}.weight"].split([stored.shape[1], stored.shape[0]], 1)
    bias = params.get(f"{name}.bias")
    also = {} if bias is None else {f"{name}.bias": bias + owed.sum(1)}
    return {**params, f"{name}.weight": weight + product(owed, stored), **also}


def slopes(rows: FactoredJacobian, vector: Mapping[str, Tensor]) -> Params:
    """Of the layers that are wide now: what the stored inputs are answered, (q, n), the slope of C."""
    held = rows.get("inputs", {})
    wide = [n for n, a in held.items() if vector[f"{n}.weight"].shape[1] > a.shape[1]]
    return {n: vector[f"{n}.weight"][:, held[n].shape[1] :] for n in wide}
