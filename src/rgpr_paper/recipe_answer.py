"""Whether a higher FPR95 is the training's, the outliers' or ours: sentences made of numbers."""

from __future__ import annotations

from .recipe_gap import Gap
from .section import Text

__all__ = ["LEVEL", "answer", "question"]

# A mean that is this near to the printed one, in points, is called level with it.
LEVEL = 0.5
_UNNAMED = (
    "the batch size, how images are changed in training, how pixels are scaled, the first layers "
    "and the initial weights of the network, and which test images were split off for validation"
)


def question(title: str) -> str:
    """What the page asks of one set."""
    return f"Is the higher FPR95 on {title} the recipe's, the outliers' or ours?"


def answer(title: str, gaps: dict[str, Gap]) -> list[Text]:
    """The answer for one set, from the gaps of its methods; MAP's comes first.

    Args:
        title: The in-distribution set's name in the paper.
        gaps: The gap of each method, MAP among them.
    """
    network = gaps["MAP"]
    return [
        Text(f"{question(title)} {_of_map(network)}"),
        Text(_of_outliers(network)),
        Text(_not_told_apart(network)),
        *(Text(_beyond_map(gaps, method)) for method in gaps if "-RGPR" in method),
    ]


def _of_map(gap: Gap) -> str:
    """What the paper's recipe does to the gap of MAP."""
    count = len(gap.printed)
    wanted = sum(gap.printed.values()) / count
    fast, paper, closed = gap.left("fast"), gap.left("paper"), gap.closed()
    told = (
        "MAP contains no part of our method, so a gap of MAP cannot be the residual's. Its mean "
        f"FPR95 over the {count} sets is {wanted + fast:.1f} % with the short recipe, "
        f"{wanted + paper:.1f} % with the paper's and {wanted:.1f} % in the paper's table."
    )
    if fast <= LEVEL:
        return (
            f"{told} With the short recipe it is {_beside(fast)} already, so there is no higher "
            f"FPR95 to explain; with the paper's it is {_beside(paper)}."
        )
    if closed <= 0:
        effect = f"closes nothing of the gap of {fast:.1f} points; it is {-closed:.1f} points wider"
    elif paper < -LEVEL:
        effect = f"more than closes the gap of {fast:.1f} points: MAP is {_beside(paper)}"
    else:
        effect = f"closes {closed:.1f} of {fast:.1f} points of the gap, {closed / fast:.0%}"
    return f"{told} The paper's recipe {effect}."


def _of_outliers(gap: Gap) -> str:
    """On which sets the rest of MAP's gap lies."""
    left = gap.left("paper")
    parts = []
    if gap.own:
        share = gap.share("paper", gap.own)
        parts.append(f"{share:+.1f} are on sets with the paper's own images ({_list(gap.own)})")
    if gap.others:
        share = gap.share("paper", gap.others)
        parts.append(f"{share:+.1f} on stand-ins ({_list(gap.others)})")
    told = f"The {left:+.1f} points between MAP and the paper with the paper's recipe are a sum: "
    told += f"{' and '.join(parts)}."
    if not gap.own or not gap.others:
        return told
    own, other = gap.each("paper", gap.own), gap.each("paper", gap.others)
    told += f" A set with the paper's images is {own:+.1f} points from the printed value on average"
    told += f", a stand-in {other:+.1f}."
    if other <= own:
        return f"{told} So stand-ins are no further above the paper's numbers than its own sets."
    excess = (other - own) * len(gap.others) / len(gap.printed)
    return (
        f"{told} By as much as stand-ins exceed that, {excess:.1f} points of the mean, the other "
        "images may be the reason."
    )


def _not_told_apart(gap: Gap) -> str:
    """What is neither the recipe's nor the outliers', and what MAP alone cannot tell."""
    if not gap.own:
        return "Every set of outliers is a stand-in, so nothing can be told apart from the images."
    same = gap.share("paper", gap.own)
    if same <= LEVEL:
        return (
            "On the same images with the same recipe MAP is not above the printed values: "
            f"{same:+.1f} points of the mean.{_of_one_set(gap)}"
        )
    return (
        f"The {same:.1f} points on the same images with the same recipe are neither the recipe's, "
        f"as far as the paper names it, nor the outliers'.{_of_one_set(gap)} In MAP they may come "
        f"from what the paper does not name: {_UNNAMED}. They may be chance as well where there is "
        "one seed. MAP alone cannot tell these apart, because nothing here varies them one by one."
    )


def _of_one_set(gap: Gap) -> str:
    """Which of the sets with the paper's images adds most, and where the others are."""
    if len(gap.own) < 2:
        return ""
    most = max(gap.own, key=lambda kind: gap.share("paper", [kind]))
    others = [kind for kind in gap.own if kind != most]
    return (
        f" {most} alone adds {gap.share('paper', [most]):+.1f}: MAP has "
        f"{gap.ours['paper'][most]:.1f} % and the paper {gap.printed[most]:.1f} %. The others "
        f"({_list(others)}) are {gap.each('paper', others):+.1f} points from the printed values on "
        "average."
    )


def _beyond_map(gaps: dict[str, Gap], method: str) -> str:
    """How much of a method's gap MAP has already, and what the base and the residual add."""
    whole, network = gaps[method].left("paper"), gaps["MAP"].left("paper")
    base = gaps[method.partition("-RGPR")[0]].left("paper") if "LLL" in gaps else network
    residual = whole - base
    told = (
        f"{method}: of its {whole:+.1f} points, {network:+.1f} are MAP's, {base - network:+.1f} "
        f"come with the base (LLL) and {residual:+.1f} with the residual."
    )
    if residual <= LEVEL:
        return f"{told} So the residual takes from the base at least what it takes in the paper."
    return (
        f"{told} So the residual takes {residual:.1f} points less from the base than in the paper, "
        "and this part is ours or that of the networks below; MAP cannot say which."
    )


def _beside(gap: float) -> str:
    if abs(gap) <= LEVEL:
        return "level with the paper's"
    return f"{abs(gap):.1f} points {'above' if gap > 0 else 'below'} the paper's"


def _list(kinds: list[str]) -> str:
    return ", ".join(kinds)
