"""Check that a network is what training takes it for: a function of its parameters, its buffers and its inputs.

Training calls one module for all runs, with every run's own parameters and buffers. What a network keeps elsewhere, and
hooks on parameters, would be lost without a word. So, before training, gradients of a few examples are compared with
those of plain PyTorch: `loss.backward()` with the network of a seed as it was made, on the CPU.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import vmap

from glocal import tree
from glocal.algorithms.baselines import SGD
from glocal.engine.cohort import CPU, Cohort, Member
from glocal.engine.loader import Loader
from glocal.errors import GlocalError, require
from glocal.inputs import evenly_spaced_indices
from glocal.networks.layer_calls import set_eval_mode
from glocal.rng import generator, global_generator, seeded_only
from glocal.tree import Params

EXAMPLES = 4
TOLERANCE, REPEATED = 0.01, 1e-4
"""Largest difference of a gradient from plain PyTorch's, and from the same pass again, relative to its norm."""
HOOKS = "Hooks on parameters, activation checkpointing and functions that hold layers do not work here: remove them"
OTHER_STATE = "What differs between seeds must be a parameter or a buffer (register_buffer)"


class NetworkCheck:
    """Gradients of the user's network, as plain PyTorch computes them, for the first and the last run of a cohort."""

    def __init__(self, cohort: Cohort, loader: Loader) -> None:
        """Compute them for some examples of the task that is loaded."""
        runs = sorted({0, len(cohort) - 1})
        members = tuple(Member(cohort.members[run].seed, 1.0, SGD()) for run in runs)
        self.cohort = replace(cohort, members=members, precision="fp32", device=CPU)
        self.training = not self.cohort.draws  # in training, plain PyTorch would draw other numbers
        groups = [next(g for g, part in enumerate(cohort.groups) if part.start <= run < part.stop) for run in runs]
        indices = evenly_spaced_indices(loader.examples, EXAMPLES).to(loader.device)
        batches = [loader.whole(group) for group in groups]
        self.x = torch.stack([self.cohort.transform.normalize(batch.x[indices].cpu()) for batch in batches])
        self.y = torch.stack([batch.y[indices].cpu() for batch in batches])
        self.expected = [self._plain_gradient(run) for run in range(len(runs))]
        params, self.buffers = self.cohort.initial()
        self.params = {k: p * _factors(p[0]) for k, p in params.items()}

    def _plain_gradient(self, run: int) -> Params | None:
        """Return the gradient by plain PyTorch; None if that fails, or is not finite."""
        network, x, y = self.cohort.network(self.cohort.members[run].seed), self.x[run], self.y[run]
        with torch.no_grad():
            for p in filter(lambda p: p.requires_grad, network.parameters()):
                p.mul_(_factors(p))
        network.train()
        name, tensors = type(network).__name__, dict((*network.named_parameters(), *network.named_buffers()))
        before, inputs = {k: t.detach().clone() for k, t in tensors.items()}, x.clone()

        def gradient(x: Tensor) -> Params:
            with torch.no_grad():
                for k, tensor in (*network.named_parameters(), *network.named_buffers()):
                    tensor.copy_(before[k])
            return self._backward(network, x, y)

        try:
            first = seeded_only(partial(gradient, inputs), f"the network {name}", "torch's global generator")
        except GlocalError:
            raise
        except Exception:  # training meets the error too, and reports it
            return None
        message = f"the network {name} changes its inputs in place, and with them the data: work on a copy, x.clone()."
        require(torch.equal(inputs, x), message)
        second: Params = {}
        if run == 0:
            with suppress(Exception):  # for example because a graph is kept, and passed through again
                second = gradient(x.clone())
            finite = all(g.isfinite().all() for g in first.values())
            require(
                not finite or (bool(second) and not _differing_names(second, first, REPEATED)),
                f"the network {name} gives different results for the same inputs, parameters and buffers: it keeps "
                "other state, or draws from a generator of its own. Runs would depend on each other. Keep state in "
                "buffers (register_buffer), and draw from torch's global generator.",
            )
        if not self.training:
            set_eval_mode(network)
            try:
                first = gradient(x.clone())
            except Exception:  # only training mode may have a gradient
                return None
        return first if all(g.isfinite().all() for g in first.values()) else None

    def _backward(self, network: nn.Module, x: Tensor, y: Tensor) -> Params:
        network.zero_grad()
        with global_generator(generator(0, "check")), torch.enable_grad():
            self.cohort.loss.per_sample(network(x), y).mean().backward()
        params = {k: p for k, p in network.named_parameters() if p.requires_grad}
        return {k: torch.zeros_like(p) if p.grad is None else p.grad.clone() for k, p in params.items()}

    def check_single_run(self) -> None:
        """Raise if a run that is trained alone would have another gradient."""
        model = self.cohort.model(vectorised=False)
        for run, advice in enumerate((HOOKS, OTHER_STATE)[: len(self.expected)]):
            buffers = tree.map_tree(torch.clone, tree.select(self.buffers, run))  # a pass may change them in place
            bound = model.bind(buffers, training=self.training)
            try:
                gradients = bound.grad(tree.select(self.params, run), self.x[run], self.y[run])
            except Exception:  # training meets the error too, and reports it
                return
            names = self._differing_names(gradients, run)
            require(
                not names,
                f"the network {type(model.module).__name__} is not a function of its parameters and buffers, as "
                f"training here needs it: its gradient by {names} differs from that of loss.backward(). {advice}.",
            )

    def check_vectorised(self) -> None:
        """Raise if runs that are trained together would have other gradients: torch's rules for `vmap` have gaps."""
        model = self.cohort.model(vectorised=True)
        embeddings = [m for m in model.module.modules() if isinstance(m, nn.Embedding) and m.weight.requires_grad]
        padded = any(m.padding_idx is not None for m in embeddings)
        require(not padded, "torch's rule for padding_idx trains the padding row of all runs but the first")
        if not any(self.expected):
            return
        leaves = {k: p.detach().requires_grad_() for k, p in self.params.items()}

        def loss(params: Params, buffers: Params, x: Tensor, y: Tensor) -> Tensor:
            return model.bind(buffers, training=self.training).loss(params, x, y)

        with torch.enable_grad():
            losses = vmap(loss)(leaves, tree.map_tree(torch.clone, self.buffers), self.x, self.y)
            inputs = list(leaves.values())
            gradients = torch.autograd.grad(losses.sum(), inputs, allow_unused=True, materialize_grads=True)
        for run in range(len(self.expected)):
            names = self._differing_names({k: g[run] for k, g in zip(leaves, gradients, strict=True)}, run)
            require(not names, f"the gradient by {names} is another one than that of a run alone")

    def _differing_names(self, gradients: Params, run: int) -> str:
        """Return the names of parameters whose gradients are not those of plain PyTorch."""
        expected = self.expected[run]
        names = [] if expected is None else _differing_names(gradients, expected, TOLERANCE)
        return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def _factors(p: Tensor) -> Tensor:
    """Return factors that move θ away from θ_0, so that a network that ignores the given parameters is noticed."""
    return (0.5 + 0.618 * torch.arange(p.numel(), dtype=torch.float32) % 1).to(p.dtype).view(p.shape)


def _differing_names(gradients: Params, expected: Params, tolerance: float) -> list[str]:
    """Return the names of the parameters whose gradients differ."""
    total_norm = torch.stack([g.double().square().sum() for g in expected.values()]).sum().sqrt()
    allowed = {k: tolerance * (g.double().norm() + total_norm / 100) for k, g in expected.items()}
    return [k for k, g in expected.items() if not (gradients[k].double() - g.double()).norm() <= allowed[k]]
