"""Bounds of norms, and the small parts of a certificate, against what they are bounds of."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import rgpr
from networks import mlp
from rgpr.guarantee import NotBoundedError
from rgpr.guarantee.certificate import lipschitz_bound
from rgpr.guarantee.growth import growth
from rgpr.guarantee.head import _gaps, head_bound
from rgpr.guarantee.inputs import at_distance, rounding
from rgpr.guarantee.norms import Windows, _symbol, least_norm, matrix_norm
from rgpr.posteriors import Ensemble, Posterior
from rgpr.posteriors.gaussian import DiagonalGaussian, Gaussian


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"), list(itertools.product((1, 2, 3, 5), (1, 2, 3), (1, 2, 3)))
)
def test_no_pixel_is_in_more_windows(kernel: int, stride: int, dilation: int) -> None:
    """Every window's taps are counted, along one line of pixels and along two."""
    held = torch.zeros(200, dtype=torch.long)
    for start in range(0, 150, stride):
        held[start : start + kernel * dilation : dilation] += 1
    most = int(held.max())
    assert Windows(kernel, stride, dilation, 1).sharing() >= most
    assert Windows(kernel, stride, dilation, 2).sharing() >= most**2
    assert Windows((kernel, 1), (stride, 1), (dilation, 1), 2).sharing() >= most
    if dilation == 1:
        assert Windows(kernel, stride, dilation, 2).sharing() == most**2


@pytest.mark.parametrize("shape", [(2, 3, 3, 3), (4, 2, 2, 3), (3, 1, 5)])
def test_the_symbol_is_that_of_a_fourier_transform(shape: tuple[int, ...]) -> None:
    """Its largest norm on a grid of 32, plus the steepest slope times half a step."""
    weight = torch.randn(shape).double()
    sides = shape[2:]
    frequencies = torch.fft.fftn(weight, s=[32] * len(sides), dim=list(range(2, len(shape))))
    matrices = frequencies.flatten(2).permute(2, 0, 1)
    largest = float(torch.linalg.matrix_norm(matrices, ord=2).max())
    slope = 0.0
    for place in itertools.product(*map(range, sides)):
        from_centre = sum(abs(i - (k - 1) / 2) for i, k in zip(place, sides, strict=True))
        slope += from_centre * float(torch.linalg.matrix_norm(weight[:, :, *place], ord=2))
    assert _symbol(weight) == pytest.approx(largest + slope * math.pi / 32, rel=1e-9)


def test_norms_of_matrices() -> None:
    for shape in ((1, 7), (7, 1), (3, 5), (5, 3)):
        matrix = torch.randn(shape).double()
        norm = float(torch.linalg.matrix_norm(matrix, ord=2))
        assert matrix_norm(matrix) == pytest.approx(norm)
        assert least_norm(matrix) <= norm * (1 + 1e-12)
        if 1 in shape:  # where a matrix has one singular value, it is the norm
            assert least_norm(matrix) == pytest.approx(norm)


def fitted(network: nn.Module, residual: str = "onset") -> rgpr.RGPR:
    x, y = 2 + 3 * torch.randn(80, 4), torch.arange(80) % 3
    x = x.to(next(network.parameters()).dtype)
    return rgpr.RGPR(network, residual=residual).fit(x, y, progress=False)


def test_inputs_are_moved_to_a_distance_along_their_line() -> None:
    model = fitted(mlp().double())
    extension, x = model._extension(), torch.randn(9, 4).double()
    certificate = model.certify(0.05)
    for distance in (0.1, 7.0, 1e4):
        moved = at_distance(extension, x, distance)
        torch.testing.assert_close(certificate.distance(moved), torch.full((9,), distance).double())
        inputs = extension.residual.at(0)
        torch.testing.assert_close(
            nn.functional.normalize(inputs(moved)), nn.functional.normalize(inputs(x))
        )


def test_a_quick_bound_of_the_growth_is_below_the_slow_one() -> None:
    extension = fitted(mlp())._extension()
    quick, slow = (growth(extension, quick=quick).slope for quick in (True, False))
    assert 0 < quick < 0.9 * slow


def test_the_radius_leaves_room_for_the_rounding_of_the_network() -> None:
    model = fitted(mlp())
    certificate = model.certify(0.05)
    room = rounding(model._extension())
    assert room == pytest.approx(16 * 2**-23)
    assert certificate.bound(certificate.radius) <= 1 / 3 + 0.05 - 0.99 * room


def test_rounding_of_a_common_part_of_all_logits_is_added_to_the_gap() -> None:
    """Equal logits of a million are apart by their rounding, two times over."""
    extension = fitted(mlp().double())._extension()
    W, b = torch.zeros(3, 16).double(), torch.full((3,), 1e6).double()
    for pairs in ("all", "apart"):
        exact = _gaps(W, b, extension.residual.at(2), pairs=pairs, relative=0.0)
        rounded = _gaps(W, b, extension.residual.at(2), pairs=pairs, relative=1e-6)
        assert rounded[0] - exact[0] == pytest.approx(2.0)


