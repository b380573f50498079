"""The attacks themselves: they stay where they may be, have right gradients, and break networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rgpr.model import RGPR
from rgpr_paper import Context
from rgpr_paper.attacks import page
from rgpr_paper.attacks.aims import Answers, answers, both, confident, log_odds, unnoticed
from rgpr_paper.attacks.ascent import Found, Schedule, ascend, best_of
from rgpr_paper.attacks.far import KINDS, at_distance, silent_directions
from rgpr_paper.attacks.near import Attack, Effort, restarted, wrong_classes
from rgpr_paper.attacks.regions import NORMS, Ball, Outside, length
from rgpr_paper.attacks.victims import BASES, SETS, Data, Victim, small_lenet, victim
from rgpr_paper.section import Table
from rgpr_paper.units import read_units

DUAL = {"linf": "l1", "l2": "l2", "l1": "linf"}


@lru_cache(maxsize=2)
def attacked(base: str = "MAP") -> Victim:
    """A model over a network on digits, which was trained for ten epochs."""
    return victim(SETS["digits"](Context(Path("unused"), small=True), 0), base)


# -- regions --------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.sampled_from(sorted(NORMS)), st.integers(1, 40))
def test_the_nearest_point_of_a_ball_is_that_of_convex_geometry(
    seed: int, norm: str, entries: int
) -> None:
    """``p`` is nearest to ``x`` if and only if no point of the ball lies further along ``x - p``.

    Along a direction ``d`` the ball reaches to its radius times the dual norm of ``d``, so this
    decides it without any other projection.
    """
    generator = torch.Generator().manual_seed(seed)
    center, rows = torch.randn(2, 30, entries, generator=generator, dtype=torch.float64)
    radius = 4 * torch.rand(30, 1, generator=generator, dtype=torch.float64)
    ball = Ball(center, radius, norm)
    nearest = ball.nearest(rows)
    assert bool((length(nearest - center, norm) <= radius * (1 + 1e-12)).all())
    away = rows - nearest
    reached = (away * (nearest - center)).sum(1, keepdim=True)
    torch.testing.assert_close(reached, radius * length(away, DUAL[norm]), rtol=1e-9, atol=1e-9)
    inside = length(rows - center, norm) <= radius
    assert bool(torch.isclose(nearest, rows, rtol=0, atol=1e-12).all(1, keepdim=True)[inside].all())
    drawn = ball.inside(generator)
    assert bool((length(drawn - center, norm) <= radius * (1 + 1e-12)).all())


def test_outside_lengthens_what_is_too_near_and_leaves_the_rest() -> None:
    rows = torch.randn(200, 5, dtype=torch.float64)
    distance = torch.full((200, 1), 2.0, dtype=torch.float64)
    moved = Outside(distance).nearest(rows)
    outside = length(rows, "l2") >= distance
    assert 0 < int(outside.sum()) < 200
    assert bool(((moved == rows).all(1, keepdim=True) | ~outside).all())
    others = torch.nn.functional.normalize(torch.randn(500, 5, dtype=torch.float64)) * 2
    gap = torch.cdist(rows, others).amin(1, keepdim=True) - length(moved - rows, "l2")
    assert bool((gap[~outside] >= -1e-12).all())
    assert bool((length(moved, "l2") >= distance * (1 - 1e-12)).all())


def test_steps_have_length_one_and_climb_as_steeply_as_the_norm_allows() -> None:
    gradient = torch.randn(50, 40, dtype=torch.float64)
    ones = torch.ones(50, 1, dtype=torch.float64)
    for norm in NORMS:
        # Squares of gradients so small are zero.
        step = Ball(torch.zeros_like(gradient), ones, norm).steepest(1e-200 * gradient)
        torch.testing.assert_close(length(step, norm), ones)
        slope, steepest = (step * gradient).sum(1), length(gradient, DUAL[norm])[:, 0]
        if norm == "l1":  # two entries are moved, of which the single steepest is one
            assert bool((slope > steepest / 2).all())
        else:
            torch.testing.assert_close(slope / steepest, torch.ones_like(slope))


# -- gradients ------------------------------------------------------------------------------------


def in_float64(base: str, build: Callable[[], nn.Module], shape: tuple[int, ...]) -> RGPR:
    torch.manual_seed(3)
    network = build().double().eval()
    x, y = torch.randn(120, *shape).double(), torch.arange(120) % 10
    data = Data(network, (x, y), (x[:60] + 0.1, y[:60]), (x, y))
    return victim(data, base).model


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 10))


@pytest.mark.parametrize("base", ["MAP", "LLL"])
@pytest.mark.parametrize(
    ("build", "shape"), [(perceptron, (6,)), (lambda: small_lenet(16), (1, 16, 16))]
)
def test_gradients_are_those_of_finite_differences(
    base: str, build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """Of the model's probabilities, its score and what attacks climb; at the data and far away."""
    model = in_float64(base, build, shape)
    target = torch.arange(12) % 10
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "probability": lambda x: model(x).gather(1, target[:, None])[:, 0],
        "score": model.score,
        "log-odds": lambda x: log_odds(answers(model, x).log_p, target),
        "answers' score": lambda x: answers(model, x).score,
    }
    torch.manual_seed(4)
    start, direction = torch.randn(2, 12, *shape).double()
    for scale in (1.0, 3.0, 30.0):
        for name, function in functions.items():
            x = (scale * start).requires_grad_()
            [gradient] = torch.autograd.grad(function(x).sum(), x)
            slope = (gradient * direction).flatten(1).sum(1)
            h = 1e-6 * scale
            with torch.no_grad():
                ahead, behind = (function(scale * start + s * h * direction) for s in (1, -1))
            # A kink of a ReLU between the two points is met by one row in thousands.
            expected = (ahead - behind) / (2 * h)
            torch.testing.assert_close(
                slope, expected, rtol=1e-4, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_log_odds_grow_where_the_probability_has_long_been_one() -> None:
    log_p = torch.tensor([[0.0, -50.0, -60.0], [0.0, -500.0, -600.0]]).double().log_softmax(1)
    odds = log_odds(log_p, torch.tensor([0, 0]))
    torch.testing.assert_close(odds, torch.tensor([50.0, 500.0]).double(), rtol=1e-4, atol=0)
    p = torch.rand(20, 4, dtype=torch.float64).softmax(1)
    plain = (p[:, 2] / (1 - p[:, 2])).log()
    torch.testing.assert_close(log_odds(p.log(), torch.full((20,), 2)), plain)


# -- attacks --------------------------------------------------------------------------------------


def fooled(model: RGPR, radius: float, steps: int) -> tuple[float, float]:
    """Which share of test inputs an attack fools, and which share of random signs does."""
    x, y = attacked().right(False, 40, 0)
    center = x.flatten(1).double()
    ball = Ball(center, torch.full((40, 1), radius, dtype=torch.float64), "linf")
    with torch.no_grad():
        target = wrong_classes(answers(model, x).log_p, y, 1)[0]
    found = ascend(model, confident(target), ball, center, attacked().place, Schedule(steps))
    assert bool((length(found.rows - center, "linf") <= ball.radius * (1 + 1e-12)).all())
    with torch.no_grad():
        signs = answers(model, x + radius * torch.randn(x.shape).sign())
    wrong = found.answers.log_p.argmax(1) != y, signs.log_p.argmax(1) != y
    return float(wrong[0].double().mean()), float(wrong[1].double().mean())


def test_an_attack_breaks_the_base_and_the_model_near_the_data() -> None:
    for model in (attacked().base, attacked().model):
        by_gradients, by_chance = fooled(model, 0.25, 60)
        assert by_gradients >= 0.95
        assert by_chance < 0.3


def test_saturated_probabilities_do_not_stop_an_attack() -> None:
    """Logits times 1000 make every probability 0 or 1 in float32, where its gradient is zero."""
    data = attacked().data
    loud = nn.Sequential(data.network, _Times(1000.0))
    model = RGPR(loud, layers="input").fit([data.train], progress=False)
    model.sigma2 = 0.0
    x = data.test[0][:50].clone().requires_grad_()
    p = model(x).amax(1)
    assert float((p == 1).double().mean()) > 0.9
    assert fooled(model, 0.25, 60)[0] >= 0.95


class _Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def test_an_attack_keeps_the_best_point_and_never_ends_below_its_start() -> None:
    x, _ = attacked().right(True, 20, 0)
    center = x.flatten(1).double()
    ball = Ball(center, torch.full((len(x), 1), 0.5, dtype=torch.float64), "l2")

    def contrary(said: Answers) -> tuple[Tensor, Tensor]:
        """Climbs away from what it is worth, so that every step is worse than the start."""
        return said.score, -said.score

    found = ascend(attacked().model, contrary, ball, center, attacked().place, Schedule(10))
    torch.testing.assert_close(found.rows, center)
    with torch.no_grad():
        start = answers(attacked().model, x).score
    torch.testing.assert_close(found.answers.score, start, rtol=1e-6, atol=1e-6)
    gentle = ascend(attacked().model, unnoticed, ball, center, attacked().place, Schedule(60))
    assert float(gentle.answers.flagged.double().mean()) < 0.5


def test_an_attack_on_both_counts_no_flagged_input() -> None:
    x, y = attacked().right(False, 30, 0)
    center = x.flatten(1).double()
    ball = Ball(center, torch.full((30, 1), 3.0, dtype=torch.float64), "l2")
    with torch.no_grad():
        target = wrong_classes(answers(attacked().model, x).log_p, y, 1)[0]
    found = ascend(attacked().model, both(target), ball, center, attacked().place, Schedule(80))
    greedy = ascend(
        attacked().model, confident(target), ball, center, attacked().place, Schedule(80)
    )
    assert bool(found.worth.isfinite().all())  # each start was unflagged
    assert not bool(found.answers.flagged.any())
    assert bool(greedy.answers.flagged.any())
    assert float((found.worth > 0).double().mean()) > 0.5
    assert float(found.answers.score.max()) <= attacked().threshold + 1e-4
    flags = attacked().model.flag(attacked().place(greedy.rows))
    assert flags.tolist() == greedy.answers.flagged.tolist()


def test_both_lowers_the_score_of_what_is_flagged_and_gives_it_no_worth() -> None:
    log_p = torch.tensor([[0.2, 0.8], [0.2, 0.8]]).double().log()
    said = Answers(log_p, torch.tensor([3.0, -3.0]).double(), torch.tensor([True, False]))
    climbed, worth = both(torch.tensor([1, 1]))(said)
    torch.testing.assert_close(climbed, torch.tensor([-3.0, math.log(4)]).double())
    torch.testing.assert_close(worth, torch.tensor([-math.inf, math.log(4)]).double())


def test_what_another_attack_found_is_a_start() -> None:
    """Without a single step, whatever of it is not flagged is found by an attack on both."""
    one = attacked()
    x, y = one.right(False, 30, 0)
    ball = Ball(x.flatten(1).double(), torch.full((30, 1), 2.0, dtype=torch.float64), "l2")
    attack = Attack(one.model, one.place, Effort(30, 1, 40, 0))
    greedy = restarted(attack, confident, ball, y)
    passing = ~greedy.answers.flagged & (greedy.worth > 0)
    assert bool(passing.any())
    lazy = Attack(one.model, one.place, Effort(30, 1, 0, 0))
    alone, after = (restarted(lazy, both, ball, y, found) for found in (None, greedy))
    assert bool((alone.worth[passing] < 0).all())
    torch.testing.assert_close(after.worth[passing], greedy.worth[passing], rtol=1e-6, atol=1e-6)
    assert not bool(after.answers.flagged.any())


def test_the_best_restart_is_chosen_for_each_input() -> None:
    rows = torch.arange(12.0).reshape(6, 2).double()
    worth = torch.tensor([1.0, 5.0, -math.inf, 2.0, 4.0, 0.0]).double()  # two restarts of three
    said = Answers(rows, worth, worth > 3)
    best = best_of(Found(rows, worth, said, 0.5), 2)
    assert best.worth.tolist() == [2.0, 5.0, 0.0]
    assert best.rows[:, 0].tolist() == [6.0, 2.0, 10.0]
    assert best.answers.flagged.tolist() == [False, True, False]


def test_targets_are_the_most_probable_wrong_classes() -> None:
    log_p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]).double().log()
    y = torch.tensor([0, 2])
    assert wrong_classes(log_p, y, 3).tolist() == [[1, 1], [2, 0], [1, 1]]
    assert wrong_classes(log_p, None, 2).tolist() == [[0, 2], [1, 1]]


