"""A linear layer whose result does not depend on how many runs are computed beside it."""

from __future__ import annotations

from torch import Tensor, nn


class Linear(nn.Linear):
    """z = x Wᵀ + b as a product and then a sum.

    The fused `addmm` of `nn.Linear` folds the bias into the blocks of the product, and its mapped form does not: the
    two round differently, and a thousand steps through ReLUs make that visible. Unfused, one run alone and the same run
    in a cohort agree to the last bit on a CPU (with `MKL_CBWR=AUTO,STRICT`, which `import glocal` asks for).
    """

    def forward(self, x: Tensor) -> Tensor:
        z = self.weight @ x.mT  # in this order a stacked weight's gradient comes out contiguous
        return z.mT if self.bias is None else (z + self.bias.unsqueeze(-1)).mT
