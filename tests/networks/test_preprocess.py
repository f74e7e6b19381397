"""Input transforms: crops, flips and normalization against loops over pixels, and when they apply."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.func import vmap

from glocal import losses
from glocal.algorithms import GEM, ICaRL
from glocal.algorithms.algorithm import Batch
from glocal.challenges.challenge import Augment, Normalise
from glocal.errors import GlocalError
from glocal.networks.mlp import MLP
from glocal.networks.model import Model
from glocal.networks.preprocess import InputTransform, crop
from glocal.tree import Params

QUICK = settings(deadline=None, max_examples=30, derandomize=True)
STATISTICS = Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2615))
AUGMENT = Augment(padding=2, flip=True)
SHAPE = (3, 5, 7)


def pictures(n: int, shape: Sequence[int] = SHAPE, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (n, *shape), generator=draw, dtype=torch.uint8)  # no pixel looks like padding


def naive_crop(x: np.ndarray, padding: int, top: int, left: int, flip: bool) -> np.ndarray:
    """One image (channels, h, w): pad it, cut out, mirror."""
    channels, h, w = x.shape
    padded = np.zeros((channels, h + 2 * padding, w + 2 * padding), dtype=np.uint8)
    padded[:, padding : padding + h, padding : padding + w] = x
    cut = padded[:, top : top + h, left : left + w]
    return cut[:, :, ::-1] if flip else cut


@QUICK
@given(st.data())
def test_crop_against_a_loop(data: st.DataObject) -> None:
    n, padding = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    shape = tuple(data.draw(st.integers(1, 6)) for _ in range(3))
    offsets = st.lists(st.integers(0, 2 * padding), min_size=n, max_size=n)
    top, left = data.draw(offsets), data.draw(offsets)
    flip = data.draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n))
    x = pictures(n, shape)
    found = crop(x, padding, torch.tensor(top), torch.tensor(left), None if flip is None else torch.tensor(flip))
    assert found.dtype == torch.uint8
    for i in range(n):
        expected = naive_crop(x[i].numpy(), padding, top[i], left[i], flip is not None and flip[i])
        assert np.array_equal(found[i].numpy(), expected)


def test_crop_against_pillow() -> None:
    x = pictures(6, (3, 8, 8))
    top, left, flip = torch.tensor([0, 8, 3, 4, 5, 1]), torch.tensor([8, 0, 4, 4, 2, 7]), torch.arange(6) % 2 == 0
    found = crop(x, 4, top, left, flip)
    for i in range(6):
        padded = ImageOps.expand(Image.fromarray(x[i].permute(1, 2, 0).numpy()), border=4, fill=0)
        a, b = int(top[i]), int(left[i])
        image = padded.crop((b, a, b + 8, a + 8))
        image = ImageOps.mirror(image) if flip[i] else image
        assert np.array_equal(found[i].permute(1, 2, 0).numpy(), np.asarray(image))


def test_images_are_scaled_then_normalised_channel_by_channel() -> None:
    x = pictures(4)
    pixels = x.double() / 255
    channels = [(pixels[:, c] - m) / s for c, (m, s) in enumerate(zip(*STATISTICS, strict=True))]
    torch.testing.assert_close(
        InputTransform(STATISTICS).normalize(x).double(), torch.stack(channels, 1), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(InputTransform().normalize(x), x.float() / 255)
    assert torch.equal(x, pictures(4)), "the raw images stay"


def test_padding_is_normalized_as_black_pixels() -> None:
    transform = InputTransform(STATISTICS, Augment(padding=50, flip=False))
    moved = transform.normalize(transform.augment(pictures(40), torch.tensor(1)))
    black = -torch.tensor(STATISTICS.mean) / torch.tensor(STATISTICS.std)
    outside = (moved == black.view(3, 1, 1)).all(1).flatten(1).all(1)
    assert outside.sum() > 20, "most crops of so wide a margin see no pixel of the image"


def positions(count: int, augment: Augment, key: int = 3) -> Tensor:
    """Return where a bright pixel in the middle is moved to, (count, 2)."""
    x = torch.zeros(count, 1, 9, 9, dtype=torch.uint8)
    x[:, 0, 4, 2] = 255
    return InputTransform(augment=augment).augment(x, torch.tensor(key)).flatten(1).argmax(1)


def test_offsets_and_flips_are_uniform() -> None:
    where = positions(20_000, Augment(padding=2, flip=True))
    rows, columns = where // 9, where % 9
    # Seen from the crop, the pixel stands at 4 ± 2 and at 2 ± 2, or mirrored at 6 ± 2; both are possible at 4.
    assert abs(rows.bincount(minlength=9)[2:7] - 4000).max() < 5 * 4000**0.5
    expected = torch.tensor([2000, 2000, 2000, 2000, 4000, 2000, 2000, 2000, 2000])
    assert (abs(columns.bincount(minlength=9) - expected) < 5 * expected.sqrt()).all()
    joint = (rows * 9 + columns).bincount(minlength=81).view(9, 9)[2:7]
    assert (abs(joint - expected / 5) < 5 * (expected / 5).sqrt()).all(), "rows and columns are independent"


def test_flip_and_padding_can_be_off() -> None:
    assert sorted(set((positions(2000, Augment(2, False)) % 9).tolist())) == [0, 1, 2, 3, 4]
    assert sorted(set(positions(2000, Augment(0, True)).tolist())) == [4 * 9 + 2, 4 * 9 + 6]


def test_an_images_draws_do_not_depend_on_later_images() -> None:
    transform, x = InputTransform(augment=AUGMENT), pictures(10)
    assert torch.equal(transform.augment(x, torch.tensor(7))[:4], transform.augment(x[:4], torch.tensor(7)))


def test_batched_over_keys() -> None:
    transform, x, keys = InputTransform(STATISTICS, AUGMENT), pictures(6).view(2, 3, *SHAPE), torch.tensor([5, -9])
    pass_through = lambda x, key: transform.normalize(transform.augment(x, key))  # noqa: E731
    together = vmap(pass_through)(x, keys)
    assert torch.equal(together, torch.stack([pass_through(*both) for both in zip(x, keys, strict=True)]))
    shared = vmap(pass_through, in_dims=(None, 0))(x[0], keys)
    assert torch.equal(shared, torch.stack([pass_through(x[0], key) for key in keys]))


def test_floats_are_not_changed() -> None:
    transform, x = InputTransform(STATISTICS, AUGMENT), torch.randn(3, *SHAPE)
    assert transform.normalize(x) is x and transform.augment(x, torch.tensor(1)) is x


@pytest.mark.parametrize(
    ("transform", "x", "message"),
    [
        (InputTransform(STATISTICS), torch.zeros(2, 3, 4, 4), "uint8 images"),
        (InputTransform(augment=AUGMENT), torch.zeros(2, 16, dtype=torch.uint8), r"uint8 images .* shape \(16,\)"),
        (InputTransform(STATISTICS), torch.zeros(2, 4, 4, 4, dtype=torch.uint8), "normalise has 3 channels"),
    ],
)
def test_unsupported_inputs_raise(transform: InputTransform, x: Tensor, message: str) -> None:
    with pytest.raises(GlocalError, match=message):
        transform.check(x, "blobs")
    InputTransform().check(x, "blobs")


# At a model


class Echo(nn.Module):
    """Returns its inputs times a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) * self.scale


