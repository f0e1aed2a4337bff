"""Reward functions with the mistakes users make."""

import json
import sys


def raises(data_source, solution_str, ground_truth, extra_info=None):
    return float(json.loads("{" + solution_str)["answer"] == ground_truth)


def raises_in_validation(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["index"] < 8 and extra_info.get("split") == "test":
        raise KeyError("answer")
    return {"score": 1.0, "acc": 1.0}


def nan(data_source, solution_str, ground_truth, extra_info=None):
    return float("nan")


def nothing(data_source, solution_str, ground_truth, extra_info=None):
    pass


def text(data_source, solution_str, ground_truth, extra_info=None):
    return "1.0"


def pair(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0, {"format": 1}


def other_key(data_source, solution_str, ground_truth, extra_info=None):
    return {"reward": 1.0}


def leaves(data_source, solution_str, ground_truth, extra_info=None):
    sys.exit(3)


def batch_too_short(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0] * (len(solution_strs) - 1)


def other_signature(response, answer):
    return 1.0
