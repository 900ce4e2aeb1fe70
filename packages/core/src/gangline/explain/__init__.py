"""What a layout holds and does, as data without torch: what strategies explain, and planners read.

explained    Explained, and what it is made of
topology     links inside a node, inside a rack, and beyond
work         what a node and all nodes in it compute on a rank
reliability  failures of a long run in closed forms
"""
