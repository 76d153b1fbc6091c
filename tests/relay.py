"""Relay: the only way to a server, which a test may cut. What was sent arrives late then, as after a lost link."""

import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from schemaless.topology import Topology

FILLERS = 4


class Relay:
    """Passes bytes in both directions until it is cut. A new connection gets no answer at all then."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.port: int = self._listener.getsockname()[1]
        self._passes = threading.Event()
        self._passes.set()
        self._fillers: list[socket.socket] = []
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self.mend()
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def cut(self) -> None:
        self._passes.clear()
        for _ in range(FILLERS):  # the system drops what asks for a connection while this queue is full
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", self.port))
            self._fillers.append(filler)

    def mend(self) -> None:
        while self._fillers:
            self._fillers.pop().close()
        self._passes.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                self._passes.wait()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._server_port))
        except OSError:  # it is dead
            client.close()
            return
        self._sockets.append(server)
        threading.Thread(target=self._pass, args=(server, client), daemon=True).start()
        self._pass(client, server)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._passes.wait()
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def through(topology: Topology, relays: Mapping[str, Relay]) -> Topology:
    """Returns the topology of who reaches these servers through relays."""
    clusters = {
        name: replace(
            cluster,
            nodes=tuple(
                replace(node, host="127.0.0.1", port=relays[node.name].port, socket=None)
                if node.name in relays
                else node
                for node in cluster.nodes
            ),
        )
        for name, cluster in topology.clusters.items()
    }
    return replace(topology, clusters=clusters)
