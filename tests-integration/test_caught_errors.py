"""An error in a pass under FSDP2 that a script catches: on all ranks it goes on, on one rank it is named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_state.communication.torch_collectives import end_collectives
from accel_state.errors import CollectiveMismatchError
from testkit import worlds


class Full(RuntimeError):
    """As the error of a device without memory."""


def train(where: str, failing: tuple[int, ...]) -> tuple[list[float], str]:
    from accel_train import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10)
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    # Sizes that differ, so that gloo ends a process that takes the part of one block for that of another.
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 2))
    model = accelerator.prepare(model)
    losses = []

    def fail(*unused: object) -> None:
        raise Full("out of memory")

    for step in range(3):
        hook = None
        if step == 1 and accelerator.process_index in failing:
            register = "register_forward_hook" if where == "forward" else "register_full_backward_hook"
            hook = getattr(model[2], register)(fail)
        try:
            loss = model(torch.ones(4, 6)).sum()
            accelerator.backward(loss)
            losses.append(loss.item())
        except Full:
            model.zero_grad()
        except CollectiveMismatchError as error:
            end_collectives(dist.group.WORLD)  # as where the process ends
            return losses, str(error)
        except RuntimeError as error:  # of torch
            return losses, f"ended: {error}"
        finally:
            if hook is not None:
                hook.remove()
    return losses, ""


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_on_one_rank_it_is_named(where: str) -> None:
    environ = {"ACCELERATE_COLLECTIVE_TIMEOUT_REPORT": "2"}
    (_, ended), (_, text) = worlds.run(train, 2, where, (1,), environ=environ)
    assert "rank 1 is in the forward of Sequential after one that an error ended" in text
    assert "OutOfMemoryError" in text
    assert "out of memory" not in text  # by which scripts know the errors that they catch
    assert ended.startswith("ended: ")


def test_on_all_ranks_they_go_on() -> None:
    (losses, text), (same, _) = worlds.run(train, 2, "forward", (0, 1))
    assert text == ""
    assert len(losses) == 2
    assert losses == same