ONE: Params = {"scale": torch.ones(())}


def echo(vectorised: bool = False) -> Model:
    return Model(
        Echo(), losses.get("squared-error"), vectorised=vectorised, transform=InputTransform(STATISTICS, AUGMENT)
    )


def test_only_training_with_a_key_augments_and_only_when_asked() -> None:
    x, key = pictures(5), torch.tensor(11)
    plain = InputTransform(STATISTICS).normalize(x)
    model = echo()
    bound = model.bind({}, key=key)
    assert not torch.equal(bound.prepare(x), plain)
    for still in (model, model.eval_mode(), bound.eval_mode(), bound.bind({}, training=False)):
        assert torch.equal(still.prepare(x), plain)
    assert torch.equal(bound.outputs(ONE, x), plain.flatten(1)), "a pass scales bytes and does no more"


def test_every_batch_of_a_key_has_its_own_draws() -> None:
    x, key = pictures(5), torch.tensor(11)
    first, second = (echo().bind({}, key=key) for _ in range(2))
    seen = [first.prepare(x), first.bind({}, training=True).prepare(x), first.prepare(x), first.prepare(x)]
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i]), "copies share one sequence"
    assert all(torch.equal(second.prepare(x), a) for a in seen)
    other = echo().bind({}, key=key + 1)
    assert all(not torch.equal(other.prepare(x), a) for a in seen)


