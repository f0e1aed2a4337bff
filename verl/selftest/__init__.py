"""``verl selftest``: whether what verl runs on gives the right numbers on this machine, and how fast it is.

``checks.py`` holds the trials that compare, ``figures.py`` those that measure, ``base.py`` what they share.
``command.py`` runs each in a process of its own and prints the table.
"""
