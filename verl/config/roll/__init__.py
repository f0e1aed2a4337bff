"""A configuration written for ROLL (alibaba/ROLL, RLVR), translated to this package's own options.

``keys.yaml`` holds a row a key, ``table`` reads it, ``keys`` has the functions that rows name, ``sections`` reads what
counts as a whole (engines, rewards), ``batch`` the batch arithmetic and devices, ``translate`` opens a file and puts
all together, ``command`` is ``verl roll``. ``fields.yaml`` lists all fields of ROLL at two releases. Nothing here
evaluates what a file says.
"""
