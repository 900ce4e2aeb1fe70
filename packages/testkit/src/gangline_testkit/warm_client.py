"""Client of `warm`: python -I -S warm_client.py SOCKET MODULE WORDS stands for a process that the server forks for it.

The forked process gets the client's standard files, directory and variables. The client passes signals on, and ends as
the forked process ends. It imports little, because it is started often.
"""

import json
import os
import signal
import socket
import struct
import sys

NUMBER = struct.Struct("!q")
FIRST = getattr(signal, "SIGRTMIN", 0) + 6  # first of `gangline.launch.signals.HandedOn`, as a test compares
HANDED_ON = range(FIRST, FIRST + 5) if hasattr(signal, "SIGRTMIN") else ()
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *HANDED_ON)


def main() -> None:
    address, module, *words = sys.argv[1:]
    request = {"module": module, "words": words, "cwd": os.getcwd(), "environment": dict(os.environ)}
    content = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        socket.send_fds(server, [NUMBER.pack(len(content))], [0, 1, 2])
        server.sendall(content)
        pid = read_number(server)
        for signum in PASSED_ON:
            signal.signal(signum, lambda signum, frame: os.kill(pid, signum))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        code = read_number(server)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def read_number(server: socket.socket) -> int:
    """Return the next number that the server sends."""
    reply = server.recv(NUMBER.size, socket.MSG_WAITALL)
    if not reply:
        sys.exit("the server of warm commands is gone")
    return int(NUMBER.unpack(reply)[0])


if __name__ == "__main__":
    main()
