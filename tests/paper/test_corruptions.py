"""Corrupted images: against Pillow, SciPy, colorsys and statistics, and what all kinds share."""

import colorsys
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.ndimage import gaussian_filter
from sklearn.datasets import load_sample_images
from torch.nn import functional as F

from devices import needs_gpu
from rgpr_paper.corruptions import CHUNK, KINDS, SEVERITIES, corrupt, pixels

NOT_RANDOM = {
    "defocus_blur",
    "zoom_blur",
    "gaussian_blur",
    "brightness",
    "contrast",
    "saturate",
    "pixelate",
    "jpeg_compression",
}
# How less saturation compares with more depends on how colourful the photographs are.
CHAINS = {"saturate": ((2, 3), (1, 4, 5))}
MOVES_PIXELS = ("glass_blur", "motion_blur", "elastic_transform")
KEEPS_ONE_COLOUR = sorted((NOT_RANDOM - {"brightness", "saturate"}) | set(MOVES_PIXELS))
colours = st.tuples(*[st.integers(0, 255)] * 3)


@pytest.fixture(scope="module")
def photos():
    """Pieces of two photographs, each of 128 x 128 made 32 x 32; not those of plain sky."""
    pieces = []
    for photo in load_sample_images().images:
        for top in range(0, photo.shape[0] - 127, 64):
            for left in range(0, photo.shape[1] - 127, 73):
                piece = photo[top : top + 128, left : left + 128]
                pieces.append(np.asarray(Image.fromarray(piece).resize((32, 32), Image.BOX)))
    x = torch.from_numpy(np.stack(pieces)).permute(0, 3, 1, 2).contiguous()
    return x[x.float().std((2, 3)).mean(1) > 25]


def distance(a, b):
    """Mean squared, of each image."""
    return (a.float() - b.float()).square().mean((1, 2, 3)) / 255**2


def one_colour(colour, size=32, count=1):
    return torch.tensor(colour, dtype=torch.uint8)[None, :, None, None].repeat(count, 1, size, size)


# -- what all kinds share ------------------------------------------------------------------------


def test_kinds_are_the_files_of_cifar_10_c():
    files = """brightness contrast defocus_blur elastic_transform fog frost gaussian_blur
    gaussian_noise glass_blur impulse_noise jpeg_compression motion_blur pixelate saturate
    shot_noise snow spatter speckle_noise zoom_blur"""
    assert sorted(KINDS) == files.split()


@pytest.mark.parametrize("kind", KINDS)
def test_more_severe_is_further_away(kind, photos):
    before = photos.clone()
    spoilt = [corrupt(photos, kind, severity) for severity in SEVERITIES]
    assert torch.equal(photos, before)
    assert all(y.shape == photos.shape and y.dtype == torch.uint8 for y in spoilt)
    distances = [distance(y, photos) for y in spoilt]
    means = [d.mean().item() for d in distances]
    for chain in CHAINS.get(kind, (SEVERITIES,)):
        assert all(means[a - 1] < means[b - 1] for a, b in pairwise(chain))
    assert distances[0].min() > 0
    assert 1e-3 < max(means) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_stays_recognisable(kind, photos):
    """Of all the originals, the one most like a spoilt image is nearly always its own."""

    def details(x):
        x = x.double().numpy()
        coarse = gaussian_filter(x, (0, 0, 4, 4), mode="nearest")
        return F.normalize(torch.from_numpy(x - coarse).flatten(1))

    likeness = details(corrupt(photos, kind, 5)) @ details(photos).T
    own = likeness.argmax(1) == torch.arange(len(photos))
    assert own.float().mean() > 0.95


