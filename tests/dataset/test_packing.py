"""Packing: every sample once, no row too full, rows well filled, and the greedy rule it claims to follow."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.packing import pack


def rows_of(lengths, max_length):
    packed_samples, packed_offsets = pack(np.array(lengths, dtype=np.int64), max_length)
    return [packed_samples[a:b].tolist() for a, b in itertools.pairwise(packed_offsets)]


def best_fit_decreasing(lengths, max_length):
    """The textbook: longest first, each into the row with the least room that still holds it."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda row: rooms[row])] -= length
        else:
            rooms.append(max_length - length)
    return sorted(rooms)


def test_the_example_of_the_docstring():
    packed_samples, packed_offsets = pack(np.array([3, 6, 3, 4, 3]), 10)
    assert packed_samples.tolist() == [1, 3, 0, 2, 4] and packed_offsets.tolist() == [0, 2, 5]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), max_size=60))))
def test_rows_are_those_of_best_fit_decreasing(case):
    max_length, lengths = case
    rows = rows_of(lengths, max_length)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(row and row == sorted(row) for row in rows)
    rooms = [max_length - sum(lengths[i] for i in row) for row in rows]
    assert sorted(rooms) == best_fit_decreasing(lengths, max_length)
    assert rows == rows_of(lengths, max_length)
