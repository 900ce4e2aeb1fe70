"""Small parts that use every contract: what the kit tests itself with, and what an author may read as examples.

rows      a strategy that cuts every matrix along rows over `dp_shard`, implements folds, and lets modules compute
          with parts along tp, cp and pp (`size_axes`)
lanes     a model edit whose module lies on a fold of its own, emits a loss and metrics, and learns from `after_step`
nan       a health check
previous  a callback that holds arrays and has them validated
files     a checkpointer on plain files
numbers   a data source of counting words
lines     a tracker
"""
