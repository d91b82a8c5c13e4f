"""Count what the saved weights get right, in one process, with plain PyTorch and safetensors.

python digits_check.py digits/model/model.safetensors
"""

import sys

import torch
from digits import build_model, load_data
from safetensors.torch import load_file

model = build_model().eval()
model.load_state_dict(load_file(sys.argv[1]))
right = total = 0
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    for x, y in load_data()[1]:
        right += (model(x).argmax(dim=1) == y).sum().item()
        total += len(y)
print(f"{right} of {total} right ({right / total:.2%})")