# -- far away -------------------------------------------------------------------------------------


def test_silent_directions_change_the_first_layer_least() -> None:
    for data in (attacked().data, _images()):
        one = victim(data, "MAP")
        first = next(m for m in data.network.modules() if isinstance(m, nn.Linear | nn.Conv2d))
        silent = silent_directions(one, 4)
        torch.testing.assert_close(silent @ silent.T, torch.eye(4).double(), atol=1e-6, rtol=0)
        noise = torch.nn.functional.normalize(torch.randn(100, silent.shape[1]).double())

        def change(rows: Tensor, one: Victim = one, first: nn.Module = first) -> Tensor:
            with torch.no_grad():
                moved = first(one.from_standardised(100 * rows))
                return length((moved - first(one.from_standardised(0 * rows))).flatten(1), "l2")

        assert float(change(silent).max()) < 0.2 * float(change(noise).min())


def _images() -> Data:
    torch.manual_seed(0)
    x, y = torch.rand(90, 1, 16, 16), torch.arange(90) % 10
    return Data(small_lenet(16).eval(), (x, y), (x[:45], y[:45]), (x, y))


def test_starts_lie_at_their_distance() -> None:
    offsets, directions = torch.randn(2, 60, 7, dtype=torch.float64)
    directions = torch.nn.functional.normalize(directions)
    for distance in (0.5, 3.0, 1e6):
        rho = torch.full((60, 1), distance, dtype=torch.float64)
        rows = at_distance(offsets, directions, rho)
        torch.testing.assert_close(length(rows, "l2"), rho)
        kept = length(offsets, "l2")[:, 0] < distance
        along = torch.nn.functional.normalize((rows - offsets)[kept])
        torch.testing.assert_close(along, directions[kept], rtol=1e-5, atol=1e-5)


