"""The figures of the study, from its rows. Small PNG files. Leaves out where the rows come from."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
SIZE_INCHES, DOTS_PER_INCH = (7.0, 4.2), 80


def p99_s(row: Mapping[str, Any], kind: str = "all") -> float:
    """Of that kind, in seconds."""
    return row[kind]["p99_ms"] / 1e3


def lines(rows: Rows, x: str) -> dict[str, tuple[list[float], list[float]]]:
    """By arm, in order of first appearance: values of `x`, and the p99 in s at each."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        xs, ys = found.setdefault(row["arm"], ([], []))
        xs.append(row[x])
        ys.append(p99_s(row))
    return found


def draw(rows: Mapping[str, Rows], folder: Path) -> list[Path]:
    """One file for each experiment that has a figure and rows."""
    drawn: list[Path] = []
    for name, figure in FIGURES.items():
        if rows.get(name):
            path = folder / f"{name}.png"
            figure(rows[name], path)
            drawn.append(path)
    return drawn


def _axes(title: str, x_label: str, y_label: str) -> tuple[Any, Any]:
    # Imported here: nothing else in the package needs it, and it takes a second.
    import matplotlib  # noqa: PLC0415

    matplotlib.use("Agg")
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def _by_line(title: str, x: str, x_label: str, *, x_scale: str = "log") -> Callable[[Rows, Path], None]:
    def figure(rows: Rows, path: Path) -> None:
        drawing, axes = _axes(title, x_label, "p99 in s")
        for number, (arm, (xs, ys)) in enumerate(lines(rows, x).items()):
            axes.plot(xs, ys, marker="osv^Dx*P"[number % 8], label=arm)
        axes.set_yscale("log")
        axes.set_xscale(x_scale, **({"linthresh": 0.1} if x_scale == "symlog" else {}))
        ticks = sorted({row[x] for row in rows})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.legend(fontsize="small")
        drawing.savefig(path)

    return figure


def ratios(rows: Rows) -> list[dict[str, Any]]:
    """Of each `dedicated` arm, its p99 of both kinds over that of `orthrus` under the same load."""
    about = ("embed_share", "utilisation", "bursts")
    mixed = {tuple(row[key] for key in about): row for row in rows if row["arm"] == "orthrus"}
    found: list[dict[str, Any]] = []
    for row in rows:
        if row["arm"] != "orthrus":
            other = mixed[tuple(row[key] for key in about)]
            by_kind = {kind: p99_s(row, kind) / p99_s(other, kind) for kind in ("embed", "generate")}
            found.append({**{key: row[key] for key in about}, "arm": row["arm"], "fullest": row["fullest"], **by_kind})
    return found


def _dedicated(rows: Rows, path: Path) -> None:
    drawing, axes = _axes(
        "dedicated over orthrus, four H200s: below 1 dedicated is better",
        "load of the split's fuller part, if both kinds had engines of their own",
        "p99 ratio",
    )
    for kind, marker in (("embed", "s"), ("generate", "o")):
        steady = [one for one in ratios(rows) if not one["bursts"]]
        axes.scatter(
            [one["fullest"] * one["utilisation"] for one in steady],
            [one[kind] for one in steady],
            marker=marker,
            label=kind,
        )
    axes.axhline(1.0, color="grey")
    axes.axvline(1.0, color="grey", linestyle=":")
    axes.set_yscale("log")
    axes.legend()
    drawing.savefig(path)


FIGURES: dict[str, Callable[[Rows, Path], None]] = {
    "sizes": _by_line("p99 by rule and number of replicas, load 0.85", "replicas", "replicas"),
    "looked_at": _by_line(
        "p99 by how many replicas are looked at, 64 replicas, 32 Fronts",
        "gap_s",
        "time between two reports of a replica, s",
    ),
    "fronts": _by_line("p99 by rule and number of Fronts, 64 replicas", "fronts", "Fronts"),
    "delays": _by_line(
        "p99 by rule and delay of reports, 64 replicas, 16 Fronts", "delay_s", "delay, s", x_scale="symlog"
    ),
    "dedicated": _dedicated,
}
