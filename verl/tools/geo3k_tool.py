"""Geometry3K: the policy hands in an answer and reads whether it is right."""

from verl.rewards.scorers import geo3k
from verl.tools.gsm8k_tool import AnswerTool


class Geo3kTool(AnswerTool):
    """Scores an answer to a problem of Geometry3K, without a box."""

    def score(self, answer: str, ground_truth: str) -> float:
        return geo3k.compute_score(answer, ground_truth, use_boxed=False, format_score=0.0)
