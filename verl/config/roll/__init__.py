"""A configuration written for ROLL (alibaba/ROLL, RLVR or agentic), told in this package's own options.

``read`` opens the YAML, ``table`` holds a row a key, ``workers`` the rows of the worker sections, ``batch`` the batch
arithmetic, ``translate`` puts them together. Nothing here evaluates what a file says.
"""
