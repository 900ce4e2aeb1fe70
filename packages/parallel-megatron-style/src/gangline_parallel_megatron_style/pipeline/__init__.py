"""Pipeline parallelism: schedules as plain lists of actions, and their readers.

Schedules are torch-free; `stage`, `split_linear` and `executor` are not.
"""
