"""Where the seconds of a run went: each of them in exactly one account."""
