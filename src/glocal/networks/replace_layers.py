"""Replace torch's layers by glocal's, which compute the same and are fast when a GPU batches them over runs."""

from __future__ import annotations

from torch import Tensor, nn

from glocal.networks.batchnorm import BatchNorm2d
from glocal.networks.convolution import Conv2d


class CountingBatchNorm2d(BatchNorm2d):
    """Our BatchNorm2d that counts its batches, as torch's does."""

    def forward(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked = self.num_batches_tracked + 1
        return super().forward(x, residual, relu)


def replace_layers(module: nn.Module) -> nn.Module:
    """Replace, in place, the layers that are exactly torch's own, and return the module.

    Activations become out of place, because autograd does not allow to modify the outputs of our layers.
    """
    for part in module.modules():
        if isinstance(getattr(part, "inplace", None), bool):
            part.inplace = False  # type: ignore[assignment]
        if type(part) is nn.Conv2d:
            part.__class__ = Conv2d
        elif type(part) is nn.BatchNorm2d and part.affine and part.track_running_stats and part.momentum is not None:
            part.__class__ = CountingBatchNorm2d
    return module
