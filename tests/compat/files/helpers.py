"""Stands beside a reward file."""


def count_digits(text):
    return sum(c.isdigit() for c in text)
