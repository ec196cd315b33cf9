"""Draw the pictures of the gallery and of the concepts: `python docs/gallery.py`, a minute or two.

The runs are real and small: two seeds of 60 rounds on the phishing data. Their pictures are those that
`trilemma plot` and `trilemma table --format png` draw.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

import trilemma as tl
from trilemma import aggregation as agg
from trilemma.attacks import View, attacks
from trilemma.base.keys import Key
from trilemma.report.curves import PALETTE
from trilemma.report.picture_files import save_picture
from trilemma.report.pictures import draw

IMAGES = Path(__file__).parent / "images/gallery"
COMMON = {"data": "phishing", "model": "logistic", "clients": 7, "byzantine": 3, "rounds": 60, "seeds": 2}
RULES = ("mean", "krum", "cwmed", "geomed", "caf")
LIES = ("sf", "alie", "ipm", "mimic")
STRENGTH = {"alie": 1.5, "ipm": 0.5}


def main() -> None:
    """Draw them all."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        of_runs(Path(scratch))
    of_rules(IMAGES / "rules.png")
    of_attacks(IMAGES / "attacks.png")
    for picture in IMAGES.glob("*.png"):  # 64 colours are enough, and a page loads quickly
        Image.open(picture).convert("RGB").quantize(64).save(picture, optimize=True)


def of_runs(scratch: Path) -> None:
    """Draw what `plot` knows: curves, suspects, privacy, cost."""
    runs = {
        rule: tl.run(
            rule=rule, attack="ipm", out=scratch / rule, progress=False, baseline=True,
            algorithm={"name": "dsgd", "momentum": 0.9}, **COMMON,
        )
        for rule in ("mean", "caf", "nnm+cwmed")
    }  # fmt: skip
    draw(list(runs.values()), "curves", IMAGES / "curves.png")
    draw([runs["caf"]], "suspects", IMAGES / "suspects.png")
    draw([runs["caf"]], "cost", IMAGES / "cost.png")
    private = [
        tl.run(
            rule="caf", attack="ipm", out=scratch / f"private{epsilon}", progress=False,
            algorithm={"name": "safe-dshb", "lr": 0.3, "batch_size": 50, "unit": "example"},
            privacy=tl.Privacy(threat="ldp", clip=1.0, epsilon=epsilon, delta=1e-4), **COMMON,
        )
        for epsilon in (1, 4)
    ]  # fmt: skip
    draw(private, "privacy", IMAGES / "privacy.png")


def messages() -> torch.Tensor:
    """Return nine honest messages of two coordinates."""
    drawn = torch.randn(9, 2, generator=torch.Generator().manual_seed(4))
    return torch.tensor([2.0, 1.0]) + 0.6 * drawn


def of_rules(path: Path) -> None:
    """Draw where each rule puts the aggregate of nine honest messages and three lies."""
    honest = messages()
    lies = torch.tensor([[-3.0, 2.6], [-3.3, 2.2], [-2.8, 3.0]])
    figure = Figure(figsize=(7.5, 3.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    _clients(axes, honest, lies)
    for colour, name in zip(PALETTE, RULES, strict=False):
        value = agg.parse(name, f=3)(torch.cat([honest, lies])).value
        axes.plot(*value.tolist(), "D", color=colour, markersize=9, label=name)
    axes.plot(*honest.mean(0).tolist(), "k+", markersize=15, mew=2, label="honest mean")
    axes.set_title(
        "Nine honest messages, three lies, and what rules make of them", fontsize="medium", loc="left"
    )
    axes.legend(loc="lower left", fontsize="small", ncols=2)
    save_picture(figure, path)


def of_attacks(path: Path) -> None:
    """Draw what liars send under some attacks, beside the honest messages."""
    honest = messages()
    view = View(
        honest=honest, own=None, byzantine=3, round=0, key=Key(0),
        target=agg.mean(f=3),
    )  # fmt: skip
    figure = Figure(figsize=(7.5, 2.6), dpi=110, layout="constrained")
    for axes, name in zip(figure.subplots(1, len(LIES), sharex=True, sharey=True), LIES, strict=True):
        options = {"strength": STRENGTH[name]} if name in STRENGTH else {}
        _clients(axes, honest, attacks[name](**options).build().craft(view).messages)
        axes.set_title(name, fontsize="medium", loc="left")
    save_picture(figure, path)


def _clients(axes: Axes, honest: torch.Tensor, lies: torch.Tensor) -> None:
    axes.plot(*honest.T.tolist(), "o", color="#888888", label="honest")
    axes.plot(*lies.T.tolist(), "x", color=PALETTE[1], mew=2, label="lie")
    axes.axhline(0, color="#cccccc", linewidth=0.8, zorder=0)
    axes.axvline(0, color="#cccccc", linewidth=0.8, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
