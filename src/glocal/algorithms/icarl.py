r"""iCaRL (§5.2, §6.2): exemplars of every class, distillation of the last network, prediction by the nearest mean.

With C the classes seen so far, f_c the outputs, σ the sigmoid and H(q, f) = −q log σ(f) − (1 − q) log σ(−f),

    obj_t(θ) = mean over D_t ∪ S of (1/|C|) Σ_{c ∈ C} H(q_c, f_c(x, θ)),

where q_c = σ(f_c(x, θ_{t−1})) for the classes of finished tasks and q_c = 1[y = c] for the task's own: exemplars S and
the task's examples are one training set, and both are seen through the eyes of the last network.

Herding (iCaRL's): examples whose mean feature stays as close as possible to that of their whole class.

Of the examples of a class with features φ_1, ..., φ_n and mean μ, without replacement and best first,

    p_k = argmin_i ‖ μ − (1/k) ( φ_i + Σ_{j<k} φ_{p_j} ) ‖ = argmin_i ‖ ( k μ − Σ_{j<k} φ_{p_j} ) − φ_i ‖,

the first of equals. Any first few of them are what herding would have chosen had fewer been asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from glocal.algorithms.algorithm import Algorithm, Batch, Locality, Memory
from glocal.algorithms.buffer import take
from glocal.challenges.challenge import Setting
from glocal.errors import require, unknown
from glocal.networks.model import Model
from glocal.tree import Params

Features = Literal["normalised", "raw"]
FEATURES = ("normalised", "raw")
UNSEEN = -1e30
"""The logit of a class without a mean: below every distance, and finite, as the loss of a task to come must be."""


@dataclass(frozen=True)
class ICaRL(Algorithm):
    r"""Keeps ⌊slots / classes⌋ exemplars of every class met so far, best first, and fits the last network's outputs.

        \hat L_o(θ) = (1/|S_o|) Σ_{x ∈ S_o} (1/|C|) Σ_{c ∈ C} H( σ(f_c(x, θ_{t−1})), f_c(x, θ) ),

    S_o the exemplars of task o, C the classes of all finished tasks, H as above. S_o is chosen by herding with the
    features of θ_o, and the targets are outputs of a network that began at θ_o: local. The rest of obj_t belongs to the
    current task: its labels, which are 0 on exemplars, and the last network's outputs on its inputs.

    An input is given to the class whose exemplars' mean feature is nearest: logits are −‖φ(x) − μ_c‖², with μ_c taken
    at θ_t after every task. Features are the inputs of the network's last linear layer. They are 'normalised' to length
    1, and so are the means, as iCaRL defines them; the paper's numbers were measured with 'raw' ones. The last network
    runs in evaluation mode, with its own BatchNorm statistics, and features are taken in evaluation mode too.

    A class that has fewer examples than its share keeps them all, and they repeat in turn among the replayed ones (at
    most as many places as its task has examples); means and \hat L_o count each once. A class that returns in a later
    task is one more class there: the task's own labels hold, it has exemplars of both tasks, and one mean of them all.
    """

    name: ClassVar[str] = "icarl"
    family: ClassVar[str] = "replay"
    locality: ClassVar[Locality] = "local"
    memory_contents: ClassVar[str] = "`slots` examples, the last network, a mean feature a class"
    memory_size: ClassVar[str] = "slots examples + P + K features"
    settings: ClassVar[tuple[Setting, ...]] = ("class", "task")

    slots: int = 500
    """Exemplars that are held at most, in equal shares for the classes seen."""
    features: Features = "normalised"
    """Features and their means: normalised to length 1, or raw (published)."""

    def __post_init__(self) -> None:
        if self.features not in FEATURES:
            raise unknown("kind of features", self.features, FEATURES)
        require(self.slots >= 1, f"{self.name} needs slots of at least 1; {self.slots} was given.")

    def init(self, model: Model, params: Params, example: Batch) -> Memory:
        numbers = example.y.is_floating_point()
        require(not numbers, f"{self.name} learns classes, and squared error has none; give a challenge with classes.")
        needed = sum(len(model.classes(task)) for task in range(model.tasks))
        enough = self.slots >= needed
        require(enough, f"{self.name} with slots={self.slots} cannot hold one exemplar of each of {needed} classes.")
        evaluated = model.eval_mode()
        outputs = evaluated.outputs(params, example.x[:1])
        return {
            "network": {k: v.clone() for k, v in {**params, **model.buffers}.items()},
            "old": torch.zeros_like(outputs[0], dtype=torch.bool),  # which outputs are classes of finished tasks
            "new": _mask(model.classes(0), outputs[0]),  # and of the current one
            "held": torch.zeros_like(outputs[0], dtype=torch.long),  # exemplars of each class
            "means": outputs.new_zeros(outputs.shape[1], evaluated.features(params, example.x[:1]).shape[1]),
        }

    def exemplars(self, memory: Memory) -> tuple[Tensor, Tensor] | None:
        kept = _exemplars(memory)
        if not kept:
            return None
        joined = {part: torch.cat([k[part].flatten(0, 1) for k in kept]) for part in ("x", "y")}
        return joined["x"], joined["y"]

    def objective(self, model: Model, params: Params, memory: Memory, batch: Batch) -> Tensor:
        x = model.prepare(batch.x)  # both networks see the same one
        outputs = model.outputs(params, x)
        classes = torch.arange(outputs.shape[-1], device=outputs.device)
        targets = (batch.y.unsqueeze(-1) == classes).to(outputs.dtype)
        if _exemplars(memory):
            targets = torch.where(memory["old"] & ~memory["new"], _last(model, memory, x), targets)
        return _distances(outputs, targets, memory["old"] | memory["new"]).mean()

    def consolidate(self, model: Model, params: Params, memory: Memory, data: Batch) -> Memory:
        evaluated = model.eval_mode()
        task = len(_exemplars(memory))
        old, new = memory["old"] | memory["new"], torch.zeros_like(memory["new"])
        if task + 1 < model.tasks:
            new = _mask(model.classes(task + 1), new)
        share = self.slots // sum(len(model.classes(o)) for o in range(task + 1))
        kept = {str(o): _first(share, k) for o, k in enumerate(_exemplars(memory))}
        kept[str(task)] = self._chosen(evaluated, params, data, model.classes(task), share)
        held, means = self._means(evaluated, params, kept, memory["means"])
        network = {**params, **model.buffers}
        return {"network": network, "old": old, "new": new, "held": held, "means": means, "exemplars": kept}

    def predict(self, model: Model, params: Params, memory: Memory, x: Tensor, task: int) -> Tensor:
        if not _exemplars(memory):
            return model.outputs(params, x)
        features, means = self._features(model, params, x), memory["means"]
        products = (means @ features.mT).mT
        squares = features.square().sum(-1, keepdim=True) + means.square().sum(-1)
        return torch.where(memory["held"] > 0, 2 * products - squares, UNSEEN)

    def approximation(self, model: Model, memory: Memory, task: int) -> Callable[[Mapping[str, Tensor]], Tensor]:
        kept = memory["exemplars"][str(task)]
        x, weight = kept["x"].flatten(0, 1), _once(kept).flatten()
        targets = _last(model, memory, x)

        def value(params: Mapping[str, Tensor]) -> Tensor:
            distances = _distances(model.outputs(params, x), targets, memory["old"])
            return (weight * distances).sum() / weight.sum()

        return value

    def _chosen(self, model: Model, params: Params, data: Batch, classes: tuple[int, ...], share: int) -> Memory:
        """The task's exemplars, best first: x (K, m, ...), y (K, m), and how many of the m are different ones, (K,)."""
        members = data.y == torch.tensor(classes, device=data.y.device).unsqueeze(1)
        share = min(share, data.y.shape[0])
        held = members.sum(1).clamp(max=share)
        rows = repeat(self._ranked(model, params, data, members, share), held)
        return {"x": take(data.x, rows), "y": take(data.y, rows), "held": held}

    def _ranked(self, model: Model, params: Params, data: Batch, members: Tensor, count: int) -> Tensor:
        return herd(self._features(model, params, data.x), members, count)

    def _features(self, model: Model, params: Params, x: Tensor, chunk: int = 500) -> Tensor:
        """φ(x), a bounded number of examples at a time."""
        found = torch.cat([model.features(params, part) for part in x.split(chunk)]).contiguous()
        return found if self.features == "raw" else _unit(found)

    def _means(self, model: Model, params: Params, kept: Memory, like: Tensor) -> tuple[Tensor, Tensor]:
        """How many exemplars every class has, and the mean of their features."""
        held, sums = torch.zeros(like.shape[0], dtype=torch.long, device=like.device), torch.zeros_like(like)
        for task, part in kept.items():
            classes = torch.tensor(model.classes(int(task)), device=like.device)
            features = self._features(model, params, part["x"].flatten(0, 1)).unflatten(0, part["y"].shape)
            # Along a last axis: such a sum is the same number alone and in a cohort.
            own = (features.mT.contiguous() * _once(part).unsqueeze(1)).sum(-1)
            held, sums = held.index_add(0, classes, part["held"]), sums.index_add(0, classes, own)
        means = sums / held.clamp(min=1).unsqueeze(1)
        return held, means if self.features == "raw" else _unit(means)


