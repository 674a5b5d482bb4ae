"""Traces as strace writes them, and who is at the other end of sockets of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from bench.lab.socket_peers import CLIENTS, ITSELF, LINKS, OTHERS, Peers
from bench.lab.system_calls import Send, read

TRACE = r"""
71 1700000000.250000 sendto(3<UNIX-STREAM:[22->23,"/tmp/m/node"]>, ""..., 1, 0, NULL, 0) = 1
72 1700000000.500000 write(9<anon_inode:[eventfd:7]>, ""..., 8 <unfinished ...>
71 1700000000.500001 sendmsg(6<TCP:[127.0.0.1:80->127.0.0.1:41000]>, {msg_name=NULL, msg_iov=[{iov_base=""...}]}, 0) = 9
72 1700000000.500002 <... write resumed>) = 8
71 1700000001.000000 connect(7<UNIX-STREAM:[31]>, {sa_family=AF_UNIX, sun_path="/tmp/x/redis"}, 110) = 0
71 1700000001.250000 sendto(7<UNIX-STREAM:[31]>, ""..., 5, 0, NULL, 0) = 5
71 1700000001.500000 connect(8<TCP:[41]>, {sa_family=AF_INET, sin_port=htons(1883)}, 16) = 0
71 1700000001.750000 +++ exited with 0 +++
"""


def test_a_trace_is_read() -> None:
    assert list(read(TRACE, {71: 70, 72: 70})) == [
        Send(1700000000.25, 70, 'UNIX-STREAM:[22->23,"/tmp/m/node"]'),
        Send(1700000000.5, 70, "anon_inode:[eventfd:7]"),
        Send(1700000000.500001, 70, "TCP:[127.0.0.1:80->127.0.0.1:41000]"),
        Send(1700000001.0, 70, "UNIX-STREAM:[31]", "/tmp/x/redis"),
        Send(1700000001.25, 70, "UNIX-STREAM:[31]", "/tmp/x/redis"),
        Send(1700000001.5, 70, "TCP:[41]", "1883"),
    ]


def _tcp(end: socket.socket) -> str:
    return "TCP:[{}:{}->{}:{}]".format(*end.getsockname(), *end.getpeername())


def test_peers_are_told_by_who_holds_the_other_end(tmp_path: Path) -> None:
    """A child holds a copy of one end of a pair; all else is this process's."""
    here, there = socket.socketpair()
    path = str(tmp_path / "listening")
    with (
        here,
        there,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as served,
        socket.socket(socket.AF_UNIX) as waiting,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[there.fileno()]) as child,
    ):
        waiting.bind(path)
        waiting.listen()
        pair = f"UNIX-STREAM:[{os.fstat(here.fileno()).st_ino}->{os.fstat(there.fileno()).st_ino}]"
        own = os.getpid()
        peers = Peers({child.pid}, own)
        assert peers.at(Send(0, own, pair)) == {own, child.pid}
        assert peers.kind(Send(0, own, pair)) == ITSELF
        assert peers.kind(Send(0, 1, pair)) == LINKS
        assert peers.kind(Send(0, 1, _tcp(served))) == CLIENTS
        assert peers.at(Send(0, 1, _tcp(client))) == {own}
        assert peers.at(Send(0, 1, "UNIX-STREAM:[31]", path)) == {own}
        assert peers.at(Send(0, 1, "TCP:[31]", str(listener.getsockname()[1]))) == {own}
        assert peers.kind(Send(0, 1, "UNIX-STREAM:[31]")) == OTHERS
        assert peers.kind(Send(0, 1, "anon_inode:[eventfd:7]")) == ITSELF
        assert Peers((), 0).kind(Send(0, 1, _tcp(served))) == OTHERS
        child.communicate(b"\n")