@pytest.mark.parametrize("kind", KINDS)
def test_seed_decides(kind, photos):
    state = torch.get_rng_state()
    first = corrupt(photos, kind, 3, seed=1)
    assert torch.equal(first, corrupt(photos, kind, 3, seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    other = corrupt(photos, kind, 3, seed=2)
    changed = (first != other).flatten(1).any(1).float().mean().item()
    assert changed == 0 if kind in NOT_RANDOM else changed > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_random_parts_differ_between_images(kind, photos):
    twice = photos[:1].repeat(2, 1, 1, 1)
    first, second = corrupt(twice, kind, 3)
    assert torch.equal(first, second) == (kind in NOT_RANDOM)


@pytest.mark.parametrize("kind", sorted(NOT_RANDOM))
def test_images_do_not_depend_on_their_neighbours(kind):
    x = torch.randint(256, (CHUNK + 1, 3, 8, 12), generator=torch.Generator().manual_seed(0))
    x = x.byte()
    whole = corrupt(x, kind, 4)
    for row in (0, CHUNK - 1, CHUNK):
        assert (whole[row] - corrupt(x[row : row + 1], kind, 4)[0].float()).abs().max() <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_any_size_and_none(kind):
    x = torch.randint(256, (2, 3, 9, 17), generator=torch.Generator().manual_seed(0)).byte()
    assert corrupt(x, kind, 5).shape == x.shape
    assert corrupt(x[:0], kind, 5).shape == (0, 3, 9, 17)


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_same_on_a_gpu(kind, photos):
    for severity in SEVERITIES:
        here, there = corrupt(photos, kind, severity), corrupt(photos.cuda(), kind, severity)
        assert there.is_cuda
        assert ((here.int() - there.cpu().int()).abs() > 1).float().mean() < 1e-4


def test_errors_name_the_remedy(photos):
    with pytest.raises(ValueError, match=r"no corruption 'rain'; there are gaussian_noise, .*jpeg"):
        corrupt(photos, "rain", 1)
    for severity in (0, 6, 1.5):
        with pytest.raises(ValueError, match=rf"severity {severity} of 'fog'.*from 1 to 5"):
            corrupt(photos, "fog", severity)
    for bad in (photos.float(), photos[:, :1], photos[0], photos[:, :, :4]):
        with pytest.raises(ValueError, match=r"cannot corrupt .*expected uint8 images \(N, 3"):
            corrupt(bad, "fog", 1)


# -- references ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("severity", "sigma"), [(1, 0.4), (3, 0.7), (5, 1.0)])
def test_gaussian_blur_is_scipys(severity, sigma, photos):
    expected = gaussian_filter(photos.double().numpy(), (0, 0, sigma, sigma), mode="nearest")
    found = corrupt(photos, "gaussian_blur", severity).double().numpy()
    assert np.abs(found - expected).max() < 0.51


@pytest.mark.parametrize(("severity", "size"), [(1, 30), (2, 28), (3, 27), (4, 24), (5, 20)])
def test_pixelate_is_pillows(severity, size, photos):
    found = corrupt(photos, "pixelate", severity).permute(0, 2, 3, 1).int()
    for image, found_pixels in zip(photos.permute(0, 2, 3, 1).numpy(), found, strict=True):
        small = Image.fromarray(image).resize((size, size), Image.BOX)
        expected = torch.tensor(np.asarray(small.resize((32, 32), Image.BOX)))
        assert (found_pixels - expected.int()).abs().max() <= 1


@given(colours, st.sampled_from(SEVERITIES))
def test_brightness_is_the_value_of_hsv(colour, severity):
    hue, saturation, value = colorsys.rgb_to_hsv(*(c / 255 for c in colour))
    value = min(1, value + (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1])
    expected = 255 * torch.tensor(colorsys.hsv_to_rgb(hue, saturation, value))
    found = corrupt(one_colour(colour, 8), "brightness", severity)[0, :, 0, 0]
    assert (found - expected).abs().max() < 0.51


@given(
    colours, st.sampled_from([(1, 1.5, 0), (2, 0.3, 0), (3, 0.1, 0), (4, 2, 0.1), (5, 2.5, 0.2)])
)
def test_saturate_is_the_saturation_of_hsv(colour, setting):
    severity, factor, more = setting
    hue, saturation, value = colorsys.rgb_to_hsv(*(c / 255 for c in colour))
    saturation = min(1, factor * saturation + more)
    expected = 255 * torch.tensor(colorsys.hsv_to_rgb(hue, saturation, value))
    found = corrupt(one_colour(colour, 8), "saturate", severity)[0, :, 0, 0]
    assert (found - expected).abs().max() < 0.51


@given(colours, st.sampled_from(KEEPS_ONE_COLOUR), st.sampled_from(SEVERITIES))
def test_one_colour_has_nothing_to_blur_or_move(colour, kind, severity):
    x = one_colour(colour, 16)
    most = 3 if kind == "jpeg_compression" else 0
    assert (corrupt(x, kind, severity).int() - x.int()).abs().max() <= most


def test_contrast_keeps_means_and_shrinks_spread(photos):
    y = corrupt(photos, "contrast", 5).float()
    assert (y.mean((2, 3)) - photos.float().mean((2, 3))).abs().max() < 0.5
    assert torch.allclose(y.std((2, 3)), 0.15 * photos.float().std((2, 3)), atol=0.3)


def test_noise_has_its_spread():
    x = one_colour((128, 128, 128), count=100)
    grey = 128 / 255
    spread = {
        "gaussian_noise": 0.08,
        "shot_noise": math.sqrt(grey / 100),
        "speckle_noise": 0.12 * grey,
        "impulse_noise": math.sqrt(0.03 / 4),
    }
    for kind, expected in spread.items():
        y = corrupt(x, kind, 3).float() / 255
        assert y.std().item() == pytest.approx(expected, rel=0.02)
        assert y.mean().item() == pytest.approx(grey, abs=0.001)
    impulses = corrupt(x, "impulse_noise", 5)
    assert set(impulses.unique().tolist()) == {0, 128, 255}
    assert (impulses != 128).float().mean().item() == pytest.approx(0.07, rel=0.05)


@pytest.mark.parametrize("kind", ["defocus_blur", "motion_blur", "gaussian_blur"])
def test_blur_keeps_the_light_of_a_dot(kind):
    x = torch.zeros(50, 3, 33, 33, dtype=torch.uint8)
    x[:, :, 16, 16] = 255
    for severity in SEVERITIES:
        y = corrupt(x, kind, severity).float()
        assert (y.sum((2, 3)) - 255).abs().max() < 15  # every pixel is rounded
        assert (y[:, :, 16, 16] < 255).all()


def test_motion_is_along_a_line_near_the_horizontal():
    x = torch.zeros(200, 3, 33, 33, dtype=torch.uint8)
    x[:, :, 16, 16] = 255
    y = corrupt(x, "motion_blur", 5)[:, 0].float()
    along = torch.arange(33.0) - 16
    rows = (y.sum(2) * along).sum(1) / y.sum((1, 2))
    columns = (y.sum(1) * along).sum(1) / y.sum((1, 2))
    slopes = torch.atan2(-rows, -columns).rad2deg()
    assert -50 < slopes.min() < -35
    assert 35 < slopes.max() < 50


def test_zoom_is_torchs(photos):
    x = photos.float()
    zoomed = pixels.zoom(x, 1.25)
    theta = torch.eye(2, 3).repeat(len(x), 1, 1) / 1.25
    grid = F.affine_grid(theta, list(x.shape), align_corners=True)
    assert torch.allclose(zoomed, F.grid_sample(x, grid, align_corners=True), atol=1e-2)


def test_warp_by_whole_pixels_moves_them(photos):
    x = photos.float()
    flow = torch.tensor([2.0, -3.0])[None, :, None, None].expand(len(x), 2, 32, 32)
    warped = pixels.warp(x, flow)
    assert torch.allclose(warped[:, :, :-2, 3:], x[:, :, 2:, :-3], atol=1e-2)


def test_elastic_transform_moves_three_corners_by_up_to_its_shift():
    ramp = (7 * torch.arange(32)).byte()
    x = torch.stack([ramp[:, None].expand(32, 32), ramp.expand(32, 32), ramp.expand(32, 32)])
    moved = corrupt(x.repeat(300, 1, 1, 1), "elastic_transform", 1).float() - x.float()
    for row, column in ((26, 26), (26, 5), (5, 5)):  # within half a pixel of the corners
        rows, columns = moved[:, :2, row, column].T / 7
        assert 1.5 < rows.abs().max() < 2.2
        assert 1.5 < columns.abs().max() < 2.2
        assert rows.std().item() == pytest.approx(1.92 / math.sqrt(3), rel=0.15)


def test_noise_of_a_landscape_weakens_with_the_step():
    x = torch.zeros(100, 3, 32, 32)
    heights = pixels.landscape(x, torch.Generator().manual_seed(0), 1.5)[:, 0]

    def noise(grid):
        """What the middles of squares have beyond the mean of the corners."""
        corners = F.avg_pool2d(grid[:, ::2, ::2][:, None], 2, 1)[:, 0]
        return (grid[:, 1::2, 1::2][:, :-1, :-1] - corners).std()

    assert noise(heights[:, ::2, ::2]) / noise(heights) == pytest.approx(1.5**2, rel=0.05)


def test_snow_falls_from_both_sides():
    y = corrupt(torch.zeros(20, 3, 32, 32, dtype=torch.uint8), "snow", 5)
    assert torch.equal(y, y.rot90(2, (2, 3)))
    assert (y > 60).float().mean() > 0.1


def test_fog_is_smooth_and_spans_its_range():
    x = torch.zeros(50, 3, 32, 32)
    generator = torch.Generator().manual_seed(0)
    fine, coarse = (pixels.landscape(x, generator, decay) for decay in (1.2, 3.0))
    for heights in (fine, coarse):
        assert heights.amin() == 0
        assert heights.amax() == 1
    roughness = [h.diff(dim=3).square().mean() / h.var((2, 3)).mean() for h in (fine, coarse)]
    assert roughness[0] > 10 * roughness[1]
    seam = (coarse[..., 0] - coarse[..., -1]).square().mean()  # the torus closes
    assert seam < 4 * coarse.diff(dim=3).square().mean()


def test_water_lightens_and_mud_darkens():
    x = one_colour((128, 128, 128), count=20)
    assert (corrupt(x, "spatter", 3) >= 128).all()
    mud = corrupt(x, "spatter", 5)
    assert (mud <= 128).all()
    covered = (mud[:, 2] < 40).float().mean().item()
    assert 0.05 < covered < 0.3
