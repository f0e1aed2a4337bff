"""A configuration written for ROLL (alibaba/ROLL, RLVR), translated to this package's own options.

``read`` opens the YAML, ``table`` holds a row a key, ``workers`` the rows of the worker sections, ``rewards`` those of
reward workers, ``batch`` the batch arithmetic and devices, ``translate`` puts them together. ``fields`` lists all
fields of ROLL at two releases with what becomes of each; ``pipelines`` knows the files that are for something else.
Nothing here evaluates what a file says.
"""
