"""The decoder: its options, its nodes, its modules, and what each of them computes."""
