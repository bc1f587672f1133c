"""Best-fit decreasing: group samples into rows of at most `max_length` tokens, without splitting or dropping any.

Longest samples first, each into the row with the least room that still holds it. Samples of one length are placed
together, so the work grows with the number of different lengths and not with samples x rows (the histogram form of the
packing in "Efficient Sequence Packing without Cross-contamination", Krell et al., arXiv:2107.02027).
"""

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of samples, the same for the same lengths.

    lengths: int [S], each between 1 and max_length. Returns `members` int64 [S], the samples row by row (rising within
    a row), and `borders` int64 [R+1]: row r holds members[borders[r]:borders[r + 1]].
    """
    lengths = np.asarray(lengths)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= max_length:
        raise ValueError(f"every length must be between 1 and {max_length}")
    row_of = np.empty(len(lengths), dtype=np.min_scalar_type(len(lengths)))  # narrow: there may be 10^8 samples
    by_length = np.argsort((max_length - lengths).astype(np.min_scalar_type(max_length)), kind="stable")
    counts = np.bincount(lengths, minlength=1)
    values = np.flatnonzero(counts)[::-1]
    rows = 0  # rows opened so far
    open_rows: dict[int, list[np.ndarray]] = {}  # room left -> the rows that have it
    rooms: list[int] = []  # the keys of open_rows, rising
    done = 0
    for length, count in zip(values, counts[values], strict=True):
        waiting = by_length[done : done + count]
        done += count
        while len(waiting):
            at = bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms.pop(at)
                candidates = np.concatenate(open_rows.pop(room))
            else:
                room = max_length
                needed = -(-len(waiting) // (room // length))
                candidates = np.arange(rows, rows + needed)
                rows += needed
            each = room // length  # the row just used is the fullest that fits the next one: it goes on being used
            used = -(-len(waiting) // each)
            full, rest = candidates[:used], candidates[used:]
            placed = min(len(waiting), each * len(full))
            row_of[waiting[:placed]] = np.repeat(full, each)[:placed]
            waiting = waiting[placed:]
            last = placed - each * (len(full) - 1)  # how many the last row got
            for left, group in ((room - each * length, full[:-1]), (room - last * length, full[-1:]), (room, rest)):
                _give_back(open_rows, rooms, int(left), group)
    members = np.argsort(row_of, kind="stable")
    borders = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))]).astype(np.int64)
    return members, borders


def _give_back(open_rows: dict[int, list[np.ndarray]], rooms: list[int], room: int, group: np.ndarray) -> None:
    if room == 0 or len(group) == 0:
        return
    if room not in open_rows:
        insort(rooms, room)
    open_rows.setdefault(room, []).append(group)
