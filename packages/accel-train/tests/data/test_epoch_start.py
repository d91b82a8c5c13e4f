"""Beginning an epoch is a straight line."""

import gc
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import accel_train.data
from accel_train.data import prepare_data_loader

FOLDER = str(Path(accel_train.data.__file__).parent)


def moves(function):
    """The files of accel_train.data that are entered one after another, as `file:function`."""
    seen: list[str] = []

    def on_call(frame, event, _argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDER):
            name = code.co_filename.removeprefix(FOLDER)
            if not seen or not seen[-1].startswith(f"{name}:"):
                seen.append(f"{name}:{code.co_name}")

    gc.collect()  # what earlier tests have left ends now, and not among the calls that are counted
    gc.disable()
    sys.setprofile(on_call)
    try:
        kept = function()
    finally:
        sys.setprofile(None)
        gc.enable()
    del kept
    return seen


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_beginning_an_epoch_moves_between_few_files(shuffle, ranks):
    loader = prepare_data_loader(
        DataLoader(range(16), batch_size=4, shuffle=shuffle), num_processes=ranks, process_index=0
    )
    list(loader)
    found = moves(lambda: iter(loader))
    # Of several ranks, each begins random states of its own for reading.
    assert len(found) <= (15 if ranks == 1 else 17), found


def test_an_epoch_that_could_not_begin_is_not_live():
    class Refusing:
        batch_size = 2

        def __iter__(self):
            raise LookupError("no order")

        def __len__(self):
            return 2

    loader = prepare_data_loader(
        DataLoader(range(4), batch_sampler=Refusing()), num_processes=1, process_index=0
    )
    with pytest.raises(LookupError, match="no order"):
        iter(loader)
    assert loader.ledger.live == []
    assert loader.iteration == 0
