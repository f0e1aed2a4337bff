"""Reward of a secret that was asked for and told: 1, and less for each step of the way there."""

LETTERS = "xy"


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Score a conversation: a question, what the tool says, the policy's answer.

    Returns:
        0.1 for a question, 0.2 with an answer behind it, 0.4 if that is one of the letters, 1.0 if it is the secret.
    """
    turns = (extra_info or {}).get("num_turns")  # a text that is checked before the run has none
    if turns is not None and turns <= 2:
        return {"score": 0.0, "acc": 0.0}
    answer = solution_str[-1:]  # a turn is one token, and special ones are not in the text
    if answer == ground_truth:
        return {"score": 1.0, "acc": 1.0}
    return {"score": 0.4 if answer in LETTERS else 0.2 if answer != "?" else 0.1, "acc": 0.0}
