"""Make the page of measured settings, with the weight of each token and clipping curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from headrace.pipeline.tools.report import as_html, plain_page, policy

from .measure import Measured, XRay
from .setting import MeasuredSetting

BOUNDS = (0.25, 0.5, 0.8, 0.9999, 1.0001, 1.25, 2.0, 4.0)  # between the nine colours
CELL, GAP = 11, 2
WIDTH, HEIGHT, EDGE, TOP = 270, 150, 20, 6.0
STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --dim: #66707c; --back: #fff; --line: #d7dce2;
  --out: #eef0f3;  --up: #0b6e99; --down: #b3541e;
  --c0: #08407e; --c1: #2171b5; --c2: #6baed6; --c3: #bdd7e7; --c4: #c9d3c5; --c5: #fdd0a2; --c6: #fd8d3c;
  --c7: #d94801; --c8: #8c2d04; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --dim: #98a2ae; --back: #14181d;
  --line: #38404a; --out: #20262d; --up: #6cc4ea; --down: #f0a070;
  --c0: #9ecae1; --c1: #6baed6; --c2: #4292c6; --c3: #2b5d86; --c4: #4b5a4a; --c5: #7f5530; --c6: #c8662a;
  --c7: #f0833a; --c8: #fdbe85; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto;
  max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .2rem; }
p, figcaption { margin: .2rem 0; color: var(--dim); max-width: 60rem; }
.row { display: flex; flex-wrap: wrap; gap: 1.2rem; margin: .6rem 0; } figure { margin: 0; }
.curves figure { width: 270px; }
svg { display: block; overflow: visible; } text { fill: var(--dim); font: 11px system-ui, sans-serif; }
.out { fill: var(--out); } .axis { stroke: var(--line); fill: none; }
.up, .down { fill: none; stroke-width: 2; } .up { stroke: var(--up); }
.down { stroke: var(--down); stroke-dasharray: 5 3; }
""" + "".join(f".c{place} {{ fill: var(--c{place}); }}\n" for place in range(len(BOUNDS) + 1))


def xray_page(title: str, found: XRay | Sequence[MeasuredSetting]) -> str:
    """Return measurements as one HTML file, which loads nothing and runs no script.

    Each run is a panel. The colour of a token is its measured weight, divided by the documented weight.
    Without documentation, the divisor is the weight of the pipeline, or of the mean that was found.
    Measurements with several shifts have a clipping curve.

    Args:
        title: title of the page.
        found: the result of :func:`xray`, or the measured settings of a trainer.

    Example:
        >>> from headrace.pipeline import xray
        >>> def step(model, batch, cut):
        ...     log_probs = model.get_dist(batch).log_prob(batch["tokens", "full"])
        ...     mask = batch["masks", "all_assistant_mask"]
        ...     (-(log_probs * batch["advantage"].squeeze(-1))[mask].mean()).backward()
        >>> page = xray_page("my trainer", xray(step))
        >>> page[:15], page.count("<figure>")
        ('<!doctype html>', 3)
    """
    if isinstance(found, XRay):
        shifted = len({run.shift for run in found.runs}) > 1
        found = [MeasuredSetting(title, found, curve=found.curve() if shifted else {})]
    curves = "".join(_curve(each) for each in found if each.curve)
    if curves:
        curves = (
            "<h2>By the ratio of the policy to the sampling policy</h2><p>The coefficient of a token, "
            "divided by its coefficient at the ratio 1: solid for positive advantages, dashed for negative "
            "ones. Values above 6 are cut off.</p>"
            f'<div class="row curves">{curves}</div>'
        )
    settings = "".join(_setting(each) for each in found)
    body = (
        f"<h1>{as_html(title)}</h1>"
        "<p>Each square is a token, each line a row of the batch. The colour is the token's measured weight, "
        "divided by its weight in the documented mean over the whole step. A pale square is masked, or its "
        f"advantage is 0.</p>{_legend()}{curves}{settings}"
    )
    return plain_page(title, STYLE, body, policy(STYLE, ""))


