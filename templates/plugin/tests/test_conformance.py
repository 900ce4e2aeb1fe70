from gangline_testkit import TrackerSuite


class TestMine(TrackerSuite):
    choice = "track=mine"
    can = set()  # claims of the part; a warning names each further claim that would pass
