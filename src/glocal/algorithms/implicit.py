r"""Implicit steps for quadratic penalties.

An explicit step on a quadratic with the Hessian P diverges if η λ_max(P) > 2, wherever θ is. An implicit step minimises
the penalty q exactly and the loss L to first order:

    θ' = argmin  L(θ) + ∇L(θ)·(θ' − θ) + q(θ') + ‖θ' − θ‖² / (2 η)  =  θ − η (I + η P)⁻¹ (∇L(θ) + ∇q(θ)).

The system is solved in the eigenbasis of P, which is found once per task.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from glocal.algorithms.algorithm import Batch, Memory
from glocal.algorithms.hessian_structures import Diagonal, SumOfHessians
from glocal.curvature.kronecker import kronecker_product
from glocal.curvature.lanczos import eigh_or_nan
from glocal.networks.model import Model
from glocal.tree import Params, Tree, map_tree


@dataclass(frozen=True)
class QuadraticPenalty(SumOfHessians):
    """Base class: a penalty with the Hessian λ Σ_o H_o, by explicit or implicit steps."""

    penalty: float = 1.0
    """λ, the weight of the finished tasks' quadratic."""
    implicit: bool = False
    """Solve for the penalty implicitly in every step, θ ← θ − η (I + η λ H)⁻¹ g, which keeps the penalty, not the loss,
    stable at every learning rate of SGD, with or without momentum. Adam is refused."""

    @property
    def scales_gradients(self) -> bool:  # type: ignore[override]
        return self.implicit

    def _weight(self, memory: Memory) -> float | Tensor:
        """Return the factor of Σ_o H_o in the penalty's Hessian."""
        return self.penalty

    def direction(self, model: Model, grads: Params, params: Params, memory: Memory, batch: Batch) -> Params:
        if "eigen" not in memory:
            return grads
        assert batch.lr is not None
        return solve(memory["eigen"], grads, batch.lr * self._weight(memory))

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        memory = super().consolidate(model, params, memory, data)
        if not self.implicit:
            return memory
        diagonal = isinstance(self._structure(params), Diagonal)
        return memory | {"eigen": eigenbasis({"diagonal": memory["hessian"]} if diagonal else memory["hessian"])}


def eigenbasis(factors: Tree) -> Tree:
    """Return the rotations into the eigenbasis of a matrix of Kronecker products, and its eigenvalues.

    Diagonal parts need no rotation. Eigenvalues that rounding made negative become 0.
    """
    basis: Tree = {"values": dict(factors.get("diagonal", {}))}
    for name, block in factors.get("kronecker", {}).items():
        (a, left), (g, right) = (_eigh(block[kind]) for kind in ("A", "G"))
        basis.setdefault("kronecker", {})[name] = {"A": left, "G": right.mT.contiguous()}
        basis["values"][name] = g.unsqueeze(-1) * a
    return basis


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = eigh_or_nan(matrix.double())
    return values.clamp(min=0).to(matrix.dtype), vectors.to(matrix.dtype)


def solve(basis: Tree, vector: Params, weight: Tensor) -> Params:
    """Return (I + weight · H)⁻¹ v, for H in its eigenbasis."""
    values = basis["values"]
    result = {k: v / (1 + weight * values[k]) for k, v in vector.items() if k in values}
    rotations: Tree = {"kronecker": basis.get("kronecker", {})}
    scaled = kronecker_product(rotations, {k: v for k, v in vector.items() if k not in values})
    for name in rotations["kronecker"]:
        weights, bias = scaled[f"{name}.weight"], f"{name}.bias"
        columns = weights.flatten(1).shape[-1]
        divisor = 1 + weight * values[name]
        scaled[f"{name}.weight"] = (weights.flatten(1) / divisor[:, :columns]).reshape(weights.shape)
        if divisor.shape[-1] > columns:
            scaled[bias] = scaled[bias] / divisor[:, -1]
    result |= kronecker_product(map_tree(lambda leaf: leaf.mT, rotations), scaled)
    return {k: result[k] for k in vector}
