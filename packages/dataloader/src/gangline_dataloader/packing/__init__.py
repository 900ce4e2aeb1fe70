"""Documents packed into sequences so that few are cut: the rule, and plans of it that lie beside a store."""
