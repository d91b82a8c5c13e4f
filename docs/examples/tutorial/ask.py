"""Answer with the trained model, whose weights are partly in memory and partly on disk."""

import sys

from dates import Model, answer

from accel_bigmodel import (
    explain_device_map,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)

with init_empty_weights():
    model = Model().eval()
budget, blocks = {"cpu": "420KB"}, ["Block"]
device_map = infer_auto_device_map(model, max_memory=budget, no_split_module_classes=blocks)
print(explain_device_map(model, device_map, max_memory=budget, no_split_module_classes=blocks))
model = load_checkpoint_and_dispatch(model, "dates/model", device_map=device_map)
for question in sys.argv[1:]:
    print(question, "=", answer(model, question))
