"""Import what ranks of tests use, once, in the server that they are forked from.

transformers, DeepSpeed, megatron-core or torchao take a rank 2 to 4 seconds of computing to import, which is most of
what a test with a small model computes. Imported here, they are shared, and left out of the garbage collections of all
ranks.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util

NEEDED = [
    "torch",
    "torch._dynamo",  # optimizers import it at their first step
    "torch.distributed",
    "torch.nn.parallel",
    "numpy",
    "cloudpickle",
    "accel_state.operations.collectives",
    "accel_train.accelerator",
    "accel_train.strategies.fsdp2.strategy",
    "accel_train.strategies.pipeline.strategy",
    "accel_train.strategies.tensor_parallel",
    "accel_ckpt.convert.accelerate",
    "accel_ckpt.loading.load_model",
    "accel_ckpt.loading.load_state",
    "accel_ckpt.saving.save_gathered",
    "accel_bigmodel",
    "torch.export._trace",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "encodings.idna",  # the name of the host of a store is encoded by it
    "testkit.worlds",
]
ENGINES = {
    "pytest": ["pytest"],  # test modules are rewritten to call it
    "torchao": ["torchao.float8", "torch._inductor.codegen.triton"],
    "megatron": [
        "megatron.core.models.gpt",
        "megatron.core.distributed",
        "megatron.core.optimizer.optimizer",
        "megatron.core.pipeline_parallel",
    ],
    "deepspeed": ["deepspeed.runtime.zero.muon.muon_optimizer", "distutils.ccompiler"],
    "transformers": [
        f"transformers.models.{model}.modeling_{model}"
        for model in ("bert", "gpt2", "llama", "mixtral", "t5")
    ],
}  # what is installed of them

for name in NEEDED:
    importlib.import_module(name)
for package, names in ENGINES.items():
    if importlib.util.find_spec(package) is not None:
        for name in names:
            importlib.import_module(name)
gc.collect()
gc.freeze()
