"""Pipeline parallelism: schedules as plain lists of actions, and what reads them.

Schedules are torch-free; `stage`, `split_linear` and `executor` are not.
"""
