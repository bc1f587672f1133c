"""Best-fit decreasing: group samples into rows of at most `max_length` tokens, without splitting or dropping
any.

Longest samples first, each into the fullest row that it fits. Samples of equal length are placed together, so
the work grows with the number of distinct lengths and not with samples x rows (the histogram form of the
packing in "Efficient Sequence Packing without Cross-contamination", Krell et al., arXiv:2107.02027).
"""

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack samples into rows, deterministically.

    lengths: int [S], each between 1 and max_length. Returns `row_samples` int64 [S], the samples row by row
    (ascending within a row), and `row_offsets` int64 [R+1]: row r holds
    row_samples[row_offsets[r]:row_offsets[r + 1]].

    Example: lengths [3, 6, 3, 4, 3] in rows of 10. The 6 opens row 0 and leaves 4 free. The 4 fits there: it
    is full. For the three of length 3 row 1 is opened, which holds 10 // 3 = 3 of them and leaves 1 free. So
    rows are [1, 3] and [0, 2, 4]: row_samples is [1, 3, 0, 2, 4], row_offsets is [0, 2, 5].
    """
    lengths = np.asarray(lengths)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= max_length:
        raise ValueError(f"every length must be between 1 and {max_length}")
    # narrow: there may be 10^8 samples
    row_of = np.empty(len(lengths), dtype=np.min_scalar_type(len(lengths)))
    by_length = np.argsort((max_length - lengths).astype(np.min_scalar_type(max_length)), kind="stable")
    counts = np.bincount(lengths, minlength=1)
    values = np.flatnonzero(counts)[::-1]
    rows = 0  # rows opened so far
    open_rows: dict[int, list[np.ndarray]] = {}  # free tokens -> the rows that have so many
    sizes: list[int] = []  # the keys of open_rows, ascending
    done = 0
    for length, count in zip(values, counts[values], strict=True):
        waiting = by_length[done : done + count]
        done += count
        while len(waiting):
            at = bisect_left(sizes, length)
            if at < len(sizes):
                free = sizes.pop(at)
                candidates = np.concatenate(open_rows.pop(free))
            else:
                free = max_length
                needed = -(-len(waiting) // (free // length))
                candidates = np.arange(rows, rows + needed)
                rows += needed
            # as many as fit: a row just used remains the fullest that fits the next sample
            each = free // length
            used = -(-len(waiting) // each)
            full, rest = candidates[:used], candidates[used:]
            placed = min(len(waiting), each * len(full))
            row_of[waiting[:placed]] = np.repeat(full, each)[:placed]
            waiting = waiting[placed:]
            last = placed - each * (len(full) - 1)  # samples in the last row
            for left, group in (
                (free - each * length, full[:-1]),
                (free - last * length, full[-1:]),
                (free, rest),
            ):
                _reopen(open_rows, sizes, int(left), group)
    row_samples = np.argsort(row_of, kind="stable")
    row_offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))]).astype(np.int64)
    return row_samples, row_offsets


def _reopen(open_rows: dict[int, list[np.ndarray]], sizes: list[int], free: int, group: np.ndarray) -> None:
    if free == 0 or len(group) == 0:
        return
    if free not in open_rows:
        insort(sizes, free)
    open_rows.setdefault(free, []).append(group)
