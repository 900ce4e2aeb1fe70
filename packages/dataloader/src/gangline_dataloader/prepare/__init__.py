"""From files of text to a token store: read, clean, drop doubles, tokenise, write.

Files are dealt out to tasks by their order and size alone. Each task is worked on by one process, whichever is free,
and what it gives is kept under the store's `.prepare` until the end; so the bytes of the store depend on the input
and the options, not on how many processes there were or how often they were killed.
"""
