"""How each picture of the concept pages is drawn, by matplotlib, from the facts that ``concept_runs`` records.

Pictures are narrow, because a telephone shows them at about two thirds of their size.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from draw import GROUPS, INK, LINE, OTHER, OWN, PAPER, RANKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.8  # inches
CENTERED = {"ha": "center", "va": "center_baseline"}
SQUARE = "square,pad=0.35"


def held_tensors(facts: dict[str, Any]) -> Figure:
    """Strategies as rows, ranks as columns; a square is the weight of one layer, filled where the rank holds it."""
    kinds = {"parameters": "P", "gradients": "G", "exp_avg": "M", "exp_avg_sq": "V"}
    rows, columns = facts["shape"]
    figure = _figure(7.4)
    _note(
        figure,
        "Each square is one layer's weight; filled is what the rank holds.",
        "P parameters, G gradients, M and V the two averages of AdamW.",
    )
    for part, (strategy, ranks) in zip(
        _subfigures(figure, len(facts["held"])), facts["held"].items(), strict=True
    ):
        grid = part.subplots(1, len(ranks))
        for rank, (axes, held) in enumerate(zip(grid, ranks, strict=True)):
            for at, layer in itertools.product(range(len(kinds)), range(facts["layers"])):
                boxes = held[[*kinds][at]].get(f"layers.{layer}.weight", [])
                whole = {"rows": [0, rows], "columns": [0, columns]}
                for box in [*boxes, *[whole] * (whole not in boxes)]:
                    (top, bottom), (left, right) = box["rows"], box["columns"]
                    fill = "none" if box not in boxes else RANKS[rank]
                    place = (at + 0.85 * left / columns, layer + 0.85 * top / rows)
                    size = (0.85 * (right - left) / columns, 0.85 * (bottom - top) / rows)
                    _rectangle(axes, place, size, facecolor=fill, edgecolor=LINE)
            axes.set(xlim=(0, 4), ylim=(4, -0.1), aspect="equal", yticks=[])
            axes.set_xticks([0.42 + at for at in range(4)], kinds.values())
            _bare(axes)
            axes.set_title(f"rank {rank}", color=RANKS[rank], fontsize=9)
        shares = {f"{_share(held['parameters'], facts):.0%}" for held in ranks}
        assert len(shares) == 1, "the title of a row says one number for all ranks"
        part.suptitle(
            f"{strategy}: {shares.pop()} of the model on each rank",
            x=0,
            ha="left",
            fontsize=9,
            fontweight="bold",
        )
    return figure


def _share(held: dict[str, Any], facts: dict[str, Any]) -> float:
    """How much of the whole model's weights these boxes are."""
    areas = [
        (box["rows"][1] - box["rows"][0]) * (box["columns"][1] - box["columns"][0])
        for boxes in held.values()
        for box in boxes
    ]
    return float(sum(areas) / (facts["shape"][0] * facts["shape"][1] * facts["layers"]))


def mesh_groups(facts: dict[str, Any]) -> Figure:
    """Ranks as the corners of a box: tp to the right, dp_shard downwards, dp_replicate to the back."""
    effects = {
        "tp": "same samples, parts of each tensor",
        "dp_shard": "other samples, parts of the states",
        "dp_replicate": "other samples, the same states",
    }
    figure, axes = _drawn(4.6)
    places = {
        facts["mesh"][replica][shard][part]: (160 * part + 110 * replica, 96 * shard - 54 * replica)
        for replica, shard, part in itertools.product(range(2), repeat=3)
    }
    handles = {}
    for (name, effect), color in zip(reversed(effects.items()), reversed(GROUPS), strict=True):
        for group in facts["groups"][name]:
            [handles[name]] = axes.plot(
                *zip(*map(places.get, group), strict=True), color=color, linewidth=3.5
            )
        listed = "  ".join(f"({', '.join(map(str, group))})" for group in facts["groups"][name])
        handles[name].set_label(f"{name}: {effect}\ngroups: {listed}")
    for rank, place in places.items():
        samples = ", ".join(map(str, facts["samples"][rank]))
        _box(axes, place, f"rank {rank}\nsamples {samples}", PAPER, color=INK)
    axes.set(xlim=(-45, 315), ylim=(115, -75))
    axes.legend(
        handles=[handles[name] for name in effects], frameon=False, loc="upper left", bbox_to_anchor=(0, 0)
    )
    return figure


