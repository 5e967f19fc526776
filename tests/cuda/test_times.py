"""Check that times.py runs, at a tiny size, so that it's ready when there is a GPU."""

import times


def test_the_times_of_a_step_and_of_its_parts_are_printed(monkeypatch, capsys):
    monkeypatch.setattr(times, "SIZES", [(8, 4)])
    times.main()
    shown = capsys.readouterr().out
    assert "score" in shown and "rollout_metrics" in shown
