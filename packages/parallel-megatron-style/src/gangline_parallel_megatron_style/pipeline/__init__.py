"""Pipeline parallelism: schedules, their simulation, their drawing, and the executor that runs them.

A schedule has one list of actions per rank. Schedules import no torch; `stage`, `split_linear` and `executor` do.
"""
