r"""Curvature of any network's loss: Hessian products, eigenpairs, traces, spectra, Gauss–Newton and Fisher matrices.

Every function takes a network, a loss and data: any `nn.Module`; a loss of torch or a function (outputs, y); and a
DataLoader, a Dataset or a pair of tensors.

>>> import torch
>>> from torch import nn
>>> from torch.utils.data import DataLoader, TensorDataset
>>> from glocal.curvature import density, diagonal, eigenpairs, ggn_operator, hessian, hessian_operator, trace
>>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(), nn.Linear(8, 2))
>>> loader = DataLoader(TensorDataset(torch.randn(50, 4), torch.arange(50) % 2), batch_size=10)
>>> loss = nn.CrossEntropyLoss()

>>> top = eigenpairs(model, loss, loader, k=3)
>>> top.values.shape, top.vectors.shape  # 58 parameters
(torch.Size([3]), torch.Size([3, 58]))
>>> trace(model, loss, loader)  # an estimate, with its standard error
Estimate(value=tensor(..., dtype=torch.float64), error=tensor(..., dtype=torch.float64))
>>> density(model, loss, loader).count_above(1e-3).value  # how many eigenvalues are larger in magnitude
tensor(..., dtype=torch.float64)
>>> diagonal(model, loss, loader)["0.bias"].shape  # of the Gauss–Newton matrix, here the Fisher matrix
torch.Size([8])

The loss is that of all of the data, with the network in evaluation mode. Vectors are flat, in the order of the
trainable `model.parameters()`, or dicts with their names:

>>> H = hessian_operator(model, loss, loader)
>>> torch.allclose(H @ top.vectors[0], top.values[0] * top.vectors[0], atol=1e-5)
True
>>> direction = {name: torch.ones_like(p) for name, p in model.named_parameters()}
>>> (H @ direction)["0.weight"].shape
torch.Size([8, 4])
>>> torch.allclose(H @ top.vectors[0], hessian(model, loss, loader) @ top.vectors[0], atol=1e-5)  # the dense matrix
True

An operator can be used in place of the three arguments, here the Gauss–Newton matrix:

>>> bool((eigenpairs(ggn_operator(model, loss, loader), k=3).values > 0).all())
True

A `Risk` can, too. It holds the network, the loss and the data, so that they are read and checked only once:

>>> from glocal.curvature import ggn, network_risk
>>> risk = network_risk(model, loss, loader)
>>> H, G = hessian(risk), ggn(risk)

| function | returns |
|---|---|
| `eigenpairs` | the top k eigenvalues and eigenvectors, by Lanczos's method |
| `trace`, `density` | estimates of the trace and of the spectrum |
| `hessian_operator`, `ggn_operator`, `functional_operator` | operators, used as `H @ v` |
| `hessian`, `ggn`, `functional_hessian` | the same as dense matrices |
| `diagonal`, `kronecker_factors` | the diagonal and the Kronecker factors of the Gauss–Newton matrix |
| `dense_jacobian` | the per-sample gradients of outputs: `every_output`, `label_output` or `mean_output` |
"""

from glocal.curvature.diagonal import diagonal
from glocal.curvature.hessian import functional_hessian, ggn, hessian, to_dense
from glocal.curvature.jacobian import dense_jacobian, every_output, label_output, mean_output
from glocal.curvature.kronecker import kronecker_factors, kronecker_product
from glocal.curvature.lanczos import Eigenpairs, eigenpairs
from glocal.curvature.network import network_risk
from glocal.curvature.operators import Operator, functional_operator, ggn_operator, hessian_operator
from glocal.curvature.spectrum import Density, Estimate, density, random_signs, trace
from glocal.risk import Risk

__all__ = [
    "Density",
    "Eigenpairs",
    "Estimate",
    "Operator",
    "Risk",
    "dense_jacobian",
    "density",
    "diagonal",
    "eigenpairs",
    "every_output",
    "functional_hessian",
    "functional_operator",
    "ggn",
    "ggn_operator",
    "hessian",
    "hessian_operator",
    "kronecker_factors",
    "kronecker_product",
    "label_output",
    "mean_output",
    "network_risk",
    "random_signs",
    "to_dense",
    "trace",
]
