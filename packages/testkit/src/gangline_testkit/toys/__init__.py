"""Small parts that use every contract, for tests of the kit and as examples for authors.

rows      a strategy that shards every matrix by rows over `dp_shard`, implements folds, and lets modules compute
          with shards along tp, cp and pp (`size_axes`)
apart     a strategy whose replicas differ, and average their weights now and then
lanes     a model edit whose module lies on a fold of its own, emits a loss and metrics, and adapts in `after_step`
nan       a health check
previous  a callback that holds arrays and has them validated
files     a checkpointer on plain files
numbers   a data source of counting words
lines     a tracker
"""
