"""Stand-in for torch in tests of a server that is still loading: the import takes as long but uses no CPU time."""

import time

time.sleep(1.0)
