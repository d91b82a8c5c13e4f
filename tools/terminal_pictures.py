"""Draw the pictures of terminals in the documentation, from real runs.

Each picture is a command that runs in a pseudo-terminal, in a folder of its own; what the terminal shows at the end
becomes an SVG file. Run from the repository root, where ``accel`` is installed:

    hatch run pictures [NAME ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyte
from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from testkit.terminals import Terminal

IMAGES = Path(__file__).parents[1] / "docs" / "images" / "terminal"
_LINES = 400
_PROMPT = "$ "
_SHOWN_FOLDER = b"/home/you/project"
# rich's, without fonts, which it would load from another site
_FORMAT = re.sub(r"\s*@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
# pixels for the tails of letters, in the font of 20 pixels; rich leaves 3.4 below its last line
_BELOW_BASELINE = 8.4
HEIGHT = re.compile(r'(clip-terminal">\s+<rect .*height="|viewBox="0 0 \S+ |stroke=.*? height=")([\d.]+)')
"""The height of the text, of the picture and of its frame, as rich writes them."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        name: name of the file, without suffix.
        command: what a user types, as the picture shows it.
        files: files that the folder holds before, by name.
        keys: pairs of a text to wait for, and what is typed when the command has written it.
        columns: width of the terminal.
        code: the exit code that the command must have.
        seconds: how long each text, and then the end, may take.
    """

    name: str
    command: str
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    keys: Sequence[tuple[str, str]] = ()
    columns: int = 100
    code: int = 0
    seconds: float = 300.0


FAILING = """\
import torch
from accel_train import Accelerator

accelerator = Accelerator()
model, optimizer = torch.nn.Linear(4, 1), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(3):
    accelerator.backward(model(torch.ones(8, 4)).sum())
    accelerator.print("step", step)
    if step == 1 and accelerator.process_index == 1:
        raise ValueError("a label is out of range")
    optimizer.step()
"""

HANG = """\
import time

import torch
from accel_train import Accelerator

accelerator = Accelerator()
if accelerator.process_index == 1:
    time.sleep(3600)
torch.distributed.all_reduce(torch.ones(5))
"""

SLOW = """\
import time

import torch
from accel_train import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(512, 8), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    if accelerator.process_index == 1:
        time.sleep(0.05)
    accelerator.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
"""

OLD = """\
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(0)
accelerator = Accelerator()
"""

CONFIG_KEYS = (
    ("Where will", "1\r"),
    ("compute on?", "\r"),
    ("share the work?", "3\r"),
    ("How many processes", "two\r"),
    ("expected an integer", "2\r"),
    ("wrap policy", "\r"),
    ("layer classes", "DecoderLayer\r"),
    ("reshard", "\r"),
    ("offload", "\r"),
    ("state dict type", "\r"),
    ("first process", "\r"),
    ("activation checkpointing?", "y\r"),
    ("checkpointed", "\r"),
    ("several kinds of parallelism", "\r"),
    ("mixed precision?", "3\r"),
    ("more options?", " \r"),
    ("micro-batches", "4\r"),
    ("to run.yaml?", "\r"),
)
SHORT = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator

accelerator = Accelerator()
data = TensorDataset(torch.randn(1000, 8), torch.randn(1000, 1))
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, drop_last=True))
for x, y in loader:
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
"""
LLAMA = """\
{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
 "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
 "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
"""

PICTURES = (
    Picture("failing-rank", "accel launch --cpu --num_processes 2 train.py", {"train.py": FAILING}, code=1),
    Picture(
        "hang",
        "accel launch --cpu --num_processes 2 --step_timeout 5 hang.py",
        {"hang.py": HANG},
        code=124,
    ),
    Picture(
        "stragglers", "accel launch --cpu --num_processes 2 --straggler_report slow.py", {"slow.py": SLOW}
    ),
    Picture("migrate", "accel migrate old.py", {"old.py": OLD}),
    Picture("config", "accel config --config_file run.yaml", keys=CONFIG_KEYS),
    Picture(
        "rehearse",
        "accel rehearse --num_processes 256 --num_machines 32 train.py",
        {"train.py": SHORT},
        code=1,
    ),
    Picture("doctor", "accel doctor"),
    Picture("doctor-world", "accel doctor --cpu --num_processes 2"),
    Picture("test", "accel test --cpu --num_processes 2"),
    Picture(
        "plan",
        "accel plan llama --devices 8 --memory 80GB --seq_length 2048",
        {"llama/config.json": LLAMA},
        columns=128,
    ),
)


