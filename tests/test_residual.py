from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rgpr.kernels import dscs_diag
from rgpr.residual.collecting import Collector
from rgpr.residual.coordinates import Standardizer
from rgpr.residual.recipes import Strategy
from rgpr.residual.variance import CLASS_UNIT, SHARE, Residual


def residual(sigma2: list[float] | None = None) -> Residual:
    coordinates = [Standardizer(torch.randn(n), torch.rand(n) + 0.5) for n in (3, 8)]
    return Residual(coordinates, None if sigma2 is None else torch.tensor(sigma2))


def with_onset(sigma2: list[float], onset: float = 1.0, typical: list[float] | None = None):  # type: ignore[no-untyped-def]
    coordinates = [Standardizer(torch.zeros(2), torch.ones(2)) for _ in sigma2]
    return Residual(
        coordinates,
        torch.tensor(sigma2).double(),
        combine="onset",
        typical=None if typical is None else torch.tensor(typical).double(),
        onset=onset,
    )


def test_u_is_the_kernel_of_the_standardised_representation() -> None:
    r, h = residual(), torch.randn(5, 2, 4)
    z = (h.flatten(1).double() - r.coordinates[1].mean) / r.coordinates[1].scale
    u = r.at(1).unit_variance(h)
    assert u.dtype == torch.float64
    torch.testing.assert_close(u, dscs_diag(z), rtol=1e-5, atol=0)


def test_u_does_not_depend_on_how_many_rows_fit_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    r, h = residual(), torch.randn(7, 8)
    whole = r.at(1).unit_variance(h)
    monkeypatch.setattr("rgpr._backend.arithmetic._CACHED", 16)
    torch.testing.assert_close(r.at(1).unit_variance(h), whole)


@pytest.mark.parametrize("unit", [1e-15, 1e-3, 1.0, 1e6, 1e15])
def test_u_in_any_unit(unit: float) -> None:
    """Data in metres or in light years: cubes must neither overflow nor vanish."""
    h, mean, std = torch.randn(6, 20), torch.randn(20), torch.rand(20) + 0.5
    reference = Residual([Standardizer(mean, std)]).at(0).unit_variance(h)
    scaled = Residual([Standardizer(unit * mean, unit * std)]).at(0).unit_variance(unit * h)
    torch.testing.assert_close(scaled, reference, rtol=1e-4, atol=0)


def test_v_is_linear_in_sigma2() -> None:
    u = torch.rand(5, 2, dtype=torch.float64)
    expected = 0.5 * u[:, 0] + 2 * u[:, 1]
    torch.testing.assert_close(residual([0.5, 2.0])(u), expected)
    assert torch.equal(residual()(u), torch.zeros(5, dtype=torch.float64))


def test_a_kernel_that_is_off_stays_off_at_infinity() -> None:
    u = torch.tensor([[1.0, torch.inf], [torch.inf, 1.0]], dtype=torch.float64)
    assert residual([0.5, 0.0])(u).tolist() == [0.5, torch.inf]
    onset = with_onset([0.5, 0.0])
    assert onset(u)[0].isfinite()
    assert onset(u)[1] == torch.inf


def test_a_row_with_a_nan_has_no_variance_even_if_all_is_off() -> None:
    u = torch.tensor([[torch.nan, torch.nan], [1.0, 1.0]], dtype=torch.float64)
    for scales in ([0.5, 2.0], [0.0, 2.0], [0.0, 0.0]):
        for one in (residual(scales), with_onset(scales)):
            assert one(u)[0].isnan()
            assert one(u)[1].isfinite()
            assert one.contributions(u)[0].isnan().all()
            assert one.strangeness(u)[0].isnan()


def by_hand(u: Tensor, sigma2: list[float], typical: list[float], onset: float) -> list[float]:
    """The default variance, row by row, with the formula as the module's head has it."""
    found = []
    for row in u.tolist():
        parts = [s * value for s, value in zip(sigma2, row, strict=True)]
        chosen = [i for i in range(1, len(parts)) if sigma2[i] > 0 and typical[i] > 0] or [0]
        logs = [math.log(max(parts[i], 1e-300)) for i in chosen]
        together = math.exp(math.fsum(logs) / len(logs))
        together += SHARE * math.fsum(parts) / len(parts)
        found.append(CLASS_UNIT * max(0.0, together - onset))
    return found


