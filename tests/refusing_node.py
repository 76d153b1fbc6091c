"""RefusingNode: a relay in front of one MySQL server, which refuses every statement while a test says so.

It looks at nothing but packet heads. A command of the client begins a packet with the number 0. All packets before that
belong to the handshake, and pass.
"""

import json
import socket
import threading
from contextlib import suppress
from pathlib import Path

UNKNOWN_ERROR = 1105
"""ER_UNKNOWN_ERROR, which nobody lists."""


class RefusingNode:
    """Refuses all statements, but for those that begin like one of `spared`."""

    def __init__(self, server_port: int, spared: tuple[bytes, ...] = ()) -> None:
        self._server_port = server_port
        self._spared = spared
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.refuses = threading.Event()
        self.refused = 0
        self.connected = 0
        """How many clients are connected now."""
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "RefusingNode":
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += [client, server]
                threading.Thread(target=self._relay_commands, args=(client, server), daemon=True).start()
                threading.Thread(target=self._relay_answers, args=(server, client), daemon=True).start()

    def _relay_commands(self, client: socket.socket, server: socket.socket) -> None:
        self.connected += 1
        with suppress(OSError), client.makefile("rb") as packets:
            while head := packets.read(4):
                packet = head + packets.read(int.from_bytes(head[:3], "little"))
                if head[3] == 0 and self.refuses.is_set() and not packet[5:].startswith(self._spared or b"\0"):
                    self.refused += 1
                    error = b"\xff" + UNKNOWN_ERROR.to_bytes(2, "little") + b"#HY000" + b"not now"
                    client.sendall(len(error).to_bytes(3, "little") + b"\x01" + error)
                else:
                    server.sendall(packet)
        for each in (client, server):  # a close alone wakes nobody who reads from it
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self.connected -= 1

    def _relay_answers(self, server: socket.socket, client: socket.socket) -> None:
        with client, server, suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)


def topology_through(topology: Path, node: str, relay: RefusingNode, path: Path) -> Path:
    """Writes a topology file in which a node is reached through the relay."""
    document = json.loads(topology.read_text())
    for cluster in document["clusters"].values():
        for found in cluster:
            if found["name"] == node:
                found |= {"host": "127.0.0.1", "port": relay.port, "socket": None}
    path.write_text(json.dumps(document))
    return path
