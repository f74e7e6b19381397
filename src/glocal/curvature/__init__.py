r"""Curvature of a risk L(θ): operators, matrices, Jacobians, Kronecker factors, eigenpairs, spectra and traces.

Everything starts from a `Risk`, which holds a network, its parameters, a data set and a loss.

>>> import torch
>>> from glocal.curvature import eigenpairs, ggn, hessian, hessian_operator, random_signs, trace
>>> from glocal.losses import CrossEntropy
>>> from glocal.risk import Risk
>>> module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double().eval()
>>> params = {name: p.detach() for name, p in module.named_parameters()}
>>> x, y = torch.randn(50, 4).double(), torch.arange(50) % 2
>>> risk = Risk(module, params, {}, x, y, CrossEntropy())

Products need no matrix, and vectors are flat or dicts shaped as θ:

>>> H = hessian_operator(risk)
>>> v = torch.randn(risk.num_params).double()
>>> torch.allclose(H @ v, hessian(risk) @ v)
True

The top eigenpairs by Lanczos's method, the trace by Hutch++, and the Gauss–Newton matrix:

>>> top = eigenpairs(risk, k=2)
>>> torch.allclose(H @ top.vectors[0], top.values[0] * top.vectors[0])
True
>>> probes = random_signs(16, risk.num_params, torch.Generator().manual_seed(0), torch.float64)
>>> torch.allclose(trace(H, probes).value, hessian(risk).trace())
True
>>> bool(torch.linalg.eigvalsh(ggn(risk)).min() > -1e-12)
True
"""

from glocal.curvature.diagonal import diagonal
from glocal.curvature.hessian import functional_hessian, ggn, hessian, to_dense
from glocal.curvature.jacobian import dense_jacobian, every_output, jacobian, jvp_and_vjp, label_output, mean_output
from glocal.curvature.kronecker import kronecker_factors, kronecker_product, nearest_kronecker
from glocal.curvature.lanczos import Eigenpairs, eigenpairs, lanczos
from glocal.curvature.operators import Operator, functional_operator, ggn_operator, hessian_operator
from glocal.curvature.spectrum import Density, Estimate, density, exact_density, random_signs, trace

__all__ = [
    "Density",
    "Eigenpairs",
    "Estimate",
    "Operator",
    "dense_jacobian",
    "density",
    "diagonal",
    "eigenpairs",
    "every_output",
    "exact_density",
    "functional_hessian",
    "functional_operator",
    "ggn",
    "ggn_operator",
    "hessian",
    "hessian_operator",
    "jacobian",
    "jvp_and_vjp",
    "kronecker_factors",
    "kronecker_product",
    "label_output",
    "lanczos",
    "mean_output",
    "nearest_kronecker",
    "random_signs",
    "to_dense",
    "trace",
]
