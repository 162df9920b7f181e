"""The scanner finds the line of every value, whatever lies before it."""

from __future__ import annotations

from forebay.config.lines import index, line_of

TEXT = '''\
# [not.a.table]
top = 1
[a.b]   # comment with "quotes" and [brackets]
text = """
[fake]
x = 1 \\""" still text
"""
literal = \'\'\'
[fake.too]
\'\'\'
list = [
  "]", # ]
  { x = "}" },
]
after = 'it # is'
"quoted.name" = 1
dotted.deep = 2
[[items]]
name = 1
[items.inner]
y = 1
[[items]]
[[items.parts]]
z = 1
'''


def test_every_key_has_its_line() -> None:
    lines = index(TEXT)
    assert lines == {
        ("top",): 2,
        ("a", "b"): 3,
        ("a", "b", "text"): 4,
        ("a", "b", "literal"): 8,
        ("a", "b", "list"): 11,
        ("a", "b", "after"): 15,
        ("a", "b", "quoted.name"): 16,
        ("a", "b", "dotted"): 17,
        ("a", "b", "dotted", "deep"): 17,
        ("items", 0): 18,
        ("items", 0, "name"): 19,
        ("items", 0, "inner"): 20,
        ("items", 0, "inner", "y"): 21,
        ("items", 1): 22,
        ("items", 1, "parts", 0): 23,
        ("items", 1, "parts", 0, "z"): 24,
    }


def test_a_value_without_a_line_has_that_of_what_holds_it() -> None:
    lines = index(TEXT)
    assert line_of(lines, ("a", "b", "list", 1, "x")) == 11
    assert line_of(lines, ("items", 1, "missing")) == 22
    assert line_of(lines, ("none", "x")) is None
