"""What a layout holds and does, as data without torch: what strategies explain, and planners read.

explained    Explained, and what it is made of
timeline     when each action of a step runs, given what it costs
work         what a node and all in it compute on a rank
"""
