"""A bar chart of benchmark scores: a panel per metric, a group per task, a bar per model with its 95 % interval."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.styles import COLOURS, arm_numbers, colour_of, hatch_of

FORMATS = (".png", ".pdf", ".svg")
MOST_TASKS = 24  # in one panel; more would not be readable


def draw_scores(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the rows of ``score_rows`` into ``path``. A dashed mark is what guessing gives."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in rows if isinstance(row["value"], int | float)]
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    widest = max(len({row["task"] for row in rows if row["metric"] == metric}) for metric in metrics)
    size = (max(7.0, 2 + 0.35 * min(widest, MOST_TASKS) * (len(models) + 1)), 3.4 * len(metrics) + 0.6)
    figure, panels = plt.subplots(len(metrics), 1, figsize=size, layout="constrained", squeeze=False)
    for axes, metric in zip(panels[:, 0], metrics, strict=True):
        _draw_panel(axes, metric, models, [row for row in rows if row["metric"] == metric])
    handles, labels = panels[0, 0].get_legend_handles_labels()
    columns = max(1, int(size[0] * 10 // (max(map(len, labels)) + 6)))  # about ten characters an inch
    figure.legend(handles, labels, loc="outside lower center", frameon=False, ncols=columns)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_panel(axes: Any, metric: str, models: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    every = list(dict.fromkeys(row["task"] for row in rows))
    tasks, width = every[-MOST_TASKS:], 0.8 / len(models)  # the last is the whole of a group
    short, styles = short_names(models), model_styles(models)
    for i, model in enumerate(models):
        colour, hatch = styles[model]
        mine = [row for row in rows if row["model"] == model and row["task"] in tasks]
        places = [tasks.index(row["task"]) + (i - (len(models) - 1) / 2) * width for row in mine]
        look = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": short[model]}
        axes.bar(places, [row["value"] for row in mine], width * 0.92, **look)
        for place, row in zip(places, mine, strict=True):
            if row["low"] is not None:
                ends = [[row["value"] - row["low"]], [row["high"] - row["value"]]]
                axes.errorbar(place, row["value"], yerr=ends, fmt="none", ecolor="black", elinewidth=1, capsize=2)
    chances = {row["task"]: row["chance"] for row in rows if row["chance"] is not None and row["task"] in tasks}
    for i, (task, chance) in enumerate(chances.items()):
        label = None if i else "guessing"
        place = tasks.index(task)
        axes.hlines(chance, place - 0.45, place + 0.45, color="0.35", linestyle="--", linewidth=1, label=label)
    axes.set_xticks(range(len(tasks)), tasks, rotation=30 if len(tasks) > 4 else 0, ha="right" if len(tasks) > 4 else "center")
    room = 0.6 + max(0, 3 - len(tasks)) / 2  # a single task does not fill the panel
    axes.set_xlim(-room, len(tasks) - 1 + room)
    direction = {True: ", higher is better", False: ", lower is better"}.get(rows[0]["higher_is_better"], "")
    left_out = f" (the last {MOST_TASKS} of {len(every)} tasks)" if len(every) > MOST_TASKS else ""
    axes.set(title=f"{metric}{direction}{left_out}", ylabel=metric, ylim=(0, None))
    axes.grid(axis="y", alpha=0.25)


def model_styles(models: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and hatching of each model's bars: an arm's own, which its folder names; further seeds of an arm are hatched."""
    arms = {model: Path(model).name or model for model in models}
    numbers, seen = arm_numbers(arms.values()), Counter()
    styles = {}
    for model, arm in arms.items():
        number = numbers[arm] + len(COLOURS) * seen[arm]
        styles[model], seen[arm] = (colour_of(number), hatch_of(number)), seen[arm] + 1
    return styles


def short_names(models: Sequence[str]) -> dict[str, str]:
    """Each model's name without the folders that all of them lie in."""
    if len(models) == 1:
        return {models[0]: Path(models[0]).name or models[0]}
    parts = [model.split("/") for model in models]
    shortest = min(map(len, parts)) - 1  # something must be left of each
    same = next((i for i in range(shortest) if len({words[i] for words in parts}) > 1), shortest)
    return {model: "/".join(words[same:]) for model, words in zip(models, parts, strict=True)}