@pytest.mark.parametrize(
    ("sigma2", "typical"),
    [
        ([1.0, 2.0, 0.5], [1.0, 1.0, 1.0]),
        ([1.0, 0.0, 0.5], [1.0, 1.0, 1.0]),  # one is switched off
        ([1.0, 2.0, 0.5], [1.0, 0.0, 1.0]),  # one never varied
        ([1.0, 0.0, 0.5], [1.0, 1.0, 0.0]),  # the input alone is left for the geometric mean
        ([1.0, 0.0, 0.0], [0.0, 1.0, 1.0]),
        ([0.0, 2.0, 0.5], [1.0, 1.0, 1.0]),
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]),
    ],
)
def test_the_default_variance_is_its_formula(sigma2: list[float], typical: list[float]) -> None:
    u = 10 ** (4 * torch.rand(50, 3, dtype=torch.float64) - 2)
    u[0, 1], u[1], u[2, 0] = 0.0, 0.0, 0.0
    found = with_onset(sigma2, 0.7, typical)(u)
    expected = torch.tensor(by_hand(u, sigma2, typical, 0.7), dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    weights = with_onset(sigma2, 0.7, typical).exponents
    assert float(weights.sum()) == pytest.approx(1)


def test_the_default_variance_sets_in_continuously() -> None:
    r = with_onset([0.01, 1.0], onset=1.0)
    u = torch.stack([torch.zeros(5).double(), torch.tensor([0.0, 0.9, 0.99, 1.0, 1.01])], 1)
    v = r(u)
    assert torch.equal(v[:3], torch.zeros(3).double())
    # The onset lies a share of the mean before one.
    step = CLASS_UNIT * (1 + SHARE / 2) * 0.01
    assert float(v[4] - v[3]) == pytest.approx(step)
    assert 0 < float(v[3]) < step


def test_layers_have_to_agree_that_an_input_is_unusual() -> None:
    """One layer far beyond the onset is not enough while another one is where it always is."""
    r = with_onset([1.0, 1.0, 1.0], onset=4.0)
    u = torch.tensor([[1.0, 10.0, 1.0], [1.0, 10.0, 10.0]], dtype=torch.float64)
    assert r(u)[0] == 0
    assert r(u)[1] > 0


def test_an_infinite_layer_beside_a_silent_one() -> None:
    """The sum is infinite, and the product is no NaN."""
    residual = with_onset([1.0, 1.0, 1.0])
    u = torch.tensor([[1e115, torch.inf, 0.0], [1e3, 0.0, torch.inf]]).double()
    assert residual(u).tolist() == [torch.inf, torch.inf]
    assert residual.strangeness(u).tolist() == [torch.inf, torch.inf]


def test_gradients_of_a_silent_layer_are_numbers() -> None:
    u = torch.tensor([[0.0, 0.0, 5.0], [1.0, 1e-200, 1e300], [0.0, 0.0, 0.0]], dtype=torch.float64)
    u.requires_grad_()
    r = with_onset([1.0, 1.0, 1.0], onset=0.001)
    for value in (r(u), r.strangeness(u)):
        [gradient] = torch.autograd.grad(value.sum(), u)
        assert gradient.isfinite().all()


values = st.one_of(st.just(0.0), st.just(torch.inf), st.floats(1e-300, 1e300))


@given(
    rows=st.lists(st.tuples(values, values, values), min_size=1, max_size=4),
    sigma2=st.tuples(*[st.sampled_from([0.0, 0.3, 1e9])] * 3),
    typical=st.tuples(*[st.sampled_from([0.0, 2.0])] * 3),
)
def test_derivatives_change_no_bit(
    rows: list[tuple[float, ...]], sigma2: tuple[float, ...], typical: tuple[float, ...]
) -> None:
    """Silent, infinite and switched-off layers too, and so does not knowing what is finite."""
    r = with_onset(list(sigma2), 0.5, list(typical))
    u = torch.tensor(rows, dtype=torch.float64)
    asked = u.clone().requires_grad_()
    assert torch.equal(r(u), r(asked))
    assert torch.equal(r.strangeness(u), r.strangeness(asked))
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(r(u), r(u.clone()))
    if bool(u.isfinite().all()) and bool((u * r.sigma2).isfinite().all()):
        assert torch.equal(r(u), r(u, finite=True))
        assert not r(u).isnan().any()


def test_the_weights_of_layers_are_the_same_inside_of_graphs() -> None:
    """Values that cannot be looked at are compared by tensors alone."""
    for flags in itertools.product([0.0, 1.0], repeat=4):
        r = with_onset([1.0] * 4, typical=list(flags))
        [mapped] = torch.func.vmap(lambda _, r=r: r.exponents)(torch.zeros(1))
        assert torch.equal(mapped, r.exponents)


changes = st.tuples(
    st.sampled_from(["sigma2", "typical"]),
    st.sampled_from(["in place", "another tensor", "behind torch's back"]),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.5, 3.0]),
)


