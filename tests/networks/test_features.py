"""Features: the input of the last linear layer, in any network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from glocal import losses
from glocal.errors import GlocalError
from glocal.networks.mlp import MLP
from glocal.networks.model import Model
from glocal.tree import Params, stack


class Convolutional(nn.Module):
    """BatchNorm, dropout, and a head that is defined first and called last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.conv, self.norm, self.hidden = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(self.norm(self.conv(x)).relu().flatten(1)).tanh()
        return self.head(nn.functional.dropout(hidden, 0.5, self.training))


def make(network: Callable[[], nn.Module], seed: int = 0) -> tuple[Model, Params, nn.Module]:
    torch.manual_seed(seed)
    module = network()
    params = {k: p.detach().clone() for k, p in module.named_parameters()}
    model = Model(module, losses.get("cross-entropy"))
    return model.bind({k: b.clone() for k, b in module.named_buffers()}).eval_mode(), params, module


def images(n: int = 6) -> Tensor:
    return torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("network", [lambda: MLP(16, 3, (7, 5)), Convolutional], ids=["mlp", "convolutional"])
def test_the_head_maps_features_to_outputs(network: Callable[[], nn.Module]) -> None:
    model, params, _ = make(network)
    features = model.features(params, images())
    assert features.shape == (6, 5)
    head = "layers.2" if "layers.2.weight" in params else "head"
    made = features @ params[f"{head}.weight"].T + params[f"{head}.bias"]
    torch.testing.assert_close(made, model.outputs(params, images()))


def test_features_depend_on_parameters_and_mode() -> None:
    model, params, module = make(Convolutional)
    other = {k: p + 0.1 for k, p in params.items()}
    module.load_state_dict({**module.state_dict(), **other})
    module.eval()
    expected = module.hidden(module.norm(module.conv(images())).relu().flatten(1)).tanh()  # type: ignore[operator]
    torch.testing.assert_close(model.features(other, images()), expected)


def test_the_features_of_a_linear_network_are_its_inputs() -> None:
    model, params, _ = make(lambda: MLP(16, 3, ()))
    assert torch.equal(model.features(params, images()), images().flatten(1))
    bytes_ = (images() * 255).to(torch.uint8)
    torch.testing.assert_close(model.features(params, bytes_), bytes_.flatten(1) / 255)


def test_batched_over_runs_features() -> None:
    made = [make(lambda: MLP(16, 3, (7, 5)), seed) for seed in range(3)]
    mapped = vmap(made[0][0].features, in_dims=(0, None))(stack([params for _, params, _ in made]), images())
    for run, (model, params, _) in enumerate(made):
        torch.testing.assert_close(mapped[run], model.features(params, images()))


def test_hooks_are_removed() -> None:
    model, params, _ = make(Convolutional)
    model.features(params, images())
    with pytest.raises(RuntimeError):
        model.features(params, images()[:, :, :3, :3])
    assert not any(layer._forward_pre_hooks for layer in model.module.modules())


def test_a_network_without_a_linear_layer_raises() -> None:
    model, params, _ = make(lambda: nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()))
    with pytest.raises(GlocalError, match=r"last nn\.Linear layer, but Sequential calls none"):
        model.features(params, images())
