"""A module next to a reward file."""


def count_digits(text):
    return sum(c.isdigit() for c in text)
