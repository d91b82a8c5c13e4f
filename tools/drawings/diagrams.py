"""Diagrams: what ``prepare`` does, who reads which batch, a checkpoint's files, a stop by a signal."""

from __future__ import annotations

from collections.abc import Callable

from drawings.svg import Drawing


def prepare() -> Drawing:
    """What goes into ``prepare`` and what comes out."""
    rows = (
        ("model", ["on the device, wrapped or divided", "by the strategy: ddp, fsdp2, …"]),
        ("optimizer", ["holds the parameters of that model,", "steps when gradients are complete"]),
        ("loader", ["this rank's part of every epoch,", "on its device; a DataLoader still"]),
        ("scheduler", ["steps with the optimizer"]),
    )
    drawing = Drawing(
        860,
        404,
        "prepare takes the model, optimizer, loader and scheduler of the script and returns them for this rank",
    )
    drawing.text(100, 26, "your objects", anchor="middle", kind="small", color="soft")
    drawing.text(690, 26, "the same, for this rank", anchor="middle", kind="small", color="soft")
    drawing.box(246, 40, 240, 352, fill="ours-fill", stroke="ours")
    drawing.text(366, 66, "prepare()", anchor="middle", kind="bold", color="ours")
    steps = (
        ("1", "divide the data among ranks"),
        ("2", "check models and optimizers"),
        ("3", "convert to the precision"),
        ("4", "place on the device"),
        ("5", "wrap or divide the model, and"),
        ("", "checkpoint its activations"),
        ("6", "compile"),
        ("7", "give each optimizer the"),
        ("", "parameters that are there now"),
        ("8", "wrap optimizer and scheduler"),
    )
    for at, (mark, text) in enumerate(steps):
        drawing.text(260, 98 + at * 31, mark, kind="bold", color="ours")
        drawing.text(280, 98 + at * 31, text, kind="small")
    for at, (name, lines) in enumerate(rows):
        y = 40 + at * 90
        drawing.labelled(20, y + 8, 160, 62, [name])
        drawing.arrow([(180, y + 39), (246, y + 39)])
        drawing.arrow([(486, y + 39), (550, y + 39)], color="ours")
        drawing.labelled(550, y + 4, 290, 72, [name, *lines])
    return drawing


