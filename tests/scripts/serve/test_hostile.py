"""The hostile client, for some seconds: the server answers the honest ones as if it were not there."""

from tests.scripts.serve import hostile


def test_honest_answers_beside_a_hostile_client_are_those_of_a_quiet_server(weights, monkeypatch):
    monkeypatch.setattr(hostile, "STREAMS", 8)
    monkeypatch.setattr(hostile, "CONNECTIONS", 100)
    monkeypatch.setattr("sys.argv", ["hostile.py", *weights, "--seconds", "2"])
    found = hostile.measure(hostile.parse_args())
    assert found["wrong"] == [] and found["exit_status"] == 0 and "Traceback" not in found["log"]
    assert found["answers"] >= 8 and found["attacks"] > 0
    early, late = found["memory_mb"]
    assert late < early + hostile.CACHE
