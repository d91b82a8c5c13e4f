"""CPU cores of ranks, on described machines and on this one."""

from __future__ import annotations

import os

import pytest

from accel_state.errors import ConfigError
from accel_state.launching.numa import CpuTopology, cores_of_ranks, gpu_nodes, read_cpu_topology

# Two sockets with two NUMA nodes each; 4 CPUs per node: 2 cores with 2 threads, each core with a cache of its own.
NODES = {number: frozenset(range(4 * number, 4 * number + 4)) for number in range(4)}
PAIRS = {first: frozenset({first, first + 1}) for first in range(0, 16, 2)}
TWO_SOCKETS = CpuTopology(NODES, {cpu: cpu // 8 for cpu in range(16)}, PAIRS, PAIRS)


def test_a_rank_gets_the_node_of_its_device():
    assert cores_of_ranks("node", 2, TWO_SOCKETS, (3, 0)) == (NODES[3], NODES[0])


def test_a_rank_gets_the_socket_of_its_device():
    assert cores_of_ranks("socket", 2, TWO_SOCKETS, (3, 0)) == (frozenset(range(8, 16)), frozenset(range(8)))


def test_exclusive_cores_are_divided_by_whole_cores():
    assert cores_of_ranks("exclusive", 3, TWO_SOCKETS, (0, 0, 1)) == (PAIRS[0], PAIRS[2], NODES[1])
    with pytest.raises(ConfigError, match="node 0 has 2 cores for 3 ranks"):
        cores_of_ranks("exclusive", 3, TWO_SOCKETS, (0, 0, 0))


def test_core_complexes_are_used_in_turn():
    assert cores_of_ranks("core-complex", 3, TWO_SOCKETS, (1, 1, 1)) == (PAIRS[4], PAIRS[6], PAIRS[4])


def test_ranks_on_the_cpu_are_spread_over_the_nodes():
    assert cores_of_ranks("node", 8, TWO_SOCKETS) == tuple(NODES[rank // 2] for rank in range(8))


def test_a_system_without_a_description_is_an_error():
    with pytest.raises(ConfigError, match=r"--numa_binding node.*leave it out"):
        cores_of_ranks("node", 1, CpuTopology())


def test_this_machine_is_read():
    found = read_cpu_topology()
    mine = frozenset(os.sched_getaffinity(0))
    assert frozenset().union(*found.nodes.values()) == mine
    assert frozenset().union(*found.cores.values()) == mine == set(found.sockets)


def test_a_described_machine_is_read(tmp_path):
    for node in range(2):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{2 * node}-{2 * node + 1}\n")
    for cpu in range(4):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / "cache/index3").mkdir(parents=True)
        (folder / "topology/physical_package_id").write_text(f"{cpu // 2}\n")
        (folder / "topology/thread_siblings_list").write_text(f"{cpu}\n")
        (folder / "cache/index3/shared_cpu_list").write_text("0-3\n")
    found = read_cpu_topology(tmp_path, frozenset({0, 1, 3}))
    assert found.nodes == {0: {0, 1}, 1: {3}}
    assert (found.sockets, found.caches) == ({0: 0, 1: 0, 3: 1}, {0: {0, 1, 3}})


def test_the_nodes_of_gpus_follow_their_addresses(tmp_path):
    for address, node in (("0000:81:00.0", 1), ("0000:01:00.0", 0), ("0000:c1:00.0", -1)):
        (tmp_path / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        place = tmp_path / "sys/bus/pci/devices" / address
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{node}\n")
    assert gpu_nodes(3, None, tmp_path) == (0, 1, 0)
    assert gpu_nodes(2, "1,0", tmp_path) == (1, 0)
    assert gpu_nodes(1, "GPU-5e1", tmp_path) == ()