def _colour(share: float) -> int:
    return sum(share > bound for bound in BOUNDS)


def _legend() -> str:
    names = ["≤ ¼", "≤ ½", "≤ 0.8", "< 1", "1", "> 1", "> 1.25", "> 2", "> 4"]
    marks = "".join(
        f'<rect class="c{place}" x="{place * 64}" y="0" width="{CELL}" height="{CELL}"/>'
        f'<text x="{place * 64 + CELL + 5}" y="{CELL - 1}">{name}</text>'
        for place, name in enumerate(names)
    )
    return f'<svg role="img" aria-label="colours" width="{len(names) * 64}" height="{CELL}">{marks}</svg>'


def _setting(found: MeasuredSetting) -> str:
    documented = f"Documented: {found.documented}" if found.documented else ""
    documented += f", times {found.constant:.6g}" if found.documented and found.constant != 1 else ""
    note = f" ({found.note})" if found.note else ""
    panels = "".join(_panel(run, found.share(run, of_step=True)) for run in found.xray.runs if not run.shift)
    return (
        f"<h2>{as_html(found.name)}</h2><p>{as_html(documented + note)}</p>"
        f"<p>Measured: {as_html(found.xray.verdict)}</p>"
        f'<div class="row">{panels}</div>'
    )


def _panel(run: Measured, share: Tensor) -> str:
    """Draw the tokens of a run. If a weight differs from the documented weight, a tooltip shows it."""
    squares: dict[str, list[str]] = {}
    titles = ""
    rows, width = share.shape
    for row, token in run.tokens.inside.logical_or(share.isfinite()).nonzero().tolist():
        value = float(share[row, token])
        name = f"c{_colour(value)}" if math.isfinite(value) else "out"
        x, y = token * (CELL + GAP), row * (CELL + GAP)
        if name in ("c4", "out"):
            squares.setdefault(name, []).append(f"M{x} {y}h{CELL}v{CELL}h-{CELL}z")
        else:
            titles += (
                f'<rect class="{name}" x="{x}" y="{y}" width="{CELL}" height="{CELL}">'
                f"<title>row {row}, token {token}: {value:.4g}</title></rect>"
            )
    paths = "".join(f'<path class="{name}" d="{"".join(d)}"/>' for name, d in squares.items())
    size = f'width="{width * (CELL + GAP)}" height="{rows * (CELL + GAP)}"'
    return f'<figure><svg role="img" aria-label="{run.where}" {size}>{paths}{titles}</svg>' + (
        f"<figcaption>{run.where}</figcaption></figure>"
    )


def _curve(found: MeasuredSetting) -> str:
    ratios = list(found.curve)
    low, high = math.log(ratios[0]), math.log(ratios[-1])

    def across(ratio: float) -> float:
        return EDGE + (math.log(ratio) - low) / (high - low) * (WIDTH - EDGE)

    def place(ratio: float, value: float) -> str:
        return f"{across(ratio):.1f},{HEIGHT - min(max(value, 0.0), TOP) / TOP * HEIGHT:.1f}"

    lines = "".join(
        f'<polyline class="{name}" points="{" ".join(place(r, v[k]) for r, v in found.curve.items())}"/>'
        for k, name in enumerate(("up", "down"))
    )
    ticks = "".join(
        f'<text text-anchor="middle" x="{across(ratio):.1f}" y="{HEIGHT + 14}">{ratio:.2g}</text>'
        for ratio in (ratios[0], 0.2, 1.0, 5.1, ratios[-1])
    )
    ticks += "".join(
        f'<text x="0" y="{HEIGHT - value / TOP * HEIGHT + 4:.0f}">{value}</text>' for value in (0, 2, 4, 6)
    )
    axis = f'<path class="axis" d="M{EDGE} 0v{HEIGHT}h{WIDTH - EDGE}"/>'
    return (
        f'<figure><svg role="img" aria-label="coefficient by ratio" width="{WIDTH}" height="{HEIGHT + 18}">'
        f"{axis}{ticks}{lines}</svg><figcaption>{as_html(found.name)}</figcaption></figure>"
    )
