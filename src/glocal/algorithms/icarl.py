r"""iCaRL (§5.2, §6.1): exemplars of every class, distillation of the last network, nearest-mean classifier. Local.

With C the classes so far, f_c the outputs, σ the sigmoid and H(q, f) = −q log σ(f) − (1 − q) log σ(−f),

    obj_t(θ) = mean over D_t ∪ S of (1/|C|) Σ_{c ∈ C} H(q_c, f_c(x, θ)),

where S are the exemplars, q_c = σ(f_c(x, θ_{t−1})) for classes of finished tasks and q_c = 1[y = c] for classes of the
current task.

Exemplars are chosen by herding: of a class with features φ_1, …, φ_n and mean μ, without replacement,

    p_k = argmin_i ‖ μ − (1/k) ( φ_i + Σ_{j<k} φ_{p_j} ) ‖ = argmin_i ‖ ( k μ − Σ_{j<k} φ_{p_j} ) − φ_i ‖,

ties going to the smallest index. The list is nested: its first m entries are the choice of m exemplars.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from glocal import rng
from glocal.algorithms.algorithm import Algorithm, Approximation, Batch, Bounds, Locality, Memory
from glocal.algorithms.replay_buffer import take
from glocal.challenges.challenge import Setting
from glocal.errors import require
from glocal.networks.model import Model
from glocal.tree import Params

UNKNOWN_LOGIT = -1e30
"""Logit of a class without exemplars: below all others, but finite so that losses of future tasks are finite."""


@dataclass(frozen=True)
class ICaRL(Algorithm):
    r"""Minimise L_t plus the distillation loss of the last network on ⌊slots / classes⌋ exemplars per class.

        \hat L_o(θ) = (1/|S_o|) Σ_{x ∈ S_o} (1/|C|) Σ_{c ∈ C} H( σ(f_c(x, θ_{t−1})), f_c(x, θ) ),

    S_o the exemplars of task o, C the classes of all finished tasks, H as above. S_o is chosen by herding with the
    features of θ_o, and the targets are outputs of a network trained from θ_o: local. The other terms of obj_t belong
    to the current task: its labels, and the last network's outputs on its inputs.

    The logits at test time are −‖φ(x) − μ_c‖², where φ is the input of the last linear layer and μ_c the mean over the
    exemplars of class c, updated after every task. iCaRL normalises features and means to length 1; the paper's results
    use `features='raw'`. The last network and the features are evaluated in evaluation mode.

    A class with fewer examples than its share stores all of them and repeats them in the training set; means and
    \hat L_o count each example once. If a class returns in a later task, that task's labels are used, exemplars of both
    tasks are stored, and the class has one mean.
    """

    name: ClassVar[str] = "icarl"
    family: ClassVar[str] = "replay"
    locality: ClassVar[Locality] = "local"
    memory_contents: ClassVar[str] = "`slots` examples, the last network, one mean feature per class"
    memory_size: ClassVar[str] = "slots examples + P + K features"
    at_least: ClassVar[Bounds] = {"slots": 1}
    settings: ClassVar[tuple[Setting, ...]] = ("class", "task")
    needs_all_epochs: ClassVar[bool] = True

    slots: int = 500
    """Maximal number of stored exemplars, divided equally among the classes so far."""
    features: Literal["normalised", "raw"] = "normalised"
    """Features and class means: normalised to length 1, or raw (as published)."""

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        regression = example.y.is_floating_point()
        require(not regression, f"{self.name} requires a classification challenge; this one has no class labels.")
        classes = sum(len(model.classes(task)) for task in range(model.tasks))
        enough = self.slots >= classes
        require(enough, f"{self.name} with slots={self.slots} cannot store an exemplar of each of {classes} classes.")
        evaluated = model.eval_mode()
        outputs = evaluated.outputs(params, example.x[:1])
        return {
            "network": {k: v.clone() for k, v in {**params, **model.buffers}.items()},
            "old": torch.zeros_like(outputs[0], dtype=torch.bool),  # mask of the finished tasks' classes
            "new": _mask(model.classes(0), outputs[0]),  # mask of the current task's classes
            "counts": torch.zeros_like(outputs[0], dtype=torch.long),  # number of exemplars per class
            "means": outputs.new_zeros(outputs.shape[1], evaluated.features(params, example.x[:1]).shape[1]),
        }

    def exemplars(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
        tasks = _exemplars(memory)
        if not tasks:
            return None
        x, y = (torch.cat([part[name].flatten(0, 1) for part in tasks]) for name in ("x", "y"))
        return x, y

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        outputs = model.outputs(params, batch.x)
        classes = torch.arange(outputs.shape[-1], device=outputs.device)
        targets = (batch.y.unsqueeze(-1) == classes).to(outputs.dtype)
        if _exemplars(memory):
            targets = torch.where(memory["old"] & ~memory["new"], _last_outputs(model, memory, batch.x), targets)
        return _cross_entropy(outputs, targets, memory["old"] | memory["new"]).mean()

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        evaluated = model.eval_mode()
        task = len(_exemplars(memory))
        old, new = memory["old"] | memory["new"], torch.zeros_like(memory["new"])
        if task + 1 < model.tasks:
            new = _mask(model.classes(task + 1), new)
        share = self.slots // sum(len(model.classes(o)) for o in range(task + 1))
        exemplars = {}
        for o, part in enumerate(_exemplars(memory)):  # the first of every class, which are the best choice of so many
            counts = part["counts"].clamp(max=share)
            exemplars[str(o)] = {"x": part["x"][:, :share], "y": part["y"][:, :share], "counts": counts}
        exemplars[str(task)] = self._select(evaluated, params, data, model.classes(task), share)
        counts, means = self._means(evaluated, params, exemplars, memory["means"])
        network = {**params, **model.buffers}
        return {"network": network, "old": old, "new": new, "counts": counts, "means": means, "exemplars": exemplars}

    def predict(self, model: Model, params: Params, memory: Memory, x: Tensor, task: int) -> Tensor:
        if not _exemplars(memory):
            return model.outputs(params, x)
        features, means = self._features(model, params, x), memory["means"]
        products = (means @ features.mT).mT
        squares = features.square().sum(-1, keepdim=True) + means.square().sum(-1)
        return torch.where(memory["counts"] > 0, 2 * products - squares, UNKNOWN_LOGIT)

    def approximation(self, model: Model, memory: Memory, task: int) -> Approximation:
        part = memory["exemplars"][str(task)]
        x, weight = part["x"].flatten(0, 1), _distinct(part).flatten()
        targets = _last_outputs(model, memory, x)

        def value(params: Mapping[str, Tensor]) -> Tensor:
            losses = _cross_entropy(model.outputs(params, x), targets, memory["old"])
            return (weight * losses).sum() / weight.sum()

        return value

    def _select(self, model: Model, params: Params, data: Batch, classes: tuple[int, ...], share: int) -> Memory:
        """Return a task's ranked exemplars: x (K, m, ...), y (K, m), and the number of distinct ones, (K,)."""
        members = data.y == torch.tensor(classes, device=data.y.device).unsqueeze(1)
        share = min(share, data.y.shape[0])
        counts = members.sum(1).clamp(max=share)
        rows = repeat(self._rank(model, params, data, members, share), counts)
        return {"x": take(data.stored, rows), "y": take(data.y, rows), "counts": counts}

    def _rank(self, model: Model, params: Params, data: Batch, members: Tensor, count: int) -> Tensor:
        return herd(self._features(model, params, data.x), members, count)

    def _features(self, model: Model, params: Params, x: Tensor, chunk: int = 500) -> Tensor:
        """Return φ(x), computed in chunks."""
        features = torch.cat([model.features(params, part) for part in x.split(chunk)]).contiguous()
        return features if self.features == "raw" else _normalise(features)

    def _means(self, model: Model, params: Params, exemplars: Memory, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the number of exemplars of every class and the mean of their features."""
        counts, sums = torch.zeros(matrix.shape[0], dtype=torch.long, device=matrix.device), torch.zeros_like(matrix)
        for task, part in exemplars.items():
            classes = torch.tensor(model.classes(int(task)), device=matrix.device)
            features = self._features(model, params, part["x"].flatten(0, 1)).unflatten(0, part["y"].shape)
            # A sum over the last axis is bit-equal alone and in a cohort.
            part_sums = (features.mT.contiguous() * _distinct(part).unsqueeze(1)).sum(-1)
            counts, sums = counts.index_add(0, classes, part["counts"]), sums.index_add(0, classes, part_sums)
        means = sums / counts.clamp(min=1).unsqueeze(1)
        return counts, means if self.features == "raw" else _normalise(means)


@dataclass(frozen=True)
class RandomICaRL(ICaRL):
    r"""Minimise the objective of iCaRL with exemplars drawn uniformly at random (§6.1).

    S_o does not depend on θ_o, but the targets are still outputs of a network trained from θ_o: local.
    """

    name: ClassVar[str] = "icarl-random"

    def _rank(self, model: Model, params: Params, data: Batch, members: Tensor, count: int) -> Tensor:
        return draw(rng.words(rng.fold_in(data.key, "examples"), data.y.shape[0]), members, count)


def _exemplars(memory: Memory) -> list[Memory]:
    """Return the exemplars of the finished tasks, one entry per task."""
    exemplars = memory.get("exemplars", {})
    return [exemplars[str(task)] for task in range(len(exemplars))]


def _distinct(part: Memory) -> Tensor:
    """Return 1 for every exemplar and 0 for repetitions, (K, m)."""
    positions = torch.arange(part["y"].shape[1], device=part["y"].device)
    return (positions < part["counts"].unsqueeze(1)).float()


def _last_outputs(model: Model, memory: Memory, x: Tensor) -> Tensor:
    """Return σ(f(x, θ_{t−1})) of the last network in evaluation mode, with its own buffers."""
    buffers = {k: memory["network"][k] for k in model.buffers}
    outputs = model.bind(buffers, training=False).outputs(memory["network"], x)
    # softmax over (f, 0), because `sigmoid` rounds differently at different positions of a tensor.
    return torch.stack([outputs, torch.zeros_like(outputs)], -1).softmax(-1)[..., 0]


def _cross_entropy(outputs: Tensor, targets: Tensor, classes: Tensor) -> Tensor:
    """Return the mean of H(q_c, f_c) = (1 − q_c) f_c − log σ(f_c) over the masked classes, one value per input."""
    per_class = (1 - targets) * outputs - functional.logsigmoid(outputs)
    return torch.where(classes, per_class, 0).sum(-1) / classes.sum()


def _mask(classes: Collection[int], template: Tensor) -> Tensor:
    return torch.tensor([c in classes for c in range(template.shape[0])], device=template.device)


def _normalise(features: Tensor) -> Tensor:
    """Scale rows to length 1, except zero rows."""
    lengths = features.square().sum(-1, keepdim=True).sqrt()
    return features / lengths.clamp(min=torch.finfo(features.dtype).tiny)


def herd(features: Tensor, members: Tensor, count: int) -> Tensor:
    """Choose `count` examples per class by herding and return their indices, (K, count).

    A class with fewer examples has all of them first; its remaining entries are meaningless.

    Args:
        features: (n, F).
        members: (K, n), whether an example belongs to a class.
        count: Number of examples per class.
    """
    # float32 often cannot distinguish candidates, and a cohort may round differently. float64 with a tolerance for ties
    # makes the choice reproducible.
    features = features.double()
    sizes = members.sum(1, keepdim=True).clamp(min=1)
    means = members.to(features.dtype) @ features / sizes
    lengths = features.square().sum(-1)
    tolerance = 1e-10 * lengths.max()
    rows = torch.arange(features.shape[0], device=features.device)
    residual, available, exemplars = means, members, []
    for _ in range(count):
        distances = lengths - 2 * (residual @ features.mT)  # squared distance minus the constant ‖residual‖²
        distances = torch.where(available, distances, torch.inf)
        nearest = (distances <= distances.amin(-1, keepdim=True) + tolerance).byte().argmax(-1)
        exemplars.append(nearest)
        available = available & (rows != nearest.unsqueeze(-1))
        residual = residual + means - features[nearest]
    return torch.stack(exemplars, -1)


def draw(words: Tensor, members: Tensor, count: int) -> Tensor:
    """Choose `count` examples per class uniformly at random, given one random word per example."""
    last = torch.iinfo(torch.long).max
    return torch.where(members, words, last).sort(dim=-1, stable=True).indices[..., :count]


def repeat(rows: Tensor, counts: Tensor) -> Tensor:
    """Fill the entries beyond the first `counts` of every class by repeating the first ones."""
    positions = torch.arange(rows.shape[-1], device=rows.device)
    return rows.gather(-1, positions % counts.clamp(min=1).unsqueeze(-1))
