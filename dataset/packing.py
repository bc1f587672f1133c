"""Best-fit decreasing: group samples into sequences of at most `max_length` tokens, without splitting or
dropping any.

Longest samples first, each into the fullest sequence that it fits. Samples of equal length are placed
together, so the work grows with the number of distinct lengths and not with samples x sequences (the
histogram form of the packing in "Efficient Sequence Packing without Cross-contamination", Krell et al.,
arXiv:2107.02027).
"""

from bisect import bisect_left, insort

import numpy as np


class OpenSequences:
    """Sequences that have room left, by the number of their free tokens."""

    def __init__(self):
        self.by_free: dict[int, list[np.ndarray]] = {}
        self.sizes: list[int] = []  # the keys of by_free, ascending

    def add(self, free: int, sequences: np.ndarray) -> None:
        """Add sequences with so many free tokens; full ones are left out."""
        if free == 0 or len(sequences) == 0:
            return
        if free not in self.by_free:
            insort(self.sizes, free)
            self.by_free[free] = []
        self.by_free[free].append(sequences)

    def take_fullest(self, length: int) -> tuple[int, np.ndarray]:
        """Remove all sequences of the least free tokens that fit a sample of this length: their free tokens
        (0: there are none) and their numbers."""
        at = bisect_left(self.sizes, length)
        if at == len(self.sizes):
            return 0, np.empty(0, np.int64)
        free = self.sizes.pop(at)
        return free, np.concatenate(self.by_free.pop(free))


def pack(lengths: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack samples into sequences, deterministically.

    lengths: int [S], each between 1 and max_length. Returns `packed_samples` int64 [S], the samples of one
    sequence after another (ascending within each), and `packed_offsets` int64 [P+1]: sequence p holds
    packed_samples[packed_offsets[p]:packed_offsets[p + 1]].

    Example: lengths [3, 6, 3, 4, 3] in sequences of 10. The 6 opens sequence 0 and leaves 4 free. The 4 fits
    there: it is full. For the three of length 3 sequence 1 is opened, which holds 10 // 3 = 3 of them and
    leaves 1 free. So the sequences are [1, 3] and [0, 2, 4]: packed_samples is [1, 3, 0, 2, 4],
    packed_offsets is [0, 2, 5].
    """
    lengths = np.asarray(lengths)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= max_length:
        raise ValueError(f"every length must be between 1 and {max_length}")
    # narrow: there may be 10^8 samples
    sequence_of = np.empty(len(lengths), dtype=np.min_scalar_type(len(lengths)))
    longest_first = np.argsort((max_length - lengths).astype(np.min_scalar_type(max_length)), kind="stable")
    counts = np.bincount(lengths, minlength=1)
    total = 0  # sequences so far
    room = OpenSequences()
    done = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        waiting = longest_first[done : done + counts[length]]  # all samples of this length
        done += len(waiting)
        while len(waiting):
            free, sequences = room.take_fullest(length)
            if free == 0:
                free = max_length
                needed = -(-len(waiting) // (free // length))
                sequences = np.arange(total, total + needed)
                total += needed
            # as many samples in each as fit: a sequence just used stays the fullest that fits the next one
            per_sequence = free // length
            used = sequences[: -(-len(waiting) // per_sequence)]
            placed = min(len(waiting), per_sequence * len(used))
            sequence_of[waiting[:placed]] = np.repeat(used, per_sequence)[:placed]
            waiting = waiting[placed:]
            in_last = placed - per_sequence * (len(used) - 1)
            room.add(free - per_sequence * length, used[:-1])
            room.add(free - in_last * length, used[-1:])
            room.add(free, sequences[len(used) :])
    packed_samples = np.argsort(sequence_of, kind="stable")
    sizes = np.bincount(sequence_of, minlength=total)
    return packed_samples, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