def test_standardised_rows_are_those_of_the_certificate() -> None:
    one = attacked()
    x = one.data.test[0][:20]
    rows = one.standardised(x)
    torch.testing.assert_close(one.from_standardised(rows), x, rtol=1e-5, atol=1e-6)
    certificate = one.model.certify(0.05)
    torch.testing.assert_close(certificate.distance(x), length(rows, "l2")[:, 0], rtol=1e-5, atol=0)


# -- the experiment -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def out(run_small: Callable[[list[str]], Path]) -> Path:
    return run_small(["attacks"]) / "attacks"


def test_small_run_attacks_both_networks_over_both_bases(out: Path) -> None:
    units = {unit.name: unit.result for unit in read_units(out)}
    kinds = ("near", "noise", "far")
    names = {f"{s}-{base}-{kind}" for s in SETS for base in BASES for kind in kinds}
    assert set(units) == names
    for name in SETS:
        near, far = units[f"{name}-MAP-near"], units[f"{name}-MAP-far"]
        for cells in near["cells"].values():
            fooled = [cell["base, fooled"] for cell in cells.values()]
            assert fooled[-1] == 1
            assert fooled[0] < 0.5  # the smallest ball holds an attack, so balls are kept
            for cell in cells.values():
                assert cell["both, fooled and flagged"] == 0
                by_chance = cell["model, fooled"] - cell["model, fooled and flagged"]
                assert cell["both, fooled"] >= by_chance - 1e-9
        for kind in KINDS:
            assert far["base"][kind][-1] > 0.9
            assert far["model"][kind][-1] < 0.15
            assert far["unflagged"][kind][-1] == 0
        for dtype in ("float32", "float64"):
            tried = far[f"beyond, {dtype}"]
            assert tried["covered"]
            assert tried["highest"] <= tried["limit"]


def test_the_attack_on_both_is_not_weaker_than_one_that_looks_at_no_flag() -> None:
    """In the results of the repository: a weak attack would make the flag look like a defence."""
    results = Path(__file__).parents[2] / "results" / "attacks"
    near = [unit.result for unit in read_units(results) if unit.name.endswith("-near")]
    assert len(near) == 4
    for cells in (cells for result in near for cells in result["cells"].values()):
        for cell in cells.values():
            by_chance = cell["model, fooled"] - cell["model, fooled and flagged"]
            assert cell["both, fooled"] >= by_chance - 1e-9


def test_page_shows_tables_claims_and_the_picture(out: Path) -> None:
    section = page.render(out)
    assert [
        claim.holds for claim in section.claims if "certified radius has" in claim.statement
    ] == [True]
    assert len(section.claims) == 9
    assert all(claim.ours for claim in section.claims)
    assert (out / "attacks.png").is_file()
    near, noise, beyond = page.summary(out)
    assert isinstance(near, Table)
    assert isinstance(noise, Table)
    assert isinstance(beyond, Table)
    assert [len(table.rows) for table in (near, noise, beyond)] == [8, 18, 4]
    assert near.rows[0][0] == "digits, MAP, L-inf 0.05"
