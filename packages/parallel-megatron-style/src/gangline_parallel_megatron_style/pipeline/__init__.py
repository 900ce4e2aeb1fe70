"""Pipeline parallelism: schedules as plain lists of actions, their simulation and drawing, and their executor.

Schedules import no torch; `stage`, `split_linear` and `executor` do.
"""
