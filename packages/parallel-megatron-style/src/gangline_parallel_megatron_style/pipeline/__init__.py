"""Pipeline parallelism: schedules as plain lists of actions, and what reads them.

Nothing here imports torch but `weight_gradients`' users: `split_linear`, `stage` and `executor`.
"""
