"""The reward of counting letters: 1 for the right number in the last ``\\boxed{}``, else 0."""

from verl.rewards.scorers.math import last_boxed_only_string, remove_boxed


def char_count_reward_function(data_source, solution_str, ground_truth, extra_info=None):
    """Score a response; one without a box, or with a box that is not closed, is wrong."""
    boxed = last_boxed_only_string(solution_str)
    if boxed is None:
        return 0.0
    return float(remove_boxed(boxed).strip() == str(ground_truth))
