"""A dense reward that any model can raise, even one with random weights: write digits."""


def compute_score(solution_str: str, ground_truth: str | int | None = None) -> float:
    """How many of the wanted digits the response holds, as a share between 0 and 1.

    Args:
        ground_truth: the number of digits wanted; 5 if it is ``None`` or empty.
    """
    wanted = int(ground_truth or 5)
    return min(1.0, sum(character in "0123456789" for character in solution_str) / wanted)
