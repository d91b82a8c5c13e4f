"""Counts of copies."""

from accel_bigmodel import StreamStats


def test_the_rate_is_zero_before_the_first_copy():
    counts = {
        "seconds_waited": 0.0,
        "hits": 0,
        "misses": 0,
        "slot_bytes": 0,
        "resident_bytes": 0,
        "peak_bytes": 0,
    }
    assert StreamStats(bytes_moved=0, seconds_moving=0.0, **counts).rate == 0
    assert StreamStats(bytes_moved=6, seconds_moving=1.5, **counts).rate == 4