def test_the_certificate_is_the_smaller_radius() -> None:
    """A hidden layer of next to no variance bounds the outputs late, and their slope early."""
    model = fitted(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), residual="paper")
    both = []
    for share in (1.0, 1e-12):
        model.sigma2 = torch.tensor([1.0, share])
        certificate = model.certify(0.05)
        both.append(certificate.by)
        assert certificate.radius == pytest.approx(min(certificate.radii.values()), rel=1e-6)
        assert certificate.radii[certificate.by] == min(certificate.radii.values())
    assert both[1] == "lipschitz"
    assert "head" in certificate.radii


def test_labels_are_there_or_not() -> None:
    x, y = torch.randn(80, 4), torch.randint(0, 2, (80, 5)).float()
    model = rgpr.RGPR(mlp(outputs=5), likelihood="multilabel").fit(x, y, progress=False)
    certificate = model.certify(0.1)
    assert certificate.classes == 2
    far = at_distance(model._extension(), x, certificate.radius)
    with torch.no_grad():
        p = model(far)
    assert torch.maximum(p, 1 - p).max() <= 0.6


# -- which heads have a bound ----------------------------------------------------------------------


class Nameless(Posterior):
    """A posterior that says nothing about what its mean is made of."""

    def forward(self, x: Tensor) -> Gaussian:
        return DiagonalGaussian(self.point(x), torch.zeros(()))


@pytest.mark.parametrize("base", [Nameless(mlp()), Ensemble([mlp(), mlp()])])
def test_a_mean_of_other_networks_has_no_head(base: Posterior) -> None:
    with pytest.raises(NotBoundedError, match="not that of the one network that is read"):
        head_bound(fitted(base)._extension())


def test_a_head_without_a_bias_of_a_layer_with_one_unit() -> None:
    network = nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 3, bias=False))
    assert fitted(network).certify(0.1).radii["head"] < math.inf


def test_the_head_of_a_flattened_image() -> None:
    """The head reads the very memory that was measured, in another shape."""
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    x, y = torch.randn(60, 1, 6, 6), torch.arange(60) % 3
    model = rgpr.RGPR(network, layers=["1"], residual="paper").fit(x, y, progress=False)
    assert "head" in model.certify(0.1).radii


@pytest.mark.parametrize("change", [0.01, 0.5, 100.0])
def test_a_head_whose_outputs_are_changed_has_no_bound(change: float) -> None:
    network = mlp()
    model = fitted(network)
    network[-1].register_forward_hook(lambda module, args, output: output + change)
    with pytest.raises(NotBoundedError, match="remove its hooks"):
        head_bound(model._extension())


def test_a_model_of_several_inputs_is_refused_before_anything_is_bounded() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 3)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.last(a + b)

    a, b = torch.randn(40, 4), torch.randn(40, 4)
    model = rgpr.RGPR(Sum()).fit([((a, b), torch.arange(40) % 3)], progress=False)
    with pytest.raises(NotBoundedError, match=r"^the theorem is about a network"):
        model.certify(0.1)


# -- roundings that a certificate has to survive ---------------------------------------------------


def test_each_logit_may_be_rounded_by_its_own_size() -> None:
    extension = fitted(mlp())._extension()
    bound, _ = lipschitz_bound(extension)
    exact, room = growth(extension), rounding(extension)
    assert bound.slope == pytest.approx(math.sqrt(2) * exact.slope * (1 + 2 * room), rel=1e-9)
    assert bound.start == pytest.approx(math.sqrt(2) * exact.start * (1 + 2 * room), rel=1e-9)


def test_an_input_at_the_radius_is_covered() -> None:
    model = fitted(mlp())
    certificate = model.certify(0.05)
    # A little further out than the bound says, so that the rounding of a distance does not matter.
    assert certificate.radius > certificate.radii[certificate.by]
    x = at_distance(model._extension(), torch.randn(1, 4), 100.0)
    just = dataclasses.replace(certificate, radius=float(certificate.distance(x)))
    assert just.covers(x).tolist() == [True]


def test_the_mean_may_lie_between_two_numbers_of_the_networks_dtype() -> None:
    """The outputs are zero at the number that the mean is rounded to, but not at the mean."""
    network = nn.Linear(1, 2).bfloat16()
    network.weight.data = torch.tensor([[4.0], [-4.0]]).bfloat16()
    network.bias.data = torch.tensor([-4.0, 4.0]).bfloat16()
    x = torch.tensor([[1.0], [1 + 2**-7]] * 20).bfloat16()
    model = rgpr.RGPR(network, layers="input", residual="paper").fit(x, progress=False)
    found = growth(model._extension())
    at_mean = math.sqrt(2) * 4 * 2**-8
    assert found.start >= at_mean * (1 - 1e-6)
