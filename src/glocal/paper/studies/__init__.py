"""The paper's experiments beside Table 1, by name: what each shows, and its file, read when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from glocal.errors import unknown

if TYPE_CHECKING:
    from glocal.paper.study import Study

TITLES: dict[str, tuple[str, str]] = {
    "approximation-error": ("approximation_error", "how well old losses are approximated as later tasks are learnt"),
    "epsilon-region": ("epsilon_region", "how far from a solution its expansion holds, and when learning leaves there"),
    "recursion": ("recursion", "forgetting as the quadratic approximation predicts it, and as it is measured"),
    "locality": ("locality", "which algorithms are local and which global, found by Definition 1 and as declared"),
    "perturbation-cifar10": ("perturbation", "how far eigenvectors tell more than chance: ResNet-18 on Split CIFAR-10"),
    "perturbation-mnist": ("perturbation", "how far eigenvectors tell more than chance: the MLP on Rotated-MNIST"),
    "hessian-rank": ("hessian_rank", "the rank of the average Hessian as tasks are learnt, by several definitions"),
    "flatness": ("flatness", "how flat every solution is, and the forgetting that followed"),
    "theorem1": ("theorem1", "forgetting beside the quadratic that Theorem 1 equates it with, over learning rates"),
    "theorem2": ("theorem2", "the curvature of old losses along updates that OGD makes orthogonal, and others"),
    "ogd-gtl": ("ogd_gtl", "what the true label's gradient tells of all outputs', and OGD's variants at equal memory"),
    "stable-sgd": ("stable_sgd", "forgetting, accuracy and distance of plastic and stable SGD, over learning rates"),
    "tradeoff": ("tradeoff", "stability and plasticity: accuracy against forgetting, from the runs of table1"),
}
"""name -> (file, what the figure shows)"""


def get(name: str) -> Study:
    """A study by name. Its file lists its studies under `STUDIES`."""
    if name not in TITLES:
        raise unknown("study", name, TITLES)
    file, _ = TITLES[name]
    (study,) = (s for s in import_module(f"glocal.paper.studies.{file}").STUDIES if s.name == name)
    return study