def test_prepared_inputs_are_not_augmented_again() -> None:
    bound = echo().bind({}, key=torch.tensor(11))
    prepared = bound.prepare(pictures(5))
    assert bound.prepare(prepared) is prepared
    for model in (bound, bound.eval_mode()):
        assert torch.equal(model.outputs(ONE, prepared), prepared.flatten(1))


def test_without_augmentation_a_key_makes_no_copy() -> None:
    model = Model(Echo(), losses.get("squared-error"), transform=InputTransform(STATISTICS))
    assert model.bind({}, key=torch.tensor(3)) is model


# In algorithms that send the same images through more than once


def image_model(tasks: int = 2, vectorised: bool = False) -> tuple[Model, Params]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = MLP(105, 4, (6,))
    criterion, transform = losses.get("cross-entropy"), InputTransform(STATISTICS, AUGMENT)
    classes = lambda task: (2 * task, 2 * task + 1)  # noqa: E731
    model = Model(module, criterion, tasks, 8, vectorised=vectorised, classes=classes, transform=transform)
    return model, {k: p.detach().clone() for k, p in module.named_parameters()}


def task_of_images(task: int, n: int = 12) -> Batch:
    y = 2 * task + torch.arange(n) % 2
    return Batch(pictures(n, seed=task), y, torch.tensor(task), torch.tensor(task))


def test_icarl_distils_on_the_images_it_learns() -> None:
    model, params = image_model()
    algorithm = ICaRL(slots=8)
    memory = algorithm.init(model, params, task_of_images(0))
    memory = algorithm.consolidate(model, params, memory, task_of_images(0))
    bound, batch = model.bind({}, key=torch.tensor(4)), task_of_images(1)
    batch = batch._replace(x=bound.prepare(batch.x), raw=batch.x)
    value = algorithm.objective(bound, params, memory, batch)
    # At θ = θ_{t−1} the two networks agree on the same image: there the cross-entropy of old classes is the entropy.
    outputs = model.outputs(params, batch.x)
    q = outputs.sigmoid()
    entropy = -(q * q.log() + (1 - q) * (1 - q).log())[:, :2]
    own = nn.functional.binary_cross_entropy(q, nn.functional.one_hot(batch.y, 4).float(), reduction="none")[:, 2:]
    torch.testing.assert_close(value, torch.cat([entropy, own], 1).mean())


def test_gem_sees_the_same_images_batched_and_one_by_one() -> None:
    found = []
    for vectorised in (False, True):
        model, params = image_model(vectorised=vectorised)
        algorithm = GEM(slots=8)
        memory = algorithm.init(model, params, task_of_images(0))
        for task in (0, 1):
            memory = algorithm.consolidate(model, params, memory, task_of_images(task))
        bound = model.bind({}, key=torch.tensor(4))
        found.append(algorithm._gradients(bound, params, memory))
    torch.testing.assert_close(found[0], found[1])