@given(st.lists(changes, max_size=8))
def test_the_weights_of_layers_follow_every_change(
    changed: list[tuple[str, str, int, float]],
) -> None:
    """However the tensors that they are made of were changed."""
    r, u = with_onset([1.0, 1.0, 1.0], 0.2), torch.rand(4, 3, dtype=torch.float64)
    for name, how, layer, value in changed:
        r(u)
        if how == "another tensor":
            setattr(r, name, getattr(r, name).clone())
        tensor = getattr(r, name)
        (tensor.numpy() if how == "behind torch's back" else tensor)[layer] = value
        anew = with_onset(r.sigma2.tolist(), 0.2, r.typical.tolist())
        assert torch.equal(r(u), anew(u))
        assert torch.equal(copy.deepcopy(r)(u), anew(u))


def test_the_weights_of_layers_are_no_constants_of_a_graph() -> None:
    r, u = with_onset([1.0, 1.0, 1.0], 0.2), torch.rand(4, 3, dtype=torch.float64)
    r(u)
    graph = torch.export.export(r, (u,)).module()
    graph.sigma2[1] = r.sigma2[1] = 0
    torch.testing.assert_close(graph(u), r(u))


def test_the_weights_of_layers_are_where_the_scales_are() -> None:
    """Whatever device is the default."""
    r, u = with_onset([1.0] * 9, 0.2), torch.rand(4, 9, dtype=torch.float64)
    with torch.device("meta"):
        assert r.exponents.device == r.sigma2.device
    assert r(u).isfinite().all()


def test_whoever_changes_the_weights_of_layers_changes_no_answer() -> None:
    r, u = with_onset([1.0] * 3, 0.2), torch.rand(4, 3, dtype=torch.float64)
    expected = r(u)
    r.exponents.zero_()
    assert torch.equal(r(u), expected)


def test_gradients_through_vmap_of_a_silent_layer_are_numbers() -> None:
    r = with_onset([1.0, 1.0, 1.0], 0.2)
    u = torch.tensor([[1.0, 0.0, 3.0], [2.0, 1.0, 3.0]], dtype=torch.float64)
    through = torch.func.grad(lambda u: torch.func.vmap(lambda row: r(row[None])[0])(u).sum())(u)
    plain = torch.func.grad(lambda u: r(u).sum())(u)
    torch.testing.assert_close(through, plain)
    assert through.isfinite().all()


def test_gradients_through_an_exported_graph_of_a_silent_layer_are_numbers() -> None:
    """The graph is traced with an example that wants no gradient, and used with one that does."""
    r = with_onset([1.0, 1.0, 1.0], 0.2)
    u = torch.tensor([[1.0, 0.0, 3.0], [2.0, 1.0, 3.0]], dtype=torch.float64)
    graph = torch.export.export(r, (u,)).module()
    u.requires_grad_()
    through, plain = (torch.autograd.grad(each(u).sum(), u)[0] for each in (graph, r))
    torch.testing.assert_close(through, plain)
    assert through.isfinite().all()


def test_the_weights_of_layers_are_usable_outside_of_inference_mode() -> None:
    u = torch.rand(4, 3, dtype=torch.float64)
    r = with_onset([1.0, 1.0, 1.0], 0.2)
    with torch.inference_mode():
        expected = r(u)
        made_inside = with_onset([1.0, 1.0, 1.0], 0.2)
        assert torch.equal(made_inside(u), expected)
    made_inside(u.clone())
    found = r(u.requires_grad_())
    found.sum().backward()
    assert torch.equal(found, expected)


anything = st.one_of(values, st.just(math.nan))


