"""Small parts for every contract, as subjects of the kit's tests and as examples for authors.

rows      a strategy that shards every matrix by rows over `dp_shard`, implements folds, and supports tp, cp and pp
          (module `axes`)
apart     a strategy whose replicas differ, and average their weights at intervals (local SGD)
lanes     a model edit with a module on its own fold, which emits a loss and metrics and has `after_step`
nan       a health check for steps that are not finite
previous  a callback with arrays that the run saves and validates
files     a checkpointer with one .npy file per box
numbers   a data source of counting numbers as text
lines     a tracker with one line per step
"""
