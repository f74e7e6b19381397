"""The registry of the paper's experiments: name, place in the paper, what it shows, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from glocal.errors import require_known
from glocal.paper import table1
from glocal.paper.table1 import Column

if TYPE_CHECKING:
    from glocal.paper.study import Study


@dataclass(frozen=True)
class Experiment:
    """An experiment with a command; either a study of `glocal.paper.studies` or made of Table 1's runs."""

    name: str
    reference: str
    """Where the paper has it, by printed number."""
    title: str
    """What it shows."""
    columns: tuple[Column, ...] | None = None
    """Columns of Table 1 to train, the last for the demo; None for a study."""

    @property
    def command(self) -> str:
        return f"glocal paper {self.name}"

    def costs(self) -> list[str]:
        """Return what the experiment and then its demo cost."""
        if self.columns is None:
            return [get_study(self.name).cost(demo) for demo in (False, True)]
        return [column.describe_cost() for column in self.columns] or ["nothing beyond table1"]


EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "table1",
            "Table 1",
            "accuracy and forgetting over learning rates, compared with the published numbers, and the paper's test",
            columns=(*table1.COLUMNS.values(), table1.DEMO),
        ),
        Experiment(
            "distance",
            "Figure 1",
            "distance from the initialisation against the learning rate, by task, from the runs of table1",
            columns=(),
        ),
        Experiment(
            "icarl-buffer",
            "Figure 2",
            "forgetting of iCaRL with herding and with random exemplars, against the learning rate",
            columns=(*table1.ICARL_COLUMNS.values(), table1.ICARL_DEMO),
        ),
        Experiment(
            "approximation-error",
            "§3.2, Eq. 5",
            "error of the approximations of old losses while later tasks are learnt",
        ),
        Experiment(
            "epsilon-region",
            "Assumption 3.2",
            "how far from a solution its Taylor expansion holds, and when training leaves that region",
        ),
        Experiment("recursion", "Eq. 6 and 7", "forgetting predicted by the quadratic approximation and measured"),
        Experiment(
            "locality",
            "Definition 3.1, §5",
            "which algorithms are local and which global: declared, and found by experiment",
        ),
        Experiment(
            "perturbation-cifar10",
            "Figure 3, Eq. 17",
            "perturbation score against the radius: ResNet-18 on Split CIFAR-10",
        ),
        Experiment("perturbation-mnist", "Figure 5", "perturbation score against the radius: the MLP on Rotated-MNIST"),
        Experiment(
            "hessian-rank",
            "Figure 4",
            "rank of the average Hessian against the number of tasks, by several definitions",
        ),
        Experiment("flatness", "§4", "flatness of every solution and the forgetting that followed"),
        Experiment(
            "theorem1",
            "Theorem 4.1",
            "forgetting against the quadratic form that the theorem equates it with, over learning rates",
        ),
        Experiment("theorem2", "Theorem 5.1", "curvature of old losses along the updates of OGD and other algorithms"),
        Experiment(
            "ogd-gtl",
            "appendix, OGD-GTL",
            "the true label's share of the output Hessian, and OGD's variants at equal memory",
        ),
        Experiment(
            "stable-sgd", "Figure 6", "forgetting, accuracy and distance of plastic and stable SGD, over learning rates"
        ),
        Experiment(
            "tradeoff", "§6.1", "stability and plasticity: accuracy against forgetting, from the runs of table1"
        ),
    )
}
_SHARED_FILES = {"theorem1": "theorems", "theorem2": "theorems"}
_SHARED_FILES |= {"perturbation-cifar10": "perturbation", "perturbation-mnist": "perturbation"}
STUDIES: dict[str, Experiment] = {name: e for name, e in EXPERIMENTS.items() if e.columns is None}


def get_study(name: str) -> Study:
    """Return a study by name, importing its file."""
    require_known("study", name, STUDIES)
    file = _SHARED_FILES.get(name, name.replace("-", "_"))
    module = import_module(f"glocal.paper.studies.{file}")
    return next(study for study in module.STUDIES if study.name == name)
