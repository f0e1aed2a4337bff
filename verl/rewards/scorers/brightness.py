"""A dense reward that a model climbs only if it sees: digits for a bright image, letters for a dark one."""

KINDS = {"bright": str.isdigit, "dark": str.isalpha}
WANTED = 4


def compute_score(solution_str: str, ground_truth: str) -> float:
    """How much of the response's first four characters is of the kind its image asks for, between 0 and 1.

    A response that is the same for every image scores one half at most, on images of both kinds.

    Args:
        ground_truth: ``bright`` or ``dark``.
    """
    return sum(map(KINDS[ground_truth], solution_str[:WANTED])) / WANTED