def accumulation_window(facts: dict[str, Any]) -> Figure:
    """The computation of each rank, and under it what it sends; time goes to the right."""
    looks = {"forward": (None, 0.35), "backward": (None, 1), "all-reduce": (OTHER, 1), "step": (INK, 1)}
    figure, axes = _timeline(2.7)
    for rank, events in enumerate(facts["ranks"]):
        under = itertools.count(3 * rank + 0.8, 0.5)
        for event in events:
            color, alpha = looks[event["kind"]]
            sends = event["kind"] == "all-reduce"
            row, high = (next(under), 0.4) if sends else (3 * rank, 1)
            begin, end = event["begin_ms"], event["end_ms"]
            axes.barh(row, end - begin, high, begin, color=color or RANKS[rank], alpha=alpha)
            if event["kind"] == "backward":
                axes.text((begin + end) / 2, row, str(event["micro_batch"] + 1), color=PAPER, **CENTERED)
    axes.set_yticks([0, 3], ["rank 0", "rank 1"])
    _legend(figure, *((kind, color or RANKS[0], alpha) for kind, (color, alpha) in looks.items()))
    return figure


def background_save(facts: dict[str, Any]) -> Figure:
    """Steps and the call above, the bytes on the disk and the moment in which the folder has its name below."""
    figure = _figure(3.2)
    training, disk = figure.subplots(2, sharex=True, height_ratios=(1, 3))
    for number, (begin, end) in enumerate(facts["steps_ms"]):
        training.barh(0, end - begin, left=begin, color=RANKS[0], edgecolor=PAPER)
        training.text((begin + end) / 2, 0, str(number + 1), color=PAPER, **CENTERED)
    begin, end = facts["save_state_ms"]
    training.barh(0, end - begin, left=begin, color=GROUPS[0])
    training.set_title("the training loop", loc="left", fontsize=9, fontweight="bold")
    _bare(training)
    training.tick_params(labelbottom=False, labelleft=False)
    disk.annotate(f"save_state: {end - begin:.0f} ms,\ncopies to memory", ((begin + end) / 2, 1.3), (-6, -12),
                  xycoords=("data", "axes fraction"), textcoords="offset points", color=GROUPS[0], ha="right", va="top",
                  arrowprops={"arrowstyle": "-", "color": GROUPS[0]})  # fmt: skip
    size, named = facts["checkpoint_mb"], facts["named_ms"]
    written = [*facts["written_mb"], [named, facts["written_mb"][-1][1]]]
    disk.fill_between(*zip(*written, strict=True), color=OTHER)
    disk.axvline(named, color=OWN, linewidth=2)
    disk.text(
        named, size, "  complete: the folder\n  has its name", color=OWN, fontweight="bold", va="bottom"
    )
    disk.text(named, 0.6 * size, f"  {size:.0f} MB\n  on the disk")
    disk.set(xlabel="ms", ylabel="MB", ylim=(0, 1.4 * size))
    _legend(figure, ("training step", RANKS[0], 1), ("bytes of the files that are written", OTHER, 1))
    return figure


def launched_processes(facts: dict[str, Any]) -> Figure:
    """One machine above, two below; an arrow goes from a process to the one that it starts."""
    names = {"accel_cli": "accel launch", "accel_state.launching.machines.agent": "agent"}
    figure = _figure(5.4)
    worlds = _subfigures(figure, 2, height_ratios=(2, 3))
    for part, (title, world) in zip(worlds, facts.items(), strict=True):
        part.suptitle(title.capitalize(), fontsize=9, fontweight="bold")
        grid = part.subplots(1, len(world["machines"]), squeeze=False)[0]
        for number, (axes, machine) in enumerate(zip(grid, world["machines"], strict=True)):
            levels = len(machine["above"])
            wide = 2 / len(grid)
            axes.set(xlim=(-wide, wide), ylim=(levels + 0.5, -0.5), xticks=[], yticks=[])
            axes.set_title(f"machine {number}", fontsize=9)
            for side in axes.spines.values():
                side.set(visible=True, linestyle="--")
            for level, process in enumerate(machine["above"]):
                _process(axes, (0, level), (0, level - 1), names[process["command"]], process, INK)
            for at, rank in enumerate(machine["ranks"]):
                place = (at - (len(machine["ranks"]) - 1) / 2, levels)
                _process(axes, place, (0, levels - 1), f"rank {rank['rank']}", rank, RANKS[rank["rank"]])
    _note(
        figure,
        "main: --main_process_port, where all ranks meet",
        "+2 free: ports that gloo chooses, for data between ranks",
    )
    return figure


def _process(
    axes: Axes, place: tuple[float, float], parent: tuple[float, float], name: str, about: Any, fill: str
) -> None:
    ports = about["listens"]
    free = len([port for port in ports if port != "main_process_port"])
    said = " ".join(["main"] * (free < len(ports)) + [f"+{free} free"] * bool(free))
    if place[1]:
        axes.annotate(
            "", place, parent, arrowprops={"arrowstyle": "-|>", "color": INK, "shrinkA": 16, "shrinkB": 16}
        )
    edge = OWN if free < len(ports) else "none"
    _box(axes, place, f"{name}\n{said}".strip(), fill, edgecolor=edge, linewidth=3)


