"""Where tensors are in a slot."""

import pytest
import torch

from accel_bigmodel.streaming.slot_layout import SlotLayout


def test_a_layout_keeps_values_shapes_and_formats():
    tensors = [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(3, dtype=torch.int64),
        torch.empty(0, 7, dtype=torch.float16),
        torch.tensor([True, False, True]),
        torch.randn(3, dtype=torch.complex64),
        torch.randn(6, 4).t(),
    ]
    layout = SlotLayout(tensors)
    views = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8))
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    for view, tensor in zip(views, tensors, strict=True):
        assert torch.equal(view, tensor)
        assert view.dtype == tensor.dtype
        assert view.stride() == tensor.stride()
        assert view.data_ptr() % 64 == 0 or not tensor.numel()


def test_a_layout_makes_tensors_dense():
    (view,) = SlotLayout([torch.zeros(1, 3).expand(4, 3)]).views(torch.empty(512, dtype=torch.uint8))
    assert view.stride() == (3, 1)


def test_a_layout_knows_what_it_describes():
    layout = SlotLayout([torch.zeros(2), torch.zeros(3)])
    assert layout.describes([torch.ones(2), torch.ones(3)])
    assert not layout.describes([torch.ones(2), torch.ones(4)])
    assert not layout.describes([torch.ones(2), torch.ones(3).half()])
    assert not SlotLayout([torch.ones(2, 3)]).describes([torch.ones(3, 2).t()])
    assert SlotLayout([torch.ones(3, 2).t()]).describes([torch.zeros(3, 2).t()])


def test_the_tensor_at_a_byte():
    layout = SlotLayout([torch.zeros(200), torch.zeros(0), torch.zeros(2)])
    assert [layout.piece_at(begin) for begin in (0, 799, 1024, 1030)] == [0, 0, 2, 2]


@pytest.mark.parametrize("mode", [True, False])
def test_views_are_of_the_kind_of_their_tensors(mode):
    with torch.inference_mode(mode):
        tensor = torch.zeros(2)
    layout = SlotLayout([tensor])
    for context in (True, False):
        with torch.inference_mode(context):
            (view,) = layout.views(torch.empty(512, dtype=torch.uint8))
            assert view.is_inference() is mode
