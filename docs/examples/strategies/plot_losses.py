"""Draw the loss curves that `char_llama.py` left in this folder: `losses.svg`."""

import json
from pathlib import Path

import matplotlib.pyplot as plt

STYLES = {"single": (6, "-"), "ddp": (4, "-"), "fsdp2": (2, "-"), "pp": (1.5, ":"), "deepspeed": (1, "--")}

plt.rcParams["svg.hashsalt"] = "losses"  # the same file every time
figure, axes = plt.subplots(figsize=(7, 4))
for name, (width, style) in STYLES.items():
    path = Path(f"losses_{name}.json")
    if path.exists():
        axes.plot(json.loads(path.read_text()), linewidth=width, linestyle=style, label=name)
axes.set_xlabel("step")
axes.set_ylabel("loss per character (nats)")
axes.grid(alpha=0.3)
axes.legend(title="strategy")
figure.tight_layout()
figure.savefig("losses.svg", metadata={"Date": None})
