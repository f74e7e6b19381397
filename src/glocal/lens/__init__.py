r"""Instruments that show why a training forgets; each measures one definition or theorem of the paper.

Give `examine` your network, its loss, the tasks' data and the checkpoints between the tasks:

>>> import torch
>>> from glocal.lens import examine
>>> _ = torch.manual_seed(0)
>>> module = torch.nn.Linear(2, 1, bias=False).double()
>>> x = torch.eye(2, dtype=torch.float64)
>>> tasks = [(x[:1], torch.ones(1, 1).double()), (x[1:], torch.ones(1, 1).double())]
>>> weights = [[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]  # θ_0, θ_1, θ_2: every task learns its own input
>>> checkpoints = [{"weight": torch.tensor([w], dtype=torch.float64)} for w in weights]
>>> result = examine(module, "squared-error", tasks, checkpoints, epsilon=0.1)
>>> float(result.forgetting.measured[1, 0])  # L_0(θ_2) − L_0(θ_1)
0.0
>>> result.finding
'Training left the ε-region of an earlier task in 0 of 1 pairs of tasks.'

`trace_checkpoints`, `record` and `open_run` make the `TrainingTrace` that all other instruments take.
"""

from __future__ import annotations

from glocal.lens.approximation_error import ErrorCurves, error_curves, error_order, own_curves
from glocal.lens.checkpoints import trace_checkpoints
from glocal.lens.examination import Examination, examine, examine_trace
from glocal.lens.forgetting import flatness, forgetting, recursion
from glocal.lens.instruments import INSTRUMENTS, measure
from glocal.lens.local_or_global import locality
from glocal.lens.locality_assumption import locality_assumption, region_radii, training_errors
from glocal.lens.monitor import Monitor
from glocal.lens.perturbation import perturbation
from glocal.lens.rank import rank
from glocal.lens.record import RecordedRun, Snapshot, open_run, record
from glocal.lens.taylor import Taylor, exact_taylor, taylor
from glocal.lens.theorems import ground_truth, theorem1, theorem2
from glocal.lens.training_trace import Checkpoint, TrainingTrace

__all__ = [
    "INSTRUMENTS",
    "Checkpoint",
    "ErrorCurves",
    "Examination",
    "Monitor",
    "RecordedRun",
    "Snapshot",
    "Taylor",
    "TrainingTrace",
    "error_curves",
    "error_order",
    "exact_taylor",
    "examine",
    "examine_trace",
    "flatness",
    "forgetting",
    "ground_truth",
    "locality",
    "locality_assumption",
    "measure",
    "open_run",
    "own_curves",
    "perturbation",
    "rank",
    "record",
    "recursion",
    "region_radii",
    "taylor",
    "theorem1",
    "theorem2",
    "trace_checkpoints",
    "training_errors",
]
