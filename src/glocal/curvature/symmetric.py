"""Eigenvalues of symmetric matrices, where some of a cohort's may be beyond numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, rising, and eigenvectors as columns; all NaN where the matrix is not finite.

    `torch.linalg.eigh` raises then, and a run that has diverged would take the others of its cohort with it.
    """
    finite = matrix.isfinite().all()
    values, vectors = torch.linalg.eigh(torch.where(finite, matrix, 0.0))
    beyond = torch.where(finite, 0.0, torch.nan).to(matrix.dtype)
    return values + beyond, vectors + beyond
