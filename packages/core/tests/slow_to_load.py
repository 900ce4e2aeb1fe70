"""Stands for torch where a test needs a server that still loads: it takes as long, and no processor's time."""

import time

time.sleep(1.0)
