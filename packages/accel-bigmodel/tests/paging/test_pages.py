"""Which pages hold the weights of a group, and which stay in memory."""

from __future__ import annotations

import torch

from accel_bigmodel.paging.pages import extents_of, keep_resident
from accel_ckpt.format.memory import map_file


def test_extents_are_whole_pages_and_shared_ones_are_one_object(tmp_path):
    path = tmp_path / "f"
    page = 4096
    path.write_bytes(bytes(20 * page + 100))
    content = map_file(path, 20 * page + 100)
    first = content[10 : 2 * page + 10].view(torch.uint8)
    second = content[2 * page + 10 : 5 * page]
    third = content[20 * page :]
    strided = content[8 * page : 12 * page].view(4, page)[:, 5:10]
    groups = [[first, torch.ones(5)], [second, third, content[:0]], [strided, second[:1]], []]
    found = extents_of(groups)
    base = content.data_ptr()

    def places(extents):
        return [((e.pages.data_ptr() - base) / page, e.nbytes / page, sorted(e.users)) for e in extents]

    shared = (2.0, 1.0, [0, 1, 2])
    assert places(found[0]) == [(0.0, 2.0, [0]), shared]
    assert places(found[1]) == [shared, (3.0, 2.0, [1]), (20.0, 100 / page, [1])]
    assert places(found[2]) == [shared, (8.0, 4.0, [2])]
    assert found[3] == []
    assert found[0][1] is found[1][0] is found[2][0]


def test_what_stays_is_spread_over_the_model(tmp_path):
    page = 4096
    path = tmp_path / "f"
    path.write_bytes(bytes(100 * page))
    content = map_file(path, 100 * page)
    groups = extents_of([[content[i * 10 * page : (i + 1) * 10 * page]] for i in range(10)])
    assert keep_resident(groups, 70 * page) == 50 * page
    assert [group[0].resident for group in groups] == [False, True] * 5
    for pages, kept in ((0, 0), (29, 0), (30, 10), (99, 70), (100, 100)):
        fresh = extents_of([[content[i * 10 * page : (i + 1) * 10 * page]] for i in range(10)])
        assert keep_resident(fresh, pages * page) == kept * page
