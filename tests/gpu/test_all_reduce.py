"""The first check: the GPUs reach each other. All that several of them do needs it, and it hangs where they
cannot."""

from tests.gpu import ranks

SECONDS = 60  # of which some ten are for starting the processes


def test_all_reduce(gpus, ranks_to_check, tmp_path, record_property):
    """All GPUs of this machine sum a tensor."""
    count = ranks_to_check()
    options = {"device": "cuda" if gpus else "cpu", "megabytes": 256 if gpus else 4}
    rates = ranks.run("all_reduce", count, tmp_path, SECONDS, **options)
    record_property("ranks", count)
    record_property("GB/s", round(min(rates), 1))
