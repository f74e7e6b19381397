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
them, made once for all epochs. Without a bias, k(x) = A x.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from glocal.curvature.jacobian import Rows, product
from glocal.tree import Params


def first_layer(module: nn.Module, rows: Rows) -> str:
    """The linear layer by which flat inputs enter a network, and by it alone; "" if rows are kept of no such layer."""
    if module not in _FIRST:
        names = [name for name, a in rows.get("inputs", {}).items() if a.dim() == 2]
        _FIRST[module] = next((name for name in names if _enters_by(module, name)), "")
    return _FIRST[module]


_FIRST: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def _enters_by(module: nn.Module, name: str) -> bool:
    """Whether more inputs, with weights of their own in this layer, change a network as a shift of its answer does.

    It is a matter of the network's structure: its own tensors and a few inputs tell. What cannot take wide inputs
    fails, in whichever way.
    """
    layer = module.get_submodule(name)
    tensors = {k: t.detach().double() if t.is_floating_point() else t for k, t in module.state_dict().items()}
    weight = tensors[f"{name}.weight"]
    x, more, further = (_irregular(weight, *s) for s in ((1, weight.shape[1]), (1, 5), (weight.shape[0], 5)))
    shifted = layer.register_forward_hook(lambda _, args, z: z + more @ further.mT)
    try:
        expected = functional_call(module, tensors, (x,))
    except Exception:
        return False
    finally:
        shifted.remove()
    try:
        wide = {**tensors, f"{name}.weight": torch.cat([weight, further], 1)}
        answer = functional_call(module, wide, (torch.cat([x, more], 1),))
    except Exception:
        return False
    return answer.shape == expected.shape and torch.allclose(answer, expected, rtol=1e-9)


def _irregular(like: Tensor, rows: int, columns: int) -> Tensor:
    """Numbers between 0 and 1 that nothing mistakes for each other."""
    return torch.arange(2, rows * columns + 2, dtype=like.dtype, device=like.device).sqrt().frac().view(rows, columns)


def pays(stored: Tensor, outputs: int, batch: int, epochs: int) -> bool:
    """Whether a task's steps are the cheaper for it."""
    m, p = stored.shape
    return m > 0 and 2 * p * outputs > 2 * batch * outputs + batch * p / epochs


def beside(x: Tensor, stored: Tensor, bias: bool) -> Tensor:
    """(x, k(x)) of every input."""
    x = x.flatten(1).to(stored.dtype)
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


def answers(rows: Rows, vector: Mapping[str, Tensor]) -> Params:
    """Of the layers that are wide now: what the stored inputs are answered, (q, n), the slope of C."""
    held = rows.get("inputs", {})
    wide = [n for n, a in held.items() if a.dim() == 2 and vector[f"{n}.weight"].shape[1] > a.shape[1]]
    return {n: vector[f"{n}.weight"][:, held[n].shape[1] :] for n in wide}
