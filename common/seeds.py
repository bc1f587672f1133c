"""Random numbers that need no state: each place in a run has its own."""

from hashlib import blake2b


def draw(seed: int, update: int, sample: int, *more: int) -> int:
    """64 random bits, a function of the seed of the run, the update, the sample and what else tells draws
    apart: a run that was killed draws the same again, on any number of ranks."""
    place = " ".join(map(str, (seed, update, sample, *more)))
    return int.from_bytes(blake2b(place.encode(), digest_size=8).digest(), "little")