def streamed_layers(facts: dict[str, Any]) -> Figure:
    """Layers as rows; gray: how much of a layer is in memory; in color: it computes."""
    figure, axes = _timeline(3.9)
    layers = len(facts["computing_ms"])
    times = [when for when, _ in facts["in_memory"]]
    for layer, (begin, end) in enumerate(facts["computing_ms"]):
        shares = [layer + 0.4 - 0.8 * shares[layer] for _, shares in facts["in_memory"]]
        axes.fill_between(times, shares, layer + 0.4, step="post", color=OTHER)
        axes.barh(layer, end - begin, 0.5, begin, color=RANKS[0])
    axes.set_xlim(left=0)
    axes.set_yticks(range(layers), [f"layer {layer + 1}" for layer in range(layers)])
    title = f"{layers * facts['layer_mb']:.0f} MB of weights, a limit of {facts['limit_mb']:.0f} MB"
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
    _legend(figure, ("computes", RANKS[0], 1), ("in memory (height: how much)", OTHER, 1))
    return figure


def device_map(facts: dict[str, Any]) -> Figure:
    """Modules of a model on the left, the places of their weights on the right."""
    places = {
        "0": ("accelerator 0", "they stay there"),
        "cpu": ("host memory (cpu)", "brought block by block"),
        "disk": ("the checkpoint's files (disk)", "mapped, brought block by block"),
    }
    figure, axes = _drawn(3.9)
    modules = [name for name in facts["map"] if not name.endswith("rotary_emb")]
    for number, (place, (title, what)) in enumerate(places.items()):
        held = [name for name in modules if facts["map"][name] == place]
        size, budget = sum(facts["bytes"][name] for name in held), facts["budget"].get(place)
        of = f" of {budget / 1e6:.0f} MB" if budget else ""
        middle = (2.3, (number + 0.5) * len(modules) / len(places) - 0.5)
        for name in held:
            row = modules.index(name)
            axes.plot([0, middle[0]], [row, middle[1]], color=RANKS[number], linewidth=1)
            tied = "" if facts["bytes"][name] else " (tied)"
            _box(axes, (0, row), name.removeprefix("model.") + tied, RANKS[number])
        text = f"{title}\n{size / 1e6:.1f} MB{of}\n{what}"
        _box(axes, middle, text, PAPER, color=RANKS[number], edgecolor=RANKS[number])
    axes.text(0, -1, "module", fontweight="bold", **CENTERED)
    axes.text(2.3, -1, "place of its weights", fontweight="bold", **CENTERED)
    axes.set(xlim=(-0.7, 3.3), ylim=(len(modules) - 0.5, -1.4))
    return figure


def reading_samples(facts: dict[str, Any]) -> Figure:
    """A block for each option: a sample has the color of the rank that reads it, and the row of that which gets it."""
    figure = _figure(5)
    grid = figure.subplots(len(facts["options"]), sharex=True)
    for axes, (option, ranks) in zip(grid, facts["options"].items(), strict=True):
        seen: set[int] = set()
        for step, (row, rank) in itertools.product(range(3), enumerate(ranks)):
            batch = rank["batches"][step] if step < len(rank["batches"]) else []
            for at, sample in enumerate(batch):
                color = RANKS[row if sample in rank["read"] else 0]
                again = sample in seen
                seen.add(sample)
                _box(axes, (3 * step + at, row), str(sample), PAPER if again else color, color=INK if again else PAPER,
                     boxstyle=SQUARE, edgecolor=color, linestyle="--" if again else "-")  # fmt: skip
            if not batch:
                axes.text(3 * step + 0.5, row, "no batch", **CENTERED)
        axes.set(xlim=(-1, 8), ylim=(len(ranks) - 0.3, -0.7))
        axes.set_yticks(range(len(ranks)), [f"rank {row}" for row in range(len(ranks))])
        axes.set_xticks([0.5, 3.5, 6.5], ["step 1", "step 2", "step 3"])
        axes.set_title(option, loc="left", fontsize=9, fontweight="bold")
        _bare(axes)
    _note(
        figure,
        "Colour: the rank that reads a sample. Row: the rank that gets it.",
        "Dashed: read a second time in the epoch, to complete the last step.",
    )
    return figure


