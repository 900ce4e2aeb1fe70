from gangline_testkit import TrackerSuite


class TestMine(TrackerSuite):
    choice = "track=mine"
    can = set()  # what the part claims; the suite warns of what it could claim besides
