"""Explanations of a layout, as data without torch: strategies write explanations, planners read them.

explained    memory, traffic and actions of a layout (`Explained`)
topology     links inside a node, inside a rack, and beyond
work         work of a stage on a rank: matmuls and saved bytes
reliability  failures of a long run in closed forms
"""