def tensor_dtypes(facts: dict[str, Any]) -> Figure:
    """Tensors of a step as rows, in the order in which they come; precisions as columns."""
    parts = {
        "between steps": ("weight, between steps", "optimizer state"),
        "forward": ("input", "weight, given to the layer", "output of first", "output of norm", "output of last",
                    "output of the model", "loss"),
        "backward": ("gradient of last's output", "gradient of norm's output", "gradient of first's output",
                     "gradient, reduced", "gradient of the weight"),
    }  # fmt: skip
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    colors = {"fp32": OTHER, "bf16": GROUPS[2], "fp16": GROUPS[0], "": "none"}
    layers = {"first": "Linear 1", "norm": "LayerNorm", "last": "Linear 2"}
    rows: dict[str, list[str]] = {}
    for part, names in parts.items():
        rows[part] = [""] * len(facts)
        for name in names:
            label = name
            for layer, shown in layers.items():
                label = label.replace(f" {layer}", f" {shown}")
            rows[label] = [short[dtypes[name]] for dtypes in facts.values()]
    figure, axes = _drawn(4.4)
    table = axes.table([*rows.values()], [[colors[cell] for cell in row] for row in rows.values()], "center",
                       rowLabels=[*rows], colLabels=[run.replace(", ", "\n") for run in facts],
                       bbox=(0.55, 0, 0.45, 1))  # fmt: skip
    table.auto_set_font_size(False)
    for (row, column), cell in table.get_celld().items():
        cell.set(edgecolor=PAPER if cell.get_text().get_text() in short.values() and row else "none")
        cell.get_text().set(color=PAPER if cell.get_text().get_text() in ("bf16", "fp16") and row else INK)
        if not row or (column == -1 and cell.get_text().get_text() in parts):
            cell.get_text().set_fontweight("bold")
    return figure


def learning_rates(facts: dict[str, Any]) -> Figure:
    """A line for each run; two processes take half as many steps."""
    figure = _figure(3.4)
    axes = figure.add_subplot(xlabel="optimizer step", yticks=(0, 0.5, 1), yticklabels=("0%", "50%", "100%"))
    for (name, rates), color in zip(facts["rates"].items(), (RANKS[0], RANKS[1], GROUPS[0]), strict=True):
        axes.plot(range(1, len(rates) + 1), rates,  ":s" if "False" in name else "-s", color=color, linewidth=2,
                  markevery=[-1], label=f"{name}: {len(rates)} steps, ends at {rates[-1]:.0%}")  # fmt: skip
    axes.grid(axis="y", color=LINE, linewidth=0.6)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.18))
    return figure


def _figure(height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def _subfigures(figure: Figure, count: int, **options: Any) -> Any:
    """Parts of a figure, below each other."""
    parts = figure.subfigures(count, **options)
    for part in parts:
        part.patch.set_visible(False)
    return parts


def _note(figure: Figure, *lines: str) -> None:
    """Words below all."""
    figure.supxlabel("\n".join(lines), x=0, ha="left", fontsize=9)


def _drawn(height: float) -> tuple[Figure, Axes]:
    """A figure without axes."""
    figure = _figure(height)
    axes = figure.add_subplot()
    axes.set_axis_off()
    return figure, axes


def _timeline(height: float) -> tuple[Figure, Axes]:
    """Rows from the top; time goes to the right."""
    figure = _figure(height)
    axes = figure.add_subplot(xlabel="ms")
    axes.invert_yaxis()
    axes.tick_params(left=False)
    return figure, axes


def _bare(axes: Axes) -> None:
    """Neither lines nor marks around what is drawn."""
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False, bottom=False)


def _box(
    axes: Axes, place: tuple[float, float], words: str, fill: str, *, color: str = PAPER,
    boxstyle: str = "round,pad=0.35", edgecolor: str = LINE, **edge: Any,
) -> None:  # fmt: skip
    """Words in a box."""
    look = {"boxstyle": boxstyle, "facecolor": fill, "edgecolor": edgecolor, **edge}
    axes.text(*place, words, color=color, fontweight="bold", bbox=look, **CENTERED)


def _rectangle(axes: Axes, place: tuple[float, float], size: tuple[float, float], **look: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(place, *size, clip_on=False, **look))


def _legend(figure: Figure, *entries: tuple[str, str, float]) -> None:
    """What each color means, below all."""
    from matplotlib.patches import Patch

    handles = [Patch(color=color, alpha=alpha, label=label) for label, color, alpha in entries]
    figure.legend(
        handles=handles, frameon=False, loc="outside lower left", ncols=len(entries), handlelength=1
    )


TITLES = {
    held_tensors: "What each of four ranks holds of a model with four layers",
    mesh_groups: "A mesh of eight ranks: dp_replicate x dp_shard x tp",
    accumulation_window: "One accumulation window of four micro-batches on two ranks",
    background_save: "An asynchronous save: one copy in memory, then training goes on",
    launched_processes: "Which process starts which, and who listens on which port",
    streamed_layers: "A forward through ten layers on disk, of which memory holds some",
    device_map: "A device map: where the weights of a model are between forwards",
    reading_samples: "Which of two ranks reads which of ten shuffled samples",
    tensor_dtypes: "Which tensors of a training step have which dtype",
    learning_rates: "The learning rate of each optimizer step, with one schedule on one process and on two",
}
"""The title of each picture, whose name is that of its function here and of its module in ``concept_runs``."""
