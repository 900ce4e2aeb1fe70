"""Client of `warm`: `python -I -S warm_client.py SOCKET MODULE ARGUMENTS` requests a fork and represents it.

The forked process gets the client's standard files, working directory and environment. The client forwards signals to
the forked process, and ends with its exit code or signal. It imports few modules, because tests start it often.
"""

import json
import os
import signal
import socket
import struct
import sys

NUMBER = struct.Struct("!q")
FIRST = getattr(signal, "SIGRTMIN", 0) + 6  # equals the first of `gangline.launch.signals.HandedOn`; a test checks this
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
    """Return the next number from the server. Exits if the connection is closed."""
    reply = server.recv(NUMBER.size, socket.MSG_WAITALL)
    if not reply:
        sys.exit("warm start failed: the connection to the warm server is closed")
    return int(NUMBER.unpack(reply)[0])


if __name__ == "__main__":
    main()
