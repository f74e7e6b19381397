"""The algorithms that have a name."""

from glocal.algorithms.agem import AGEM
from glocal.algorithms.algorithm import Algorithm, Batch, Memory, Step
from glocal.algorithms.er import ER
from glocal.algorithms.ewc import EWC
from glocal.algorithms.joint import Joint
from glocal.algorithms.sgd import SGD
from glocal.algorithms.si import SI

ALGORITHMS: dict[str, type[Algorithm]] = {a.name: a for a in (SGD, Joint, ER, AGEM, SI, EWC)}

__all__ = ["AGEM", "ALGORITHMS", "ER", "EWC", "SGD", "SI", "Algorithm", "Batch", "Joint", "Memory", "Step"]
