"""``verl view --text``: states, curves, phases, warnings and samples in a terminal; text of a model is text."""

from tests.view.conftest import sample, write_lines
from verl.view.command import main
from verl.view.text import sparkline


def test_runs_are_printed_with_curves_phases_warnings_and_samples(run_folders, capsys):
    hostile = sample(9, "u", "prompt \x1b[2J", "answer \x1b]0;title\x07 [red]x[/red]", 1.0)
    write_lines(run_folders[0] / "samples" / "9.jsonl", [hostile])
    assert main([*map(str, run_folders), "--text"]) == 0
    shown = capsys.readouterr().out
    assert "finished: 3 steps in 3 s." in shown and "critic/score/mean" in shown and "▁" in shown
    assert "update_actor 67%" in shown and "every reward was equal" in shown
    assert "\x1b" not in shown and "\\x1b[2J" in shown and "[red]x[/red]" in shown


def test_a_line_of_blocks_goes_from_the_least_to_the_greatest():
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▅" and sparkline([2.0, 2.0]) == "▄▄"