@given(
    rows=st.lists(st.tuples(anything, anything, anything), min_size=1, max_size=4),
    sigma2=st.tuples(*[st.sampled_from([0.0, 0.3])] * 3),
    typical=st.tuples(*[st.sampled_from([0.0, 2.0])] * 3),
    combine=st.sampled_from(["sum", "onset"]),
)
def test_rows_that_are_wrongly_taken_for_finite_are_seen_in_the_answer(
    rows: list[tuple[float, ...]],
    sigma2: tuple[float, ...],
    typical: tuple[float, ...],
    combine: str,
) -> None:
    r = with_onset(list(sigma2), 0.5, list(typical))
    r = r if combine == "onset" else r.with_onset(None, r.slope)
    u = torch.tensor(rows, dtype=torch.float64)
    good = u.isfinite().all(1)
    for measure in (r, r.beyond, r.strangeness):
        found = measure(u, finite=True)
        assert not found[~good].isfinite().any()
        assert torch.equal(found[good], measure(u[good]))


def test_scales_and_onset_do_not_change_what_is_strange() -> None:
    u = torch.rand(20, 3, dtype=torch.float64)
    reference = with_onset([1.0, 2.0, 3.0], 1.0, [0.5, 0.2, 0.1]).strangeness(u)
    for sigma2, onset in (([0.0, 0.0, 0.0], 1.0), ([9.0, 0.0, 1.0], 5.0)):
        other = with_onset(sigma2, onset, [0.5, 0.2, 0.1])
        assert torch.equal(other.strangeness(u), reference)


def test_a_slope_is_a_factor_on_all_scales_and_the_onset() -> None:
    r = with_onset([1.0, 2.0], 1.0, [0.5, 0.2])
    u = 10 * torch.rand(20, 2, dtype=torch.float64)
    other = r.with_onset(torch.tensor(2.0).double(), torch.tensor(3.0).double())
    assert other.coordinates is r.coordinates
    torch.testing.assert_close(other(u), with_onset([3.0, 6.0], 6.0, [0.5, 0.2])(u))
    assert float(r.onset) == float(r.slope) == 1


@given(
    st.lists(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), min_size=1, max_size=5),
    st.lists(st.sampled_from([0.0, 0.1, 1.0, 30.0]), min_size=3, max_size=3),
    st.sampled_from(["sum", "onset"]),
)
def test_what_is_guaranteed_is_kept(u: list[list[float]], sigma2: list[float], how: str) -> None:
    """A certificate rests on this: the variance is at least linear in every u beyond a start."""
    r = with_onset(sigma2, 2.0)
    if how == "sum":
        r.onset = None
    else:
        r.slope = torch.tensor(1.7).double()
    weights, start = r.guaranteed()
    rows = torch.tensor(u, dtype=torch.float64)
    least = (rows @ weights - start).clamp_min(0)
    assert (r(rows) / r.unit >= least * (1 - 1e-12)).all()


@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["moments", "whitened", "prototypes"]),
    of=st.sampled_from(["raw", "pooled", "normalised"]),
    offset=st.sampled_from([None, 0.5, 1.0]),
    size=st.sampled_from([1e-3, 1.0, 1e6]),
)
def test_the_residual_computes_with_the_papers_kernel(
    seed: int, kind: str, of: str, offset: float | None, size: float
) -> None:
    """``u`` is ``dscs_diag`` of the coordinates, to the last digits of float64."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (40,), generator=generator)
    collector = Collector(Strategy(kind, of, offset=offset))
    rows = collector.take(data)
    if collector.needs_classes:
        collector.update(rows, y, 3)
    coordinates = collector.finish()
    h = size * torch.randn(9, 5, generator=generator, dtype=torch.float64)
    start = 0.0 if coordinates.offset is None else coordinates.offset
    expected = dscs_diag(coordinates(h), offset=start)
    torch.testing.assert_close(coordinates.unit_variance(h), expected, rtol=1e-12, atol=1e-12)


def test_the_sum_in_its_unit_is_the_variance_divided_by_it() -> None:
    """And that is all it guarantees: nothing has to be exceeded first."""
    coordinates = [Standardizer(torch.zeros(2), torch.ones(2)) for _ in range(2)]
    r = Residual(coordinates, torch.tensor([0.5, 2.0]), combine="sum", unit=2.5)
    u = torch.rand(6, 2).double()
    torch.testing.assert_close(r.beyond(u), r(u) / 2.5)
    weights, start = r.guaranteed()
    assert start == 0
    torch.testing.assert_close(u @ weights, r(u) / 2.5)