@dataclass(frozen=True)
class RandomICaRL(ICaRL):
    r"""iCaRL with exemplars drawn uniformly, without replacement (§6.2).

    \hat L_o is iCaRL's with an S_o that does not depend on θ_o. Its targets still come from a network that began there:
    local through them alone.
    """

    name: ClassVar[str] = "icarl-random"

    def _ranked(self, model: Model, params: Params, data: Batch, members: Tensor, count: int) -> Tensor:
        return draw(data.random, members, count)


def _exemplars(memory: Memory) -> list[Memory]:
    """Those of every finished task, in order; their number is that of finished tasks."""
    kept = memory.get("exemplars", {})
    return [kept[str(task)] for task in range(len(kept))]


def _first(share: int, kept: Memory) -> Memory:
    return {"x": kept["x"][:, :share], "y": kept["y"][:, :share], "held": kept["held"].clamp(max=share)}


def _once(kept: Memory) -> Tensor:
    """1 for every exemplar and 0 for its repetitions, (K, m)."""
    places = torch.arange(kept["y"].shape[1], device=kept["y"].device)
    return (places < kept["held"].unsqueeze(1)).float()


def _last(model: Model, memory: Memory, x: Tensor) -> Tensor:
    """σ(f(x, θ_{t−1})): the last network in evaluation mode, with its own buffers."""
    buffers = {k: memory["network"][k] for k in model.buffers}
    outputs = model.bind(buffers, training=False).outputs(memory["network"], x)
    # As softmax over (f, 0): `sigmoid` rounds some of a tensor's last entries otherwise, others alone than in a cohort.
    return torch.stack([outputs, torch.zeros_like(outputs)], -1).softmax(-1)[..., 0]