def main() -> int:
    """Draw the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description="Draw the pictures of terminals.")
    parser.add_argument("names", nargs="*", help="pictures to draw; by default all")
    names = parser.parse_args().names
    known = [picture.name for picture in PICTURES]
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"there is no picture {unknown[0]}; the pictures are {', '.join(known)}")
    for picture in PICTURES:
        if not names or picture.name in names:
            path = IMAGES / f"{picture.name}.svg"
            path.write_text(draw(show(picture), picture), encoding="utf-8")
            print(path)
    return 0


def show(picture: Picture) -> list[Text]:
    """Run the command; returns the lines that the terminal shows at the end.

    Args:
        picture: what to run.

    Raises:
        RuntimeError: the command took too long, did not write what is waited for, or ended with another code.
    """
    with tempfile.TemporaryDirectory(prefix="accel-picture-") as folder:
        for name, text in picture.files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        command = ["bash", "-c", picture.command]
        with Terminal(command, _environment(picture, folder), folder, picture.columns, _LINES) as terminal:
            try:
                for text, keys in picture.keys:
                    terminal.wait_for(text, seconds=picture.seconds)
                    terminal.send(keys)
                code = terminal.code(picture.seconds)
            except AssertionError as error:
                raise RuntimeError(f"{picture.command}: {error}") from error
    if code != picture.code:
        raise RuntimeError(
            f"{picture.command} ended with {code}, not {picture.code}:\n{terminal.transcript()}"
        )
    screen = pyte.Screen(picture.columns, _LINES)
    pyte.ByteStream(screen).feed(terminal.raw.replace(folder.encode(), _SHOWN_FOLDER))
    lines = [_line(screen, number) for number in range(_LINES)]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    return lines


def draw(lines: Sequence[Text], picture: Picture) -> str:
    """The SVG of a terminal that shows the command and its output."""
    console = Console(record=True, width=picture.columns, file=io.StringIO(), force_terminal=True)
    console.print(Text(_PROMPT, style="bold green").append(picture.command, style="bold"))
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop", crop=True)
    title = picture.command.split(" ")[0]
    svg = console.export_svg(title=title, theme=MONOKAI, code_format=_FORMAT, unique_id=picture.name)
    return with_room_below(svg)


def with_room_below(svg: str) -> str:
    """A picture whose clip and frame end below the tails of its last line; one that has the room stays as it is.

    Args:
        svg: a picture that ``draw`` made, or rich.
    """
    baseline = max(float(y) for y in re.findall(r'y="([\d.]+)" textLength', svg))
    added = baseline + _BELOW_BASELINE - min(float(found[2]) for found in HEIGHT.finditer(svg))
    return HEIGHT.sub(lambda found: f"{found[1]}{float(found[2]) + added:.1f}", svg)


def _environment(picture: Picture, folder: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "CI")
    }
    return kept | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "TERM": "xterm-256color",
        "COLUMNS": str(picture.columns),
        "XDG_CONFIG_HOME": f"{folder}/.home",
        "PS1": _PROMPT,
        "ACCEL_DEVICE_COUNT": "0",
    }


def _line(screen: pyte.Screen, number: int) -> Text:
    text = Text()
    cells = (screen.buffer[number][column] for column in range(screen.columns))
    for style, alike in itertools.groupby(cells, key=_style):
        text.append("".join(cell.data for cell in alike), style=style)
    text.rstrip()
    return text


def _style(cell: pyte.screens.Char) -> str:
    words = ["bold"] * cell.bold + ["italic"] * cell.italics + ["reverse"] * cell.reverse
    for name, color in (("", cell.fg), ("on ", cell.bg)):
        if color != "default":
            known = {"brown": "yellow"}.get(color, color)
            words.append(
                name
                + (f"#{known}" if re.fullmatch("[0-9a-f]{6}", known) else known.replace("bright", "bright_"))
            )
    return " ".join(words) or "default"


if __name__ == "__main__":
    sys.exit(main())
