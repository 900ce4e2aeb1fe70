"""Data preparation from text files to a token store: read, clean, deduplicate, tokenise, write.

Files are assigned to tasks by their order and size alone. Any free process does the next task, whose result is
stored under the store's `.prepare` until the end. So the bytes of the store depend on the input and the options, not on
the number of processes or interruptions.
"""
