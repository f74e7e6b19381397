"""Continual-learning algorithms: frozen dataclasses of pure functions for one run.

>>> from glocal.algorithms import ALGORITHMS, EWC
>>> ALGORITHMS["ewc"] is EWC, EWC.locality
(True, 'local')
>>> EWC(penalty=10.0).fisher
'exact'
"""

from glocal.algorithms.algorithm import Algorithm, Batch, Memory, Step
from glocal.algorithms.baselines import SGD, Joint, StableSGD
from glocal.algorithms.ewc import EWC
from glocal.algorithms.gem import AGEM, GEM
from glocal.algorithms.hat import HAT
from glocal.algorithms.icarl import ICaRL, RandomICaRL
from glocal.algorithms.ogd import OGD, OGDGTL, OGDAve, OGDPublished
from glocal.algorithms.optimal import Laplace, OptimalHard, OptimalSoft
from glocal.algorithms.packnet import PackNet
from glocal.algorithms.partition import PNN
from glocal.algorithms.replay import DER, ER, DERpp
from glocal.algorithms.si import SI

BASELINES = (SGD, StableSGD, Joint)
GLOBAL = (ER, GEM, AGEM, SI, PNN, PackNet, HAT)
LOCAL = (EWC, Laplace, ICaRL, RandomICaRL, OGD, OGDGTL, OGDAve, OGDPublished, OptimalHard, OptimalSoft)
DARK = (DER, DERpp)
ALGORITHMS: dict[str, type[Algorithm]] = {a.name: a for a in (*BASELINES, *GLOBAL, *LOCAL, *DARK)}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Batch",
    "Memory",
    "Step",
    *(a.__name__ for a in ALGORITHMS.values()),
]