def _distances(outputs: Tensor, targets: Tensor, among: Tensor) -> Tensor:
    """The mean of H(q_c, f_c) = (1 − q_c) f_c − log σ(f_c) over some classes, one number an input."""
    each = (1 - targets) * outputs - functional.logsigmoid(outputs)
    return torch.where(among, each, 0).sum(-1) / among.sum()


def _mask(classes: Collection[int], like: Tensor) -> Tensor:
    return torch.tensor([c in classes for c in range(like.shape[0])], device=like.device)


def _unit(features: Tensor) -> Tensor:
    """Rows of length 1; a row of zeros stays one."""
    lengths = features.square().sum(-1, keepdim=True).sqrt()
    return features / lengths.clamp(min=torch.finfo(features.dtype).tiny)


def herd(features: Tensor, members: Tensor, count: int) -> Tensor:
    """The rows of `count` examples of every class, (K, count), from features (n, F) and who is in a class, (K, n).

    A class that has fewer has them all in its first places; what follows there means nothing.
    """
    # Candidates are often nearer to each other than float32 can tell, and products may be rounded otherwise in a cohort
    # than alone. In double precision, with equals known up to its rounding, both choose the same example.
    features = features.double()
    sizes = members.sum(1, keepdim=True).clamp(min=1)
    means = members.to(features.dtype) @ features / sizes
    lengths = features.square().sum(-1)
    rounding = 1e-10 * lengths.max()
    rows = torch.arange(features.shape[0], device=features.device)
    missing, available, chosen = means, members, []
    for _ in range(count):
        distances = lengths - 2 * (missing @ features.mT)  # squared, less ‖missing‖², which is the same for all
        distances = torch.where(available, distances, torch.inf)
        nearest = (distances <= distances.amin(-1, keepdim=True) + rounding).byte().argmax(-1)
        chosen.append(nearest)
        available = available & (rows != nearest.unsqueeze(-1))
        missing = missing + means - features[nearest]
    return torch.stack(chosen, -1)


def draw(random: Tensor, members: Tensor, count: int) -> Tensor:
    """The same uniformly, by chance: in the order of the examples' random numbers (n,)."""
    return torch.where(members, random, 2.0).sort(dim=-1, stable=True).indices[..., :count]


def repeat(chosen: Tensor, held: Tensor) -> Tensor:
    """Classes that have fewer examples than places, `held` of them, fill these with the same ones over and over."""
    places = torch.arange(chosen.shape[-1], device=chosen.device)
    return chosen.gather(-1, places % held.clamp(min=1).unsqueeze(-1))
