"""Routers: they choose the experts of each token and their weights. Each module cites the method's source."""