def batches() -> Drawing:
    """Which rank reads which samples of a shuffled epoch."""
    drawing = Drawing(
        820,
        330,
        "One order of samples, dealt to the ranks batch by batch; the first samples complete the last round",
    )
    order = (7, 2, 9, 4, 0, 5, 8, 1, 3, 6)
    colors = (("ours-fill", "ours"), ("warm-fill", "warm"))
    drawing.text(
        20, 26, "one order, drawn by rank 0 and the same on all ranks; batch_size=2, two ranks", kind="bold"
    )
    for at, sample in enumerate((*order, *order[:2])):
        fill, stroke = colors[(at // 2) % 2]
        padding = at >= len(order)
        drawing.box(
            20 + at * 60 + at // 2 * 8,
            44,
            54,
            40,
            fill="panel" if padding else fill,
            stroke=stroke,
            dashed=padding,
        )
        drawing.text(47 + at * 60 + at // 2 * 8, 69, str(sample), anchor="middle", kind="bold")
    drawing.text(
        20 + 12 * 60 + 34, 104, "repeated: dropped from metrics", kind="small", color="soft", anchor="end"
    )
    for rank in (0, 1):
        y = 150 + rank * 88
        fill, stroke = colors[rank]
        drawing.text(20, y + 32, f"rank {rank}", kind="bold", color=stroke)
        for step in range(3):
            x = 120 + step * 220
            padding = rank == 1 and step == 2
            drawing.box(x, y, 190, 56, fill="panel" if padding else fill, stroke=stroke, dashed=padding)
            pair = (*order, *order[:2])[(step * 2 + rank) * 2 : (step * 2 + rank) * 2 + 2]
            drawing.text(x + 95, y + 24, f"samples {pair[0]}, {pair[1]}", anchor="middle")
            drawing.text(x + 95, y + 43, f"step {step + 1}", anchor="middle", kind="small", color="soft")
    drawing.text(
        120,
        320,
        "A batch is found by arithmetic: its cost does not grow with the number of ranks.",
        kind="small",
        color="soft",
    )
    return drawing


def checkpoint() -> Drawing:
    """The files of a training state, and when the folder gets its name."""
    entries = (
        ("training/checkpoints/checkpoint_4/", ""),
        ("   model.safetensors", "weights by parameter name, divided or not"),
        ("   state.json, state.safetensors", "optimizers, schedulers, scaler, counters, registered objects"),
        ("   rank-00000.json, rank-00000.safetensors", "what is rank 0's own: random states, an open window"),
        ("   rank-00001.json, rank-00001.safetensors", "the same of rank 1, and so on"),
        ("   manifest.json", "every file with its size and checksum; written last"),
    )
    drawing = Drawing(
        860, 372, "The files of a checkpoint folder, and the order in which a save makes it complete"
    )
    drawing.box(14, 12, 832, 210)
    for at, (name, meaning) in enumerate(entries):
        y = 44 + at * 32
        drawing.text(
            32, y, name.replace("   ", "\u00a0\u00a0\u00a0"), kind="mono", color="ours" if at == 0 else "ink"
        )
        drawing.text(410, y, meaning, kind="small", color="soft")
    steps = (
        ("write", "to a temporary folder"),
        ("flush", "every file to the disk"),
        ("manifest", "sizes and checksums"),
        ("rename", "to the final name"),
        ("prune", "older checkpoints"),
    )
    for at, (name, meaning) in enumerate(steps):
        x = 14 + at * 169
        good = name == "rename"
        drawing.labelled(
            x,
            262,
            150,
            58,
            [name, meaning],
            fill="good-fill" if good else "panel",
            stroke="good" if good else "line",
        )
        if at:
            drawing.arrow([(x - 19, 291), (x, 291)])
    drawing.text(
        14,
        350,
        "A kill before the rename leaves the previous checkpoint as it was; after it, the new one is complete.",
        kind="small",
        color="soft",
    )
    return drawing


def stop() -> Drawing:
    """What happens between SIGTERM and the end of a job."""
    drawing = Drawing(
        880,
        330,
        "SIGTERM reaches one rank; all ranks stop after the same step, save, and exit with code 75",
    )
    left, right = 120, 866
    rows = {0: 92, 1: 172}
    drawing.line([(330, 50), (330, 228)], color="warm", dashed=True)
    drawing.text(330, 42, "SIGTERM arrives at rank 1", anchor="middle", kind="bold", color="warm")
    for rank, y in rows.items():
        drawing.text(20, y + 24, f"rank {rank}", kind="bold")
        drawing.line([(left, y + 19), (right, y + 19)])
        shift = 26 * rank
        for step in range(4):
            x = left + step * 106 + (shift if step < 3 else 0)
            last = step == 3
            width = 98 - (shift if step == 2 else 0)
            drawing.labelled(
                x,
                y,
                width,
                38,
                [f"step {101 + step}"],
                fill="ours-fill" if last else "panel",
                stroke="ours" if last else "line",
            )
        drawing.labelled(556, y, 150, 38, ["save_state()"], fill="good-fill", stroke="good")
        drawing.labelled(724, y, 128, 38, ["exit code 75"], fill="warm-fill", stroke="warm")
    drawing.line([(540, 76), (540, 228)], color="ours", dashed=True)
    drawing.text(
        540,
        248,
        "should_stop is true on all ranks, after the same step",
        anchor="middle",
        kind="bold",
        color="ours",
    )
    drawing.text(
        20,
        288,
        "Threads agree on the step through the store of the world while training continues; they use no collective.",
        kind="small",
        color="soft",
    )
    drawing.text(
        20,
        308,
        "The scheduler, or accel launch --resume, starts the job again, and it continues with the next batch.",
        kind="small",
        color="soft",
    )
    return drawing


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    "prepare": prepare,
    "batches": batches,
    "checkpoint": checkpoint,
    "stop": stop,
}
