"""Routers: which experts each token goes through, with what weight. Each module cites the method's source."""
