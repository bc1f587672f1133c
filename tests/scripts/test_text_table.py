"""Tables as text."""

from scripts.text_table import text_table


def test_columns_are_aligned_also_with_chinese():
    rows = [["run", "loss", "名字"], ["a", "0.5", "b"], ["训练一", "12.25", ""]]
    assert text_table(rows).split("\n") == ["run      loss  名字", "a         0.5     b", "训练一  12.25"]
